/* Option structs of callers compiled against an older or newer header, and writers. */
#include "api/api.h"

#include <string.h>

eg_status egi_read_options(eg_context *ctx, const void *options, void *known, size_t known_size) {
  size_t size;
  if (options == NULL) return EG_OK;
  memcpy(&size, options, sizeof size); /* struct_size is the first member of each */
  if (size < sizeof size)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "struct_size of the options is %zu; initialise them with their _INIT macro",
                    size);
  memcpy(known, options, size < known_size ? size : known_size);
  return EG_OK;
}

eg_status egi_write_text(egi_text *text, eg_write_function write, void *userdata) {
  eg_status status = egi_text_status(text);
  if (status == EG_OK && text->length > 0 && write(userdata, text->data, text->length) != 0)
    status = egi_fail(text->ctx, EG_ERROR_IO, "the writer stopped");
  egi_text_free(text);
  return status;
}
