/* Proves what a mask is. Its nodes are run for several batches, lengths and patterns of padding, and every element must
 * be what the form says that the mask is taken for: causal or not, a window, padding of the keys. A number that may be
 * a window is made to show: the mask is run on sequences longer than it, or, where those are too long to run, with two
 * small numbers in its place, whose windows must follow them. Called by fuse_attention. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "passes/masks.h"

/* What exporters write for a hidden key starts at -1e4, -9984 in bfloat16. */
#define HIDDEN (-9900.0)
/* Elements times nodes that one run may take. */
#define MAX_WORK 3e7
#define MAX_TABLE_WORK 2.5e8

enum { SIZE_FIRST = 17, SIZE_LONG = 300, MAX_FIXED = 1024, MAX_FIXED_ELEMENTS = 1 << 23 };

typedef enum pattern { PATTERN_ONES, PATTERN_RIGHT, PATTERN_LEFT, PATTERN_HOLES } pattern;

typedef struct prover {
  const egi_graph *graph;
  const egi_mask *mask;
  egi_mask_proof *proof;
  egi_arena *arena;                /* of the reason */
  bool has_form, depends, differs; /* padding was seen to matter, or not to */
  uint32_t n_nodes;
  egi_mask_numbers numbers;
} prover;

/* One evaluation. */
typedef struct trial {
  int64_t batch, sequence;
  pattern pattern;
  const int64_t *from, *to; /* numbers that are replaced */
  unsigned n_replaced;
  egi_arena arena;
  egi_tensor outputs[EGI_MAX_MASKS];
  const egi_tensor *padding; /* as it was given, or NULL */
  const char *reason;
} trial;

static eg_status refuse(prover *p, const char *reason) {
  p->proof->reason = egi_arena_copy_text(p->arena, reason, strlen(reason));
  return p->proof->reason ? EG_OK : EG_ERROR_MEMORY;
}

/* ---- running ---------------------------------------------------------------------------------------------------- */

static bool is_valid(const trial *t, int64_t batch, int64_t key) {
  int64_t cut = (batch + 1) % (t->sequence + 1) + (t->sequence > 4 ? batch % 3 : 0);
  switch (t->pattern) {
  case PATTERN_RIGHT:
    return key < t->sequence - cut;
  case PATTERN_LEFT:
    return key >= cut;
  case PATTERN_HOLES:
    return (key * 7 + batch * 3) % 5 > 1;
  case PATTERN_ONES:
    break;
  }
  return true;
}

/* Padding of [batch, sequence], or positions. */
static eg_status fill_input(trial *t, const egi_mask_extract *x, const egi_value *value, egi_tensor *tensor) {
  uint64_t size_bytes = 0;
  bool is_positions = x->positions != 0 && strcmp(x->source->values[x->positions].name, value->name) == 0;
  *tensor = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
  for (int i = 0; i < value->rank; i++) (void)egi_dim_value(x->module->dims, value->dims[i], &tensor->dims[i]);
  egi_tensor_set_contiguous(tensor);
  bool fits = is_positions ? tensor->dims[tensor->rank - 1] == t->sequence
                           : tensor->dims[0] == t->batch && tensor->dims[1] == t->sequence;
  int64_t count = egi_tensor_count(tensor);
  if (!fits || !egi_dtype_bytes(tensor->dtype, (uint64_t)count, &size_bytes)) {
    t->reason = "an input of the mask has other sizes than batch and sequence";
    return EG_OK;
  }
  tensor->data = egi_arena_get(&t->arena, (size_t)size_bytes + 1, 1);
  if (!tensor->data) return EG_ERROR_MEMORY;
  for (int64_t i = 0; i < count; i++) {
    int64_t key = i % t->sequence, number = is_positions ? key : is_valid(t, i / t->sequence, key);
    if (!egi_tensor_set(tensor, i, (double)number)) t->reason = "an input of the mask has a type that is not a mask's";
  }
  if (!is_positions) t->padding = tensor;
  return EG_OK;
}

