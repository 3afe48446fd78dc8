/* Bodies of the router of a mixture of experts: of its choice, of Route and RouteGrad. The order of rows by expert is
 * that of keys expert · rows + pair, which are all different. */
#include "graph/bodies.h"
#include "graph/moe.h"

typedef struct writer {
  egi_body *body;
  const egi_moe *moe;
} writer;

static void line(const writer *w, const char *text) {
  egi_text_add(w->body->text, text);
}

static void list(const writer *w, const char *name, int64_t a) {
  egi_body_integers(w->body, name, &a, 1);
}

static void add_groups(const writer *w) {
  const egi_moe *moe = w->moe;
  const int64_t grouped[3] = {-1, moe->groups, moe->n_experts / moe->groups}, flat[2] = {-1, moe->n_experts};
  egi_body_integers(w->body, "grouped", grouped, 3);
  egi_body_integers(w->body, "flat", flat, 2);
  list(w, "kept", moe->top_groups);
  list(w, "two", moe->is_group_best || moe->n_experts / moe->groups < 2 ? 1 : 2);
  line(w, "by_group = Reshape (corrected, grouped)\nbest, best_at = TopK (by_group, two)\n"
          "totals = ReduceSum <keepdims = 0> (best, last)\ntotal, total_at = TopK (totals, kept)\n"
          "group_shape = Shape (totals)\nno_groups = Expand (nothing, group_shape)\n"
          "some_shape = Shape (total)\nsome_groups = Expand (unit, some_shape)\n"
          "group_mask = ScatterElements <axis = 1> (no_groups, total_at, some_groups)\n"
          "is_kept_flat = Greater (group_mask, nothing)\nis_kept = Unsqueeze (is_kept_flat, last)\n"
          "kept_scores = Where (is_kept, by_group, nothing)\nchoice = Reshape (kept_scores, flat)\n");
}

void egi_body_add_router(egi_body *body, const egi_moe *moe, bool has_correction, const char *like) {
  const writer writer_ = {body, moe}, *w = &writer_;
  const char *scoring = moe->is_sigmoid ? "Sigmoid" : "Softmax <axis = -1>";
  const int64_t rows[2] = {-1, moe->n_experts};
  egi_body_integers(w->body, "logit_rows", rows, 2);
  egi_body_number(w->body, "nothing", 0.0, like);
  egi_body_number(w->body, "unit", 1.0, like);
  list(w, "last", -1);
  list(w, "k", moe->top_k);
  line(w, "flat_logits = Reshape (logits, logit_rows)\n");
  egi_text_format(w->body->text, "scores = %s (flat_logits)\n", moe->is_scored_before ? scoring : "Identity");
  line(w, has_correction ? "corrected = Add (scores, correction)\n" : "corrected = Identity (scores)\n");
  if (moe->groups > 1)
    add_groups(w);
  else
    line(w, "choice = Identity (corrected)\n");
  line(w, "best_choice, chosen = TopK (choice, k)\npicked = GatherElements <axis = 1> (scores, chosen)\n");
  egi_text_format(w->body->text, "shares = %s (picked)\n", moe->is_scored_before ? "Identity" : scoring);
  line(w, moe->is_normalised ? "share_sum = ReduceSum (shares, last)\nnormal = Div (shares, share_sum)\n"
                             : "normal = Identity (shares)\n");
  egi_body_number(w->body, "routed_scale", moe->routed_scale, like);
  line(w, "weights_ = Mul (normal, routed_scale)\n");
}

static bool read(egi_body *body, egi_moe *moe) {
  return egi_moe_read_router(body->graph, (egi_node_id)(body->node - body->graph->nodes), moe) == EG_OK;
}

