/* Loops over several tensors of any strides and what plain kernels ask of a plan; see strided.cuh. */
#include "backend/cuda/strided.cuh"

namespace egi::plain {

void strided_init(strided *loop, const egi_tensor *output) {
  *loop = {};
  loop->n_operands = 1;
  loop->rank = output->rank;
  loop->count = egi_tensor_count(output);
  const int64_t element_bytes = static_cast<int64_t>(egi_element_bytes(output->dtype));
  for (int i = 0; i < output->rank; i++) {
    loop->dims[i] = output->dims[i];
    loop->strides[0][i] = output->strides[i] * element_bytes;
  }
  loop->data[0] = static_cast<char *>(output->data);
  loop->dtypes[0] = output->dtype;
}

void strided_add(strided *loop, const egi_tensor *input) {
  const int64_t element_bytes = static_cast<int64_t>(egi_element_bytes(input->dtype));
  const int k = loop->n_operands++, missing = loop->rank - input->rank;
  for (int i = 0; i < loop->rank; i++) {
    const bool is_broadcast = i < missing || input->dims[i - missing] == 1;
    loop->strides[k][i] = is_broadcast ? 0 : input->strides[i - missing] * element_bytes;
  }
  loop->data[k] = static_cast<char *>(input->data);
  loop->dtypes[k] = input->dtype;
}

static int64_t magnitude(int64_t value) {
  return value < 0 ? -value : value;
}

static void swap_dims(strided *loop, int a, int b) {
  const int64_t dim = loop->dims[a];
  loop->dims[a] = loop->dims[b];
  loop->dims[b] = dim;
  for (int k = 0; k < loop->n_operands; k++) {
    const int64_t stride = loop->strides[k][a];
    loop->strides[k][a] = loop->strides[k][b];
    loop->strides[k][b] = stride;
  }
}

static bool can_merge(const strided *loop, int outer, int inner) {
  for (int k = 0; k < loop->n_operands; k++) {
    if (loop->strides[k][outer] != loop->strides[k][inner] * loop->dims[inner]) return false;
  }
  return true;
}

static void move_dim(strided *loop, int to, int from) {
  loop->dims[to] = loop->dims[from];
  for (int k = 0; k < loop->n_operands; k++) loop->strides[k][to] = loop->strides[k][from];
}

void strided_collapse(strided *loop) {
  int rank = 0, merged = 0;
  for (int i = 0; i < loop->rank; i++) {
    if (loop->dims[i] != 1) move_dim(loop, rank++, i);
  }
  /* Stable insertion sort: the output's largest stride first. */
  for (int i = 1; i < rank; i++) {
    for (int j = i; j > 0 && magnitude(loop->strides[0][j - 1]) < magnitude(loop->strides[0][j]); j--)
      swap_dims(loop, j - 1, j);
  }
  for (int i = 1; i < rank; i++) {
    if (can_merge(loop, merged, i)) {
      const int64_t dim = loop->dims[merged];
      move_dim(loop, merged, i);
      loop->dims[merged] *= dim;
    } else {
      move_dim(loop, ++merged, i);
    }
  }
  loop->rank = rank == 0 ? 1 : merged + 1;
  if (rank > 0) return;
  loop->dims[0] = loop->count;
  for (int k = 0; k < loop->n_operands; k++) loop->strides[k][0] = 0;
}

int64_t dims_product(const egi_tensor *tensor, int first, int last) {
  int64_t product = 1;
  for (int i = first; i < last; i++) product *= tensor->dims[i];
  return product;
}

eg_status known_integers(const egi_kernel_plan *plan, unsigned input, int64_t *out, uint32_t capacity,
                         uint32_t *out_count) {
  const egi_tensor *tensor = &plan->inputs[input];
  const int64_t count = egi_tensor_count(tensor);
  *out_count = 0;
  if (count == 0) return EG_OK;
  if (tensor->data == NULL)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED,
                         "its input %u is computed on the device, where the plan must know it", input);
  if (egi_tensor_integers(tensor, out, capacity, out_count)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "its input %u is no short list of integers", input);
}

} // namespace egi::plain
