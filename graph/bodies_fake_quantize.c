/* The body of engraft.FakeQuantize by plain operators, which round as the kernel does at every step. */
#include "graph/bodies.h"
#include "graph/fake_quantize.h"

static void add_list(egi_body *body, const char *name, int64_t value) {
  egi_body_integers(body, name, &value, 1);
}

/* A Reshape that finds a size cannot take a tensor without elements apart. */
static bool is_empty(const egi_body *body) {
  for (int axis = 0; axis < egi_body_rank(body, 0); axis++)
    if (egi_body_size(body, 0, axis) == 0) return true;
  return false;
}

/* v = the numbers in rows of a block each, the last of each row filled up with zeros, which no block's ends notice.
 * False where the row is not known to be whole blocks or of a known size. */
static bool add_blocks(egi_body *body, const egi_fake_quantize *form) {
  int64_t width = egi_body_size(body, 0, -1), block = form->block;
  int rank = egi_body_rank(body, 0);
  if (block == 0 || width == block) {
    egi_text_add(body->text, "v = Identity (wide)\n");
    return true;
  }
  if (width < 1 || rank < 1) return false;
  int64_t rest = (block - width % block) % block;
  if (rest > 0) {
    int64_t pads[2 * EGI_MAX_RANK] = {0};
    pads[2 * rank - 1] = rest;
    egi_body_integers(body, "pads", pads, 2 * (unsigned)rank);
    egi_text_add(body->text, "filled = Pad (wide, pads)\n");
  } else {
    egi_text_add(body->text, "filled = Identity (wide)\n");
  }
  const int64_t shape[2] = {-1, block};
  egi_body_integers(body, "block_rows", shape, 2);
  egi_text_add(body->text, "v = Reshape (filled, block_rows)\n");
  return true;
}

/* rounded = v in rows as before. */
static void add_unblocked(egi_body *body, const egi_fake_quantize *form) {
  int64_t width = egi_body_size(body, 0, -1), block = form->block;
  egi_text_add(body->text, "sizes = Shape (x)\n");
  if (block == 0 || width == block) {
    egi_text_add(body->text, "rounded = Identity (values)\n");
    return;
  }
  if (width % block == 0) {
    egi_text_add(body->text, "rounded = Reshape (values, sizes)\n");
    return;
  }
  const int64_t rows[2] = {-1, (width + block - 1) / block * block};
  egi_body_integers(body, "filled_rows", rows, 2);
  add_list(body, "start", 0);
  add_list(body, "end", width);
  egi_text_add(body->text, "whole = Reshape (values, filled_rows)\nkept = Slice (whole, start, end, last)\n"
                           "rounded = Reshape (kept, sizes)\n");
}

static bool add_integers(egi_body *body, const egi_fake_quantize *form) {
  double half = (double)(1u << (form->bits - 1));
  if (!add_blocks(body, form)) return false;
  egi_body_number(body, "nothing", 0.0, "wide");
  egi_body_number(body, "unit", 1.0, "wide");
  egi_body_number(body, "largest", 2.0 * half - 1.0, "wide");
  egi_body_number(body, "minus_half", -half, "wide");
  egi_body_number(body, "half", half, "wide");
  egi_text_add(body->text, "top = ReduceMax <keepdims = 1> (v, last)\nbottom = ReduceMin <keepdims = 1> (v, last)\n"
                           "high = Max (top, nothing)\nlow = Min (bottom, nothing)\nunder = Neg (low)\n");
  if (form->is_symmetric)
    egi_text_add(body->text, "is_high = Greater (high, under)\nextreme = Where (is_high, high, low)\n"
                             "scale = Div (extreme, minus_half)\nis_empty = Equal (scale, nothing)\n"
                             "safe = Where (is_empty, unit, scale)\nzero = Identity (half)\n");
  else
    egi_text_add(body->text, "span = Sub (high, low)\nscale = Div (span, largest)\nis_empty = Equal (scale, nothing)\n"
                             "safe = Where (is_empty, unit, scale)\nlow_steps = Div (under, safe)\n"
                             "low_code = Round (low_steps)\nzero = Clip (low_code, nothing, largest)\n");
  egi_text_add(body->text, "steps = Div (v, safe)\nwhole_steps = Round (steps)\nplaced = Add (whole_steps, zero)\n"
                           "codes = Clip (placed, nothing, largest)\ncentred = Sub (codes, zero)\n"
                           "values = Mul (centred, scale)\n");
  add_unblocked(body, form);
  return true;
}

/* Thresholds between codes as in base/blockwise.c; a tie has the lower code. */
static bool add_nf4(egi_body *body, const egi_fake_quantize *form) {
  int64_t rows = egi_body_size(body, 0, 0), columns = egi_body_size(body, 0, 1);
  if (rows < 0 || columns < 0) return false;
  int64_t count = rows * columns, rest = (form->block - count % form->block) % form->block;
  const int64_t flat = count, full = count + rest, pads[2] = {0, rest},
                shape[2] = {(count + rest) / form->block, form->block}, sizes[2] = {rows, columns};
  egi_body_integers(body, "flat", &flat, 1);
  egi_body_integers(body, "full", &full, 1);
  egi_body_integers(body, "pads", pads, 2);
  egi_body_integers(body, "block_rows", shape, 2);
  egi_body_integers(body, "sizes", sizes, 2);
  add_list(body, "start", 0);
  add_list(body, "end", count);
  egi_body_number(body, "unit", 1.0, "wide");
  egi_text_add(body->text, "row = Reshape (wide, flat)\nfilled = Pad (row, pads)\nv = Reshape (filled, block_rows)\n"
                           "sized = Abs (v)\nscale = ReduceMax <keepdims = 1> (sized, last)\n"
                           "factor = Div (unit, scale)\nshares = Mul (v, factor)\nshare = Unsqueeze (shares, last)\n");
  egi_text_add(body->text,
               "thresholds = Constant <value_floats = [-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, "
               "-0.33967943489551544, -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, "
               "0.03979014977812767, 0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683, "
               "0.5016634166240692, 0.6427869200706482, 0.8614784181118011]> ()\n"
               "levels = Constant <value_floats = [-1.0, -0.6961928009986877, -0.5250730514526367, "
               "-0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0, "
               "0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, "
               "0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]> ()\n"
               "above = Greater (share, thresholds)\ncounts = Cast <to = 7> (above)\n"
               "codes = ReduceSum <keepdims = 0> (counts, last)\nlevel = Gather (levels, codes)\n"
               "values = Mul (level, scale)\nline = Reshape (values, full)\nkept = Slice (line, start, end)\n"
               "rounded = Reshape (kept, sizes)\n");
  return true;
}

bool egi_body_fake_quantize(egi_body *body) {
  egi_fake_quantize form;
  if (!egi_fake_quantize_read(body->node, &form)) return false;
  if (is_empty(body)) {
    egi_text_add(body->text, "y = Identity (x)\n");
    return true;
  }
  add_list(body, "last", -1);
  egi_text_add(body->text, "wide = Cast <to = 1> (x)\n");
  if (!(form.is_nf4 ? add_nf4(body, &form) : add_integers(body, &form))) return false;
  egi_text_add(body->text, "y = CastLike (rounded, x)\n");
  return true;
}
