/* What training for codes rounds to, from a trainer's options and from what stands beside an adapter. */
#include "train/train.h"

#include <string.h>

static const char *const names[] = {"none", "int4", "int8", "nf4"}; /* by eg_qat */

enum { INTEGER_BLOCK = 32, NF4_BLOCK = 64, SMALLEST_BLOCK = 16, LARGEST_BLOCK = 4096 };

eg_status egi_qat_record_make(eg_context *ctx, const eg_trainer_options *options, egi_qat_record *out_record) {
  *out_record = (egi_qat_record){.weights = NULL};
  if (options->qat < EG_QAT_NONE || options->qat > EG_QAT_NF4)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "trainer options: qat is out of range");
  if (options->qat == EG_QAT_NONE) return EG_OK;
  out_record->weights = names[options->qat];
  out_record->block = options->qat_block;
  if (out_record->block == 0 && options->qat == EG_QAT_INT4) out_record->block = INTEGER_BLOCK;
  if (out_record->block == 0 && options->qat == EG_QAT_NF4) out_record->block = NF4_BLOCK;
  out_record->is_symmetric = options->qat_asymmetric == 0;
  return EG_OK;
}

static eg_status fail_block(eg_context *ctx, const egi_qat_record *record, int smallest) {
  return egi_fail(ctx, EG_ERROR_ARGUMENT, "%s in blocks of %lld numbers: a power of two from %d to %d is possible%s",
                  record->weights, (long long)record->block, smallest, (int)LARGEST_BLOCK,
                  strcmp(record->weights, names[EG_QAT_INT8]) == 0 ? ", or 0 for whole rows" : "");
}

eg_status egi_fake_options_make(eg_context *ctx, const egi_qat_record *record, egi_fake_options *out_options) {
  egi_fake_options options = {.is_wanted = record->weights != NULL};
  *out_options = options;
  if (!options.is_wanted) return EG_OK;
  int64_t block = record->block;
  bool is_nf4 = strcmp(record->weights, names[EG_QAT_NF4]) == 0,
       is_wide = strcmp(record->weights, names[EG_QAT_INT8]) == 0;
  if (!is_nf4 && !is_wide && strcmp(record->weights, names[EG_QAT_INT4]) != 0)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "an adapter trained for codes \"%s\", which are not known",
                    record->weights);
  int smallest = is_nf4 ? 2 * SMALLEST_BLOCK : SMALLEST_BLOCK;
  bool is_power = block >= smallest && block <= LARGEST_BLOCK && (block & (block - 1)) == 0;
  if (!is_power && !(is_wide && block == 0)) return fail_block(ctx, record, smallest);
  if (is_nf4 && !record->is_symmetric)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "nf4 has one form, with its levels on both sides of 0");
  options.weights = (egi_fake_quantize){is_nf4, record->is_symmetric && !is_nf4, is_wide ? 8 : 4, block};
  options.has_activations = is_wide;
  options.activations = (egi_fake_quantize){.is_symmetric = true, .bits = 8};
  *out_options = options;
  return EG_OK;
}

bool egi_qat_is_same(const egi_qat_record *a, const egi_qat_record *b) {
  if (a->weights == NULL || b->weights == NULL) return a->weights == b->weights;
  return strcmp(a->weights, b->weights) == 0 && a->block == b->block && a->is_symmetric == b->is_symmetric;
}

/* An adapter that is continued keeps what it was trained for. */
eg_status egi_qat_settle(eg_context *ctx, const eg_trainer_options *options, const egi_peft *peft,
                         egi_adapters *adapters) {
  egi_qat_record *record = &adapters->config.qat, asked;
  EG_TRY(egi_qat_record_make(ctx, options, &asked));
  if (peft != NULL && asked.weights != NULL && record->weights != NULL && !egi_qat_is_same(&asked, record))
    return egi_fail(ctx, EG_ERROR_ARGUMENT,
                    "the adapter was trained for %s in blocks of %lld, the options say %s of %lld", record->weights,
                    (long long)record->block, asked.weights, (long long)asked.block);
  if (asked.weights != NULL) *record = asked;
  if (record->weights == NULL) return EG_OK;
  if (adapters->config.dropout > 0.0)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "with qat an adapter is part of the matrix that is rounded: no dropout");
  if (!options->full && peft == NULL && options->init >= EG_LORA_INIT_PISSA)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED,
                    "with qat no pissa or olora: what they save is another sum than the one that was rounded");
  if (adapters->config.parameters != NULL)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "adapters on experts are not trained with qat");
  if (options->quant != EG_QUANT_NONE)
    return egi_fail(ctx, EG_ERROR_ARGUMENT,
                    "trainer options: qat rounds the matrices that quant would have quantised already");
  return EG_OK;
}
