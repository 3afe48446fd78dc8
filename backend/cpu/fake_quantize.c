/* FakeQuantize: numbers as their codes would give them back. In float32, block by block; a block is one task's alone,
 * so results do not depend on the number of threads. In place: a block's ends are found before it is written. */
#include "backend/cpu/cpu.h"
#include "base/blockwise.h"
#include "base/integer_codes.h"
#include "graph/fake_quantize.h"

enum { ELEMENTS = 1 << 14 }; /* of a task, about */

typedef struct faking {
  egi_fake_quantize form;
  eg_dtype dtype;
  int64_t width, count; /* of a row; of everything */
  int64_t block, blocks_per_row, blocks_per_task, n_blocks;
  size_t buffer_bytes, code_bytes; /* of a worker; of these for codes of 4 bits */
} faking;

eg_status egi_cpu_prepare_fake_quantize(egi_kernel_plan *plan) {
  const egi_tensor *x = &plan->inputs[0];
  faking *f = EGI_NEW(plan->arena, faking, 1);
  if (f == NULL) return EG_ERROR_MEMORY;
  if (x->dtype != EG_DTYPE_F32 && x->dtype != EG_DTYPE_F16 && x->dtype != EG_DTYPE_BF16) return egi_fail_types(plan);
  if (!egi_fake_quantize_read(egi_plan_node(plan), &f->form))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "its attributes name no codes that are known");
  f->dtype = x->dtype;
  f->count = egi_tensor_count(x);
  f->width = f->form.is_nf4 ? f->count : x->dims[x->rank - 1];
  f->block = f->form.block > 0 && f->form.block < f->width ? f->form.block : f->width;
  f->blocks_per_row = f->block > 0 ? (f->width + f->block - 1) / f->block : 0;
  f->n_blocks = f->count > 0 ? f->count / f->width * f->blocks_per_row : 0;
  f->blocks_per_task = f->block > 0 && f->block < ELEMENTS ? ELEMENTS / f->block : 1;
  f->code_bytes = f->form.is_nf4 ? ((size_t)f->block / 2 + 1 + 63) / 64 * 64 : 0;
  f->buffer_bytes = f->code_bytes;
  if (f->dtype != EG_DTYPE_F32) f->buffer_bytes += ((size_t)f->block * sizeof(float) + 63) / 64 * 64;
  plan->workspace_bytes = f->buffer_bytes * egi_pool_size(egi_context_pool(plan->ctx));
  plan->params = f;
  return EG_OK;
}

static void round_integers(const faking *f, const float *in, size_t n, float *out) {
  const egi_integer_block block = egi_integer_block_make(in, n, f->form.bits, f->form.is_symmetric);
  for (size_t i = 0; i < n; i++) out[i] = (egi_integer_code(&block, in[i]) - block.zero) * block.scale;
}

static void round_block(const faking *f, const float *in, size_t n, uint8_t *codes, float *out) {
  if (!f->form.is_nf4) {
    round_integers(f, in, n, out);
    return;
  }
  float scale = egi_four_bit_encode(EGI_FOUR_BIT_NF4, in, n, codes);
  egi_four_bit_decode(EGI_FOUR_BIT_NF4, codes, 0, n, scale, out);
}

static void round_narrow(const faking *f, const uint16_t *in, size_t n, uint8_t *scratch, uint16_t *out) {
  float *values = (float *)(void *)(scratch + f->code_bytes);
  bool is_half = f->dtype == EG_DTYPE_F16;
  for (size_t i = 0; i < n; i++) values[i] = is_half ? egi_f16_to_f32(in[i]) : egi_bf16_to_f32(in[i]);
  round_block(f, values, n, scratch, values);
  for (size_t i = 0; i < n; i++) out[i] = is_half ? egi_f32_to_f16(values[i]) : egi_f32_to_bf16(values[i]);
}

static void round_blocks(void *argument, size_t index, size_t worker) {
  const egi_kernel_call *call = argument;
  const faking *f = call->params;
  uint8_t *scratch = (uint8_t *)call->workspace + worker * f->buffer_bytes;
  int64_t block = (int64_t)index * f->blocks_per_task, end = block + f->blocks_per_task;
  for (; block < end && block < f->n_blocks; block++) {
    int64_t row = block / f->blocks_per_row, column = block % f->blocks_per_row * f->block;
    int64_t first = row * f->width + column, left = f->width - column;
    size_t n = (size_t)(left < f->block ? left : f->block);
    if (f->dtype == EG_DTYPE_F32)
      round_block(f, (const float *)call->inputs[0].data + first, n, scratch, (float *)call->outputs[0].data + first);
    else
      round_narrow(f, (const uint16_t *)call->inputs[0].data + first, n, scratch,
                   (uint16_t *)call->outputs[0].data + first);
  }
}

eg_status egi_cpu_run_fake_quantize(eg_context *ctx, const egi_kernel_call *call) {
  const faking *f = call->params;
  egi_kernel_call shared = *call;
  (void)ctx;
  egi_pool_run(call->pool, (size_t)((f->n_blocks + f->blocks_per_task - 1) / f->blocks_per_task), round_blocks,
               &shared);
  return EG_OK;
}
