/* The tensors of matrices that are quantised when they are loaded. Called by the store and by exports. */
#ifndef ENGRAFT_BACKEND_QUANTISE_H
#define ENGRAFT_BACKEND_QUANTISE_H

#include "graph/graph.h"

/* Where the tensors of a quantised matrix go; parts that are NULL are made and thrown away. */
typedef struct egi_quantised_memory {
  void *parts[EGI_QUANTISED_PARTS];
} egi_quantised_memory;
/* On the pool; beside the results it holds the matrix where that has no bytes of its own, and its scales. EG_ERROR_DATA
 * names a matrix with numbers that are not finite. */
eg_status egi_quantise(eg_context *ctx, const egi_quantisation *quantisation, const egi_quantised_memory *memory);
/* Bytes that a tensor has. */
uint64_t egi_quantised_bytes(const egi_quantisation *quantisation, egi_quantised_tensor part);

/* Tensors that would be made at load get bytes in the module's arena: before a file is written. */
eg_status egi_quantise_module(egi_module *module);

#endif
