/* What the loss kernels share: labels and per-row numbers in tensors of any strides. */
#ifndef ENGRAFT_BACKEND_CPU_LOSS_H
#define ENGRAFT_BACKEND_CPU_LOSS_H

#include "backend/cpu/cpu.h"

#define EGI_LABEL_NONE (-100)

/* A tensor with one number a row. */
typedef struct egi_row_numbers {
  egi_rows rows;
  eg_dtype dtype;
} egi_row_numbers;

void egi_row_numbers_init(egi_row_numbers *numbers, const egi_tensor *tensor);
double egi_row_numbers_get(const egi_row_numbers *numbers, const egi_tensor *tensor, int64_t row);
void egi_row_numbers_set(const egi_row_numbers *numbers, const egi_tensor *tensor, int64_t row, double value);
int64_t egi_label_get(const egi_row_numbers *numbers, const egi_tensor *tensor, int64_t row);
/* EG_ERROR_DATA names the first label that is neither EGI_LABEL_NONE nor in [0, n_classes). */
eg_status egi_labels_check(eg_context *ctx, const egi_row_numbers *labels, const egi_tensor *tensor, int64_t n_classes);

#endif
