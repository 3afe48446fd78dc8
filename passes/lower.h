/* The inside of lower_operators: rules that replace a node of an operator outside ops.def by nodes of rows in it. */
#ifndef ENGRAFT_PASSES_LOWER_H
#define ENGRAFT_PASSES_LOWER_H

#include "passes/passes.h"

typedef struct egi_lowering {
  egi_emitter emit;
  const egi_node *node; /* as it was; it is no longer in the graph */
  const egi_uses *uses; /* of the graph before the pass */
  egi_value_id results[4];
} egi_lowering;

/* Sets `results` of the wanted outputs; emitter errors are looked at afterwards. Inputs have known types and ranks. */
typedef eg_status (*egi_lowering_rule)(egi_lowering *lowering);

egi_value_id egi_lowering_input(const egi_lowering *lowering, unsigned index);
bool egi_lowering_wants(const egi_lowering *lowering, unsigned output);
const egi_value *egi_lowering_value(const egi_lowering *lowering, egi_value_id value);
/* Size of an axis when it is a number. */
bool egi_lowering_size(const egi_lowering *lowering, egi_value_id value, int axis, int64_t *out_size);
eg_status egi_lowering_fail(const egi_lowering *lowering, eg_status status, const char *reason);
/* One node with a list input `axes` and no attributes, or with one integer attribute. */
egi_value_id egi_emit_axes(egi_emitter *emit, egi_op op, egi_value_id a, const int64_t *axes, uint32_t count);
egi_value_id egi_emit_with_int(egi_emitter *emit, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                               const char *name, int64_t value);
/* i64 [end - start]: sizes of the axes from start to end. */
egi_value_id egi_emit_sizes(egi_emitter *emit, egi_value_id a, int start, int end);

/* lower_loss.c, lower_einsum.c, lower_model.c */
eg_status egi_lower_cross_entropy(egi_lowering *lowering);
eg_status egi_lower_log_likelihood(egi_lowering *lowering);
eg_status egi_lower_einsum(egi_lowering *lowering);
eg_status egi_lower_dynamic_quantize(egi_lowering *lowering);
eg_status egi_lower_tensor_scatter(egi_lowering *lowering);
eg_status egi_lower_causal_convolution(egi_lowering *lowering);

/* lower_norms.c */
eg_status egi_lower_rms_normalization(egi_lowering *lowering);
eg_status egi_lower_skip_rms_normalization(egi_lowering *lowering);
eg_status egi_lower_skip_layer_normalization(egi_lowering *lowering);
eg_status egi_lower_gelu(egi_lowering *lowering);
eg_status egi_lower_fast_gelu(egi_lowering *lowering);
eg_status egi_lower_bias_gelu(egi_lowering *lowering);
eg_status egi_lower_quick_gelu(egi_lowering *lowering);
eg_status egi_lower_bias_split_gelu(egi_lowering *lowering);
eg_status egi_lower_fused_matmul(egi_lowering *lowering);
/* lower_quantised.c */
eg_status egi_lower_matmul_nbits(egi_lowering *lowering);
eg_status egi_lower_matmul_bnb4(egi_lowering *lowering);
eg_status egi_lower_gather_block_quantized(egi_lowering *lowering);
eg_status egi_lower_matmul_integer(egi_lowering *lowering);
eg_status egi_lower_quantize_linear(egi_lowering *lowering);
eg_status egi_lower_dequantize_linear(egi_lowering *lowering);
/* lower_rotary.c, lower_attention.c, lower_multi_head.c */
eg_status egi_lower_rotary_embedding(egi_lowering *lowering);
eg_status egi_lower_group_query_attention(egi_lowering *lowering);
eg_status egi_lower_multi_head_attention(egi_lowering *lowering);
eg_status egi_lower_merged_attention(egi_lowering *lowering);
/* lower_moe.c */
eg_status egi_lower_moe(egi_lowering *lowering);
eg_status egi_lower_quantised_moe(egi_lowering *lowering);

/* lower_sequences.c */
eg_status egi_lower_sequences(egi_pass_run *run, egi_graph *graph);

#endif
