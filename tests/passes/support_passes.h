/* Shared by the tests of passes: a graph out of ONNX text, passes run on it, and its nodes in a short form that does
 * not depend on generated names. */
#ifndef ENGRAFT_TESTS_PASSES_SUPPORT_PASSES_H
#define ENGRAFT_TESTS_PASSES_SUPPORT_PASSES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "backend/backend.h"
#include "passes/passes.h"

typedef struct pass_fixture {
  eg_context *ctx;
  egi_module *module; /* of the last parse */
  egi_graph *graph;
  egi_text text;
  egi_arena arena; /* for what a test asks passes to list */
} pass_fixture;

int pass_set_up(void **state);
int pass_tear_down(void **state);

/* Parses a whole model; the module replaces the one before. */
void pass_parse(pass_fixture *fixture, const char *text);
/* As pass_parse() of a graph alone, opset 23, with inferred types. */
void pass_graph(pass_fixture *fixture, const char *graph_text);
/* Runs passes, names separated by commas; the test fails when one does. */
void pass_run(pass_fixture *fixture, const char *names, const egi_adapt_options *adapt);
eg_status pass_try(pass_fixture *fixture, const char *names, const egi_adapt_options *adapt);
/* Runs one pass twice; the second time it must change nothing. */
void pass_run_settled(pass_fixture *fixture, const char *name);

/* A line a node: "%2 = MatMul(%1, w)", results numbered in order of execution, small constants by content, attributes
 * as <name=value>; then "-> name=%3" for each output. Compared line by line. */
const char *pass_nodes(pass_fixture *fixture);
void pass_expect(pass_fixture *fixture, const char *expected);
/* How many nodes of an operator there are. */
unsigned pass_count(const pass_fixture *fixture, egi_op op);
/* The last error holds `part`. */
void pass_expect_error(pass_fixture *fixture, const char *part);

#endif
