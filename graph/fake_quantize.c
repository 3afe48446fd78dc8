/* engraft.FakeQuantize: what its attributes say. */
#include "graph/fake_quantize.h"

#include <string.h>

bool egi_fake_quantize_read(const egi_node *node, egi_fake_quantize *out_form) {
  const char *storage = egi_node_string(node, "storage", "");
  egi_fake_quantize form = {.is_nf4 = strcmp(storage, "bnb4") == 0, .block = egi_node_int(node, "block_size", 0)};
  int64_t bits = egi_node_int(node, "bits", 4);
  if (form.is_nf4) {
    bool is_power = form.block >= 32 && form.block <= 4096 && (form.block & (form.block - 1)) == 0;
    form.bits = 4;
    *out_form = form;
    return is_power && egi_node_int(node, "quant_type", 1) == 1;
  }
  form.bits = (unsigned)bits;
  form.is_symmetric = egi_node_int(node, "symmetric", 1) != 0;
  *out_form = form;
  return strcmp(storage, "nbits") == 0 && (bits == 4 || bits == 8) && form.block >= 0;
}

unsigned egi_fake_quantize_write(const egi_fake_quantize *form, egi_attribute attributes[4]) {
  attributes[0] = egi_attribute_string("storage", form->is_nf4 ? "bnb4" : "nbits");
  attributes[1] = egi_attribute_int("block_size", form->block);
  attributes[2] = form->is_nf4 ? egi_attribute_int("quant_type", 1) : egi_attribute_int("bits", form->bits);
  attributes[3] = egi_attribute_int("symmetric", form->is_symmetric);
  return form->is_nf4 ? 3 : 4;
}