static eg_status evaluate(trial *t, const egi_mask_extract *x) {
  const egi_graph *graph = x->graph;
  egi_tensor *inputs = EGI_NEW(&t->arena, egi_tensor, (size_t)graph->n_inputs + 1);
  if (!inputs) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_inputs && !t->reason; i++)
    EG_TRY(fill_input(t, x, &graph->values[graph->inputs[i]], &inputs[i]));
  if (t->reason) return EG_OK;
  eg_status status = x->module->evaluator->graph(x->module->ctx, graph, inputs, &t->arena, t->outputs);
  if (status != EG_OK && status != EG_ERROR_MEMORY) {
    t->reason = egi_arena_format(&t->arena, "the mask cannot be evaluated: %s", eg_context_error(x->module->ctx));
    return t->reason ? EG_OK : EG_ERROR_MEMORY;
  }
  return status;
}

static eg_status run_trial(prover *p, trial *t) {
  egi_mask_extract x = {.source = p->graph, .mask = p->mask, .n_batches = t->batch, .n_positions = t->sequence};
  x.from = t->from;
  x.to = t->to;
  x.n_replaced = t->n_replaced;
  x.arena = &t->arena;
  eg_status status = egi_mask_extract_make(&x);
  t->reason = x.reason;
  if (status == EG_OK && !x.reason) status = evaluate(t, &x);
  if (t->n_replaced == 0) {
    p->numbers = x.numbers;
    p->n_nodes = x.graph ? x.graph->n_nodes : 0;
  }
  p->proof->padding = x.padding;
  p->proof->follows_positions = x.positions != 0;
  egi_mask_extract_free(&x);
  return status;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* Heads may be written out when all are alike: the first then stands for them. */
static bool has_equal_heads(const egi_tensor *tensor) {
  int64_t heads = tensor->rank < 3 ? 1 : tensor->dims[tensor->rank - 3], inner = 1;
  int64_t outer = tensor->rank == 4 ? tensor->dims[0] : 1;
  for (int i = tensor->rank < 3 ? 0 : tensor->rank - 2; i < tensor->rank; i++) inner *= tensor->dims[i];
  for (int64_t b = 0; b < outer; b++)
    for (int64_t i = inner; i < heads * inner; i++) {
      double first = egi_tensor_number(tensor, b * heads * inner + i % inner),
             own = egi_tensor_number(tensor, b * heads * inner + i);
      if (!(first >= own && first <= own)) return false;
    }
  return true;
}

static bool broadcasts(const trial *t, const egi_tensor *tensor) {
  const int64_t wanted[4] = {t->batch, 0, t->sequence, t->sequence};
  if (tensor->rank > 4) return false;
  for (int i = 0; i < tensor->rank; i++) {
    int axis = 4 - tensor->rank + i;
    if (axis != 1 && tensor->dims[i] != 1 && tensor->dims[i] != wanted[axis]) return false;
  }
  return has_equal_heads(tensor);
}

/* The element for (batch, query, key) of a tensor that broadcasts. */
static double element_at(const egi_tensor *tensor, const int64_t at[3]) {
  const int64_t index[4] = {at[0], 0, at[1], at[2]};
  int64_t offset = 0;
  for (int i = 0; i < tensor->rank; i++)
    if (tensor->dims[i] != 1) offset += index[4 - tensor->rank + i] * tensor->strides[i];
  return egi_tensor_number(tensor, offset);
}

/* 1: seen, 0: hidden, -1: neither, the number goes to *out_number. */
static int visibility(const prover *p, const trial *t, const int64_t at[3], double *out_number) {
  const egi_mask *mask = p->mask;
  bool is_seen = !mask->is_causal || at[2] <= at[1];
  if (mask->left >= 0) is_seen = is_seen && at[2] >= at[1] - mask->left;
  if (mask->right >= 0) is_seen = is_seen && at[2] <= at[1] + mask->right;
  for (unsigned i = 0; i < mask->n_parts; i++) {
    double number = element_at(&t->outputs[i], at);
    bool is_boolean = t->outputs[i].dtype == EG_DTYPE_BOOL;
    *out_number = number;
    if (is_boolean != (mask->parts[i].sense != EGI_MASK_IS_ADDED)) return -1;
    bool hides = mask->parts[i].sense == EGI_MASK_IS_SEEN ? number == 0 : number != 0;
    if (!is_boolean && hides && !(number <= HIDDEN)) return -1;
    is_seen = is_seen && !hides;
  }
  return is_seen;
}

static bool form_sees(const egi_mask_proof *form, const int64_t at[3]) {
  if (form->is_causal && at[2] > at[1]) return false;
  return form->window == 0 || (at[2] > at[1] - form->window && at[2] < at[1] + form->window);
}

/* Causal when the first query sees its own key alone, or none but that in its future; the window is what the last query
 * sees. Whether all of it is so is checked afterwards. */
static void guess_form(prover *p, const trial *t) {
  double number;
  int64_t seen = 0;
  p->proof->is_causal = true;
  for (int64_t j = 1; j < t->sequence; j++)
    if (visibility(p, t, (const int64_t[3]){0, 0, j}, &number) == 1) p->proof->is_causal = false;
  for (int64_t j = 0; j < t->sequence; j++)
    seen += visibility(p, t, (const int64_t[3]){0, t->sequence - 1, j}, &number) == 1;
  p->proof->window = seen == t->sequence ? 0 : seen;
  p->has_form = true;
}

/* ---- comparing -------------------------------------------------------------------------------------------------- */

static eg_status miss(prover *p, const trial *t, const int64_t at[3], int seen, double number) {
  char *reason;
  if (seen < 0)
    reason = egi_arena_format(p->arena, "the mask holds %g, which neither shows nor hides a key", number);
  else
    reason =
        egi_arena_format(p->arena, "the mask is not %s%s: of %" PRId64 " positions, query %" PRId64 " %s key %" PRId64,
                         p->proof->is_causal ? "causal" : "full", p->proof->window > 0 ? " in a window" : "",
                         t->sequence, at[1], seen ? "sees" : "does not see", at[2]);
  p->proof->reason = reason;
  return reason ? EG_OK : EG_ERROR_MEMORY;
}

/* A row of the mask against the form, with padding and without. */
static eg_status compare_row(prover *p, const trial *t, int64_t batch, int64_t query) {
  bool sees_some = false;
  for (int64_t j = 0; j < t->sequence && !sees_some; j++)
    sees_some = form_sees(p->proof, (const int64_t[3]){batch, query, j}) && is_valid(t, batch, j);
  for (int64_t j = 0; j < t->sequence; j++) {
    const int64_t at[3] = {batch, query, j};
    double number = 0;
    int seen = visibility(p, t, at, &number);
    bool expected = form_sees(p->proof, at), is_padding = t->padding && !is_valid(t, batch, j);
    if (seen < 0) return miss(p, t, at, seen, number);
    if (seen == expected && !(expected && is_padding)) continue;
    if (!sees_some && t->padding) continue;
    if (expected && is_padding) {
      p->depends = p->depends || !seen;
      p->differs = p->differs || seen;
      continue;
    }
    return miss(p, t, at, seen, number);
  }
  return EG_OK;
}

static eg_status compare(prover *p, trial *t) {
  for (unsigned i = 0; i < p->mask->n_parts; i++)
    if (!broadcasts(t, &t->outputs[i]))
      return refuse(p, "the mask differs between heads, or has not the shape of the scores");
  if (!p->has_form) guess_form(p, t);
  for (int64_t b = 0; b < t->batch && !p->proof->reason; b++)
    for (int64_t i = 0; i < t->sequence && !p->proof->reason; i++) EG_TRY(compare_row(p, t, b, i));
  if (p->depends && p->differs && !p->proof->reason) return refuse(p, "the mask hides padding from some queries alone");
  return EG_OK;
}

/* Runs and compares; the reason is set where it is not as the form says. */
static eg_status check(prover *p, trial t) {
  egi_arena_init(&t.arena, p->graph->module->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = run_trial(p, &t);
  if (status == EG_OK && t.reason) status = refuse(p, t.reason);
  if (status == EG_OK && !p->proof->reason) status = compare(p, &t);
  egi_arena_clear(&t.arena);
  return status;
}

/* ---- windows ---------------------------------------------------------------------------------------------------- */

/* Numbers too large for sequences that are longer, with small ones in their place; both ascend. */
typedef struct large_numbers {
  int64_t from[EGI_MAX_MASK_NUMBERS], to[EGI_MAX_MASK_NUMBERS];
  unsigned count;
} large_numbers;

/* The form is found anew at that length, and holds for padding there as well. Causality is as it was, and so is a
 * window that was seen before. */
static eg_status find_form(prover *p, int64_t sequence, const large_numbers *large) {
  static const pattern patterns[] = {PATTERN_ONES, PATTERN_HOLES, PATTERN_LEFT, PATTERN_RIGHT};
  bool was_causal = p->proof->is_causal;
  int64_t window = p->proof->window;
  p->has_form = false;
  for (unsigned i = 0; i < (sequence > SIZE_LONG ? 2u : EGI_COUNT(patterns)) && !p->proof->reason; i++) {
    trial t = {.batch = sequence > SIZE_LONG || i == 0 ? 1 : 2, .sequence = sequence, .pattern = patterns[i]};
    t.from = large->from;
    t.to = large->to;
    t.n_replaced = large->count;
    EG_TRY(check(p, t));
  }
  bool is_same = p->proof->is_causal == was_causal && (window == 0 || window == p->proof->window);
  if (p->proof->reason || is_same) return EG_OK;
  return refuse(p, "the mask changes with the length of the sequence");
}

/* Smaller numbers in the order of the large ones, above all others; what they add up to. */
static int64_t choose_small(large_numbers *large, int64_t first, int64_t step) {
  int64_t sum = 0;
  for (unsigned i = 0; i < large->count; i++) {
    large->to[i] = first + step * (int64_t)i;
    sum += large->to[i];
  }
  return sum;
}

/* Two choices of small numbers: either the window is the same in both, or it follows one of them. */
static eg_status extrapolate(prover *p, int64_t length, large_numbers *large) {
  int64_t windows[2], before = p->proof->window, distance = 0;
  unsigned n_followed = 0;
  int64_t chosen[2][EGI_MAX_MASK_NUMBERS];
  for (int i = 0; i < 2; i++) {
    int64_t sum = choose_small(large, length + (i == 0 ? 0 : 3), i == 0 ? 3 : 4);
    p->proof->window = before;
    EG_TRY(find_form(p, length + sum + SIZE_FIRST, large));
    if (p->proof->reason) return EG_OK;
    windows[i] = p->proof->window;
    memcpy(chosen[i], large->to, sizeof chosen[i]);
  }
  if (windows[0] == windows[1]) return EG_OK;
  for (unsigned k = 0; k < large->count; k++) {
    bool is_followed = windows[0] > 0 && windows[1] - windows[0] == chosen[1][k] - chosen[0][k];
    distance = windows[0] - chosen[0][k];
    if (!is_followed || distance < -2 || distance > 2) continue;
    n_followed++;
    p->proof->window = large->from[k] + distance;
  }
  if (n_followed == 1 && before == 0) return EG_OK;
  return refuse(p, "a number of the mask is neither a window nor without effect");
}

static int by_size(const void *a, const void *b) {
  const int64_t *left = a, *right = b;
  return (*left > *right) - (*left < *right);
}

/* What two numbers decide together shows once the sequence is longer than their sum. */
static eg_status check_numbers_of(prover *p, egi_mask_numbers numbers) {
  large_numbers large = {.count = 0};
  int64_t length = 0;
  qsort(numbers.values, numbers.count, sizeof *numbers.values, by_size);
  for (int round = 0; round < 2; round++) { /* beside large numbers the others must leave room for their substitutes */
    double limit = large.count > 0 ? MAX_WORK / 16 : MAX_WORK;
    length = 3;
    large.count = 0;
    for (unsigned i = 0; i < numbers.count; i++) {
      double longer = (double)(length + numbers.values[i]);
      if (longer * longer * p->n_nodes <= limit)
        length += numbers.values[i];
      else
        large.from[large.count++] = numbers.values[i];
    }
  }
  if (large.count > 0) return extrapolate(p, length, &large);
  return length > SIZE_FIRST ? find_form(p, length, &large) : EG_OK;
}

/* Whether the mask cannot be made for a sequence longer than its table: then larger numbers do not matter. */
static eg_status is_limited(prover *p, int64_t table, bool *out_is_limited) {
  trial t = {.batch = 1, .sequence = table + 3};
  egi_arena_init(&t.arena, p->graph->module->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = run_trial(p, &t);
  *out_is_limited = t.reason != NULL;
  for (unsigned i = 0; i < p->mask->n_parts && status == EG_OK && !*out_is_limited; i++)
    *out_is_limited = !broadcasts(&t, &t.outputs[i]);
  egi_arena_clear(&t.arena);
  return status;
}

static eg_status check_numbers(prover *p) {
  static const large_numbers none;
  const egi_mask_numbers numbers = p->numbers;
  double table = (double)numbers.longest_table;
  bool has_limit = false;
  if (numbers.is_full) return refuse(p, "the mask is made of more numbers than are looked at");
  if (numbers.longest_table >= SIZE_FIRST - 2) {
    if (table * table * p->n_nodes > MAX_TABLE_WORK) return refuse(p, "the mask is a table too long to be looked at");
    EG_TRY(find_form(p, numbers.longest_table, &none));
    if (!p->proof->reason) EG_TRY(is_limited(p, numbers.longest_table, &has_limit));
  }
  return has_limit || p->proof->reason ? EG_OK : check_numbers_of(p, numbers);
}

/* ---- the proof -------------------------------------------------------------------------------------------------- */

/* Batch, length and pattern of each run; sizes that the model fixes stand instead. */
static const struct {
  int64_t batch, sequence;
  pattern pattern;
} runs[] = {
    {1, SIZE_FIRST, PATTERN_ONES}, {3, 9, PATTERN_RIGHT}, {2, 5, PATTERN_LEFT},
    {3, 11, PATTERN_HOLES},        {1, 2, PATTERN_ONES},  {2, 13, PATTERN_LEFT},
};

static eg_status prove(prover *p) {
  egi_dims *dims = p->graph->module->dims;
  int64_t batch = 0, sequence = 0, size;
  if (egi_dim_value(dims, egi_dim_resolve(dims, p->mask->batch), &size)) batch = size;
  if (egi_dim_value(dims, egi_dim_resolve(dims, p->mask->sequence), &size)) sequence = size;
  if (sequence == 1 || sequence > MAX_FIXED)
    return refuse(p, "the length of the sequence is fixed to one not looked at");
  int64_t length = sequence > 0 ? sequence : SIZE_FIRST;
  if (batch > MAX_FIXED_ELEMENTS / (length * length))
    return refuse(p, "the size of the batch is fixed to one not looked at");
  for (size_t i = 0; i < EGI_COUNT(runs) && !p->proof->reason; i++)
    EG_TRY(check(p, (trial){.batch = batch > 0 ? batch : runs[i].batch,
                            .sequence = sequence > 0 ? sequence : runs[i].sequence,
                            .pattern = runs[i].pattern}));
  if (!p->proof->reason && sequence == 0) EG_TRY(check_numbers(p));
  if (p->proof->reason) return EG_OK;
  if (!p->depends) p->proof->padding = 0;
  p->proof->is_proven = true;
  return EG_OK;
}

eg_status egi_mask_prove(const egi_graph *graph, const egi_mask *mask, egi_arena *arena, egi_mask_proof *out_proof) {
  prover p = {.graph = graph, .mask = mask, .proof = out_proof, .arena = arena};
  *out_proof = (egi_mask_proof){0};
  if (!graph->module->evaluator) return refuse(&p, "there is nothing to evaluate the mask with");
  return prove(&p);
}
