/* Linear and LinearGrad. A quantised weight is decoded into the workspace in the type of the activations, then the
 * product is one of dense matrices: at thousands of tokens the decoding is a small part of it. */
#include "backend/cuda/dequantise.h"
#include "backend/cuda/matmul.h"

static const uint8_t own_inputs[EGI_LINEAR_INPUTS] = {0, 1, 2, 3, 4, 5, 6};

typedef struct linear_params {
  const void *product; /* params of the matrix product */
  bool is_quantised;
  egi_quantised_weight weight;
  eg_dtype dtype;    /* of the decoded weight */
  size_t decoded_at; /* in the workspace, behind the copies */
  size_t product_at; /* the product's own workspace */
} linear_params;

static size_t align_up(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/* The product of x and the decoded weight, which stands in the place of the codes. */
static eg_status prepare_decoded(egi_kernel_plan *plan, linear_params *p, bool is_forward) {
  const egi_quantised *q = &p->weight.matrix;
  egi_tensor inputs[EGI_LINEAR_INPUTS] = {{.dtype = EG_DTYPE_UNDEFINED}};
  egi_kernel_plan dense = *plan;
  bool has_bias = egi_plan_has_input(plan, EGI_LINEAR_BIAS);
  inputs[EGI_LINEAR_X] = plan->inputs[EGI_LINEAR_X];
  if (has_bias) inputs[EGI_LINEAR_BIAS] = plan->inputs[EGI_LINEAR_BIAS];
  inputs[EGI_LINEAR_WEIGHT] = (egi_tensor){.dtype = p->dtype, .rank = 2, .dims = {q->rows, q->columns}};
  egi_tensor_set_contiguous(&inputs[EGI_LINEAR_WEIGHT]);
  const egi_matmul_spec spec = {{EGI_LINEAR_X, EGI_LINEAR_WEIGHT, 0, has_bias ? EGI_LINEAR_BIAS : -1},
                                false,
                                p->weight.is_turned != is_forward,
                                1.0,
                                has_bias ? 1.0 : 0.0};
  dense.inputs = inputs;
  dense.n_inputs = EGI_LINEAR_INPUTS;
  dense.workspace_bytes = 0;
  EG_TRY(egi_cuda_matmul_prepare(&dense, &spec));
  p->product = dense.params;
  p->decoded_at = align_up(p->weight.copies_bytes);
  p->product_at = p->decoded_at + align_up((size_t)(q->rows * q->columns) * egi_element_bytes(p->dtype));
  plan->workspace_bytes = p->product_at + dense.workspace_bytes;
  return EG_OK;
}

static eg_status prepare_quantised(egi_kernel_plan *plan, linear_params *p) {
  const egi_tensor *x = &plan->inputs[EGI_LINEAR_X], *y = &plan->outputs[0];
  bool is_forward = egi_plan_node(plan)->op == EGI_OP_Linear;
  if (x->rank < 1 || (x->dtype != EG_DTYPE_F32 && x->dtype != EG_DTYPE_BF16 && x->dtype != EG_DTYPE_F16))
    return egi_fail_types(plan);
  int64_t k = x->dims[x->rank - 1], n = y->dims[y->rank - 1];
  EG_TRY(egi_quantised_read(plan, own_inputs, is_forward ? n : k, is_forward ? k : n, &p->weight));
  p->is_quantised = true;
  p->dtype = x->dtype;
  return prepare_decoded(plan, p, is_forward);
}

eg_status egi_cuda_prepare_linear(egi_kernel_plan *plan) {
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  egi_matmul_spec spec;
  if (p == NULL) return EG_ERROR_MEMORY;
  if (egi_linear_storage_of(egi_plan_node(plan)) != EGI_LINEAR_PLAIN) {
    EG_TRY(prepare_quantised(plan, p));
  } else {
    EG_TRY(egi_matmul_spec_of_linear(plan, &spec));
    EG_TRY(egi_cuda_matmul_prepare(plan, &spec));
    p->product = plan->params;
  }
  plan->params = p;
  return EG_OK;
}

eg_status egi_cuda_prepare_linear_grad(egi_kernel_plan *plan) {
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(prepare_quantised(plan, p));
  plan->params = p;
  return EG_OK;
}

eg_status egi_cuda_run_linear(eg_context *ctx, const egi_kernel_call *call) {
  const linear_params *p = call->params;
  egi_kernel_call dense = *call;
  egi_tensor inputs[EGI_LINEAR_INPUTS] = {{.dtype = EG_DTYPE_UNDEFINED}};
  dense.params = p->product;
  if (!p->is_quantised) return egi_cuda_run_matmul(ctx, &dense);
  char *workspace = call->workspace;
  egi_quantised matrix;
  EG_TRY(egi_cuda_quantised_open(ctx, &p->weight, call, workspace, &matrix));
  const egi_cuda_window all = {0, 0, matrix.rows, matrix.columns};
  EG_TRY(egi_cuda_dequantise(ctx, &matrix, &all, workspace + p->decoded_at, p->dtype, egi_cuda_stream_of(call)));
  for (unsigned i = 0; i < call->n_inputs && i < EGI_LINEAR_INPUTS; i++) inputs[i] = call->inputs[i];
  inputs[EGI_LINEAR_WEIGHT].data = workspace + p->decoded_at;
  dense.inputs = inputs;
  dense.n_inputs = EGI_LINEAR_INPUTS;
  dense.workspace = workspace + p->product_at;
  return egi_cuda_run_matmul(ctx, &dense);
}