bool egi_body_route(egi_body *body) {
  egi_moe moe;
  const writer w = {body, &moe};
  if (!read(body, &moe)) return false;
  egi_body_add_router(body, &moe, egi_body_has(body, 1), "logits");
  egi_body_integer(body, "first", 0);
  egi_body_integer(body, "step", 1);
  egi_body_integer(body, "n_ends", moe.n_experts + 1);
  list(&w, "any", -1);
  list(&w, "front", 0);
  list(&w, "second", 1);
  line(&w, "flat_chosen = Reshape (chosen, any)\nflat_weights = Reshape (weights_, any)\n"
           "count = Shape (flat_chosen)\nn_rows = Squeeze (count, front)\npairs = Range (first, n_rows, step)\n"
           "by_expert = Mul (flat_chosen, count)\nkeys = Add (by_expert, pairs)\n"
           "sorted_keys, order = TopK <largest = 0> (keys, count)\nexpert_ = Gather (flat_chosen, order)\n"
           "places, inverse_ = TopK <largest = 0> (order, count)\n");
  line(&w, "expert = Cast <to = 6> (expert_)\nsource = Div (order, k)\nsource_row = Cast <to = 6> (source)\n"
           "inverse = Cast <to = 6> (inverse_)\nends = Range (first, n_ends, step)\n"
           "end_column = Unsqueeze (ends, second)\nis_below = Less (expert_, end_column)\n"
           "below = Cast <to = 7> (is_below)\ntotals_below = ReduceSum <keepdims = 0> (below, second)\n"
           "offsets = Cast <to = 6> (totals_below)\nweight = Gather (flat_weights, order)\n");
  return true;
}

/* d scores of the chosen ones from `through`, scattered to all, and what all of them lose. */
static void add_through_scores(const writer *w) {
  const egi_moe *moe = w->moe;
  line(w, "product = Mul (through, shares)\n");
  if (moe->is_sigmoid) {
    line(w, "rest = Sub (unit, shares)\nvalues = Mul (product, rest)\n");
  } else if (moe->is_scored_before) {
    line(w, "values = Identity (product)\n");
  } else {
    line(w, "total = ReduceSum (product, last)\nown = Mul (total, shares)\nvalues = Sub (product, own)\n");
  }
  line(w, "logit_shape = Shape (flat_logits)\nzeros = Expand (nothing, logit_shape)\n"
          "scattered = ScatterElements <axis = 1> (zeros, chosen, values)\n");
  if (!moe->is_sigmoid && moe->is_scored_before)
    line(w, "total = ReduceSum (product, last)\nall = Mul (total, scores)\nflat_dx = Sub (scattered, all)\n");
  else
    line(w, "flat_dx = Identity (scattered)\n");
}

/* With w = scale · s / Σ s: d s = scale · (d w - Σ d w · s / Σ s) / Σ s. */
bool egi_body_route_grad(egi_body *body) {
  egi_moe moe;
  const writer w = {body, &moe};
  if (!read(body, &moe)) return false;
  const int64_t rows[2] = {-1, moe.n_experts}, choices[2] = {-1, moe.top_k};
  const char *scoring = moe.is_sigmoid ? "Sigmoid" : "Softmax <axis = -1>";
  egi_body_integers(body, "logit_rows", rows, 2);
  egi_body_integers(body, "choice_rows", choices, 2);
  egi_body_number(body, "nothing", 0.0, "logits");
  egi_body_number(body, "unit", 1.0, "logits");
  egi_body_number(body, "routed_scale", moe.routed_scale, "logits");
  list(&w, "last", -1);
  line(&w, "flat_logits = Reshape (logits, logit_rows)\nby_pair = Gather (expert, inverse)\n"
           "chosen_ = Reshape (by_pair, choice_rows)\nchosen = Cast <to = 7> (chosen_)\n"
           "dw_by_pair = Gather (d_weight, inverse)\ndw = Reshape (dw_by_pair, choice_rows)\n");
  egi_text_format(body->text, "scores = %s (flat_logits)\n", moe.is_scored_before ? scoring : "Identity");
  line(&w, "picked = GatherElements <axis = 1> (scores, chosen)\n");
  egi_text_format(body->text, "shares = %s (picked)\n", moe.is_scored_before ? "Identity" : scoring);
  if (moe.is_normalised)
    line(&w, "divisor = ReduceSum (shares, last)\ndw_shares = Mul (dw, shares)\ninner = ReduceSum (dw_shares, last)\n"
             "mean = Div (inner, divisor)\ncentred = Sub (dw, mean)\nnormal = Div (centred, divisor)\n");
  else
    line(&w, "normal = Identity (dw)\n");
  line(&w, "through = Mul (normal, routed_scale)\n");
  add_through_scores(&w);
  line(&w, "shape = Shape (logits)\nd_logits = Reshape (flat_dx, shape)\n");
  return true;
}
