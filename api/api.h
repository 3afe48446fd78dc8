/* Shared by the public functions: option structs of other sizes, and text handed to a writer. */
#ifndef ENGRAFT_API_API_H
#define ENGRAFT_API_API_H

#include "train/train.h"

/* Copies what both sides know of an option struct over the defaults in `known`. EG_ERROR_ARGUMENT when struct_size
 * cannot be one. `options` may be NULL: the defaults stay. */
eg_status egi_read_options(eg_context *ctx, const void *options, void *known, size_t known_size);
/* Hands the text to `write` and frees it. */
eg_status egi_write_text(egi_text *text, eg_write_function write, void *userdata);
/* JSON about a model; see eg_model_inspect(). */
eg_status egi_model_describe(const eg_model *model, egi_text *text);

#endif
