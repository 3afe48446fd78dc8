/* Shared by the two halves of the text parser: values and tensors, nodes and graphs. */
#ifndef ENGRAFT_GRAPH_TEXT_PARSE_H
#define ENGRAFT_GRAPH_TEXT_PARSE_H

#include "graph/text_lex.h"

typedef struct egi_parser {
  egi_lexer lexer;
  egi_module *module;
  unsigned depth; /* of nested graphs */
} egi_parser;

/* A type as it is written: dims is valid when rank >= 0. */
typedef struct egi_parsed_type {
  eg_dtype dtype;
  int rank;
  egi_dim dims[EGI_MAX_RANK];
} egi_parsed_type;

bool egi_parser_is_at_type(const egi_parser *parser);
eg_status egi_parse_type(egi_parser *parser, egi_parsed_type *out_type);
/* "{1, 2}" or "[...]" behind a type: fills weight->bytes. The type's dims must be numbers. */
eg_status egi_parse_tensor_content(egi_parser *parser, const egi_parsed_type *type, egi_weight *weight);
/* "<a = 1, b: float = 2>", the present word being '<'. Owned by the module's arena. */
eg_status egi_parse_attributes(egi_parser *parser, egi_attribute **out_attributes, uint16_t *out_count);
/* ": float = 2" or "= 2" behind an attribute's name. */
eg_status egi_parse_attribute_value(egi_parser *parser, egi_attribute *attribute);
/* A graph from its name on. */
eg_status egi_parse_graph(egi_parser *parser, egi_graph *graph);
/* "{ node* }" */
eg_status egi_parse_nodes(egi_parser *parser, egi_graph *graph);
/* "(a, b)": values by name, made when new. */
eg_status egi_parse_value_names(egi_parser *parser, egi_graph *graph, egi_value_id **out_values, uint16_t *out_count);
eg_status egi_parser_value(egi_parser *parser, egi_graph *graph, const char *name, egi_value_id *out_value);

#endif
