/* Attention in any spelling becomes one engraft.Attention: the mask is proved by evaluation (mask_prove.c) and said by
 * attributes and key_valid. A standard Attention whose mask is none of these keeps it, and loses repeated key heads;
 * other spellings with such masks stay as they are. Precondition: inferred and tidy. Ends: every root is looked at
 * once. */
#include <inttypes.h>
#include <string.h>

#include "passes/attention_match.h"

typedef struct fuser {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_attention_match *matches; /* those to apply */
  egi_mask_proof *proofs;       /* of each */
  uint32_t n_matches, matches_capacity, proofs_capacity;
  egi_map known; /* mask -> index + 1 in `proven` */
  egi_mask_proof *proven;
  uint32_t n_proven, proven_capacity;
  egi_value_id *valid; /* input of padding -> bool [batch, sequence] */
  unsigned depth;      /* of the nearest miss */
} fuser;

/* ---- masks ------------------------------------------------------------------------------------------------------ */

/* Attentions of one mask are proved once. */
static char *mask_key(fuser *f, const egi_mask *mask) {
  egi_dims *dims = f->graph->module->dims;
  egi_text text;
  egi_text_init(&text, f->run->ctx);
  for (unsigned i = 0; i < mask->n_parts; i++)
    egi_text_format(&text, "%" PRIu32 ":%d ", mask->parts[i].value, (int)mask->parts[i].sense);
  egi_text_format(&text, "%d %" PRId64 " %" PRId64 " %" PRIu32 " %" PRIu32, mask->is_causal, mask->left, mask->right,
                  egi_dim_resolve(dims, mask->batch), egi_dim_resolve(dims, mask->sequence));
  char *key =
      egi_text_status(&text) == EG_OK ? egi_arena_copy_text(&f->arena, egi_text_string(&text), text.length) : NULL;
  egi_text_free(&text);
  return key;
}

static eg_status prove(fuser *f, const egi_mask *mask, const egi_mask_proof **out_proof) {
  uint32_t index;
  char *key = mask_key(f, mask);
  if (!key) return EG_ERROR_MEMORY;
  if (!egi_map_get(&f->known, key, &index)) {
    EG_TRY(EGI_GROW(&f->arena, &f->proven, f->n_proven, &f->proven_capacity));
    index = f->n_proven++;
    EG_TRY(egi_mask_prove(f->graph, mask, &f->graph->module->arena, &f->proven[index]));
    EG_TRY(egi_map_put(&f->known, key, index));
  }
  *out_proof = &f->proven[index];
  return EG_OK;
}

static bool may_agree(const egi_graph *graph, egi_dim a, egi_dim b) {
  egi_dims *dims = graph->module->dims;
  int64_t number;
  if (egi_dims_agree(graph, a, b)) return true;
  return !egi_dim_value(dims, egi_dim_resolve(dims, a), &number) &&
         !egi_dim_value(dims, egi_dim_resolve(dims, b), &number);
}

/* key_valid takes the padding's shape as it is: it must be that of the keys, or sizes of its own, which inference then
 * assumes to be equal. */
static const char *check_padding(const fuser *f, const egi_mask *mask, egi_value_id padding) {
  const egi_value *value = &f->graph->values[padding];
  if (padding == 0) return NULL;
  bool fits = value->rank == 2 && may_agree(f->graph, value->dims[0], mask->batch) &&
              may_agree(f->graph, value->dims[1], mask->sequence);
  return fits ? NULL : "the padding mask has other sizes than the keys";
}

/* ---- matching --------------------------------------------------------------------------------------------------- */

static eg_status report_miss(fuser *f, const egi_attention_match *match) {
  egi_pass_report *report = f->run->report;
  const egi_node *node = &f->graph->nodes[match->at];
  const char *op = node->op_name ? node->op_name : egi_op_get(node->op)->name;
  const char *name = node->name;
  if (report->nearest_miss && match->depth < f->depth) return EG_OK;
  f->depth = match->depth;
  if ((!name || name[0] == '\0') && node->n_outputs > 0) name = f->graph->values[node->outputs[0]].name;
  report->nearest_miss = egi_arena_format(&f->graph->module->arena, "node \"%s\" (%s): %s", name, op, match->reason);
  return report->nearest_miss ? EG_OK : EG_ERROR_MEMORY;
}

static bool is_repeated(const egi_graph *graph, const egi_attention_match *match) {
  const egi_node *node = &graph->nodes[match->root];
  return node->op == EGI_OP_Attention && match->flat_heads[0] == 0 &&
         graph->values[node->inputs[1]].dims[1] != graph->values[match->k.value].dims[match->k.axes[1]];
}

static eg_status keep(fuser *f, const egi_attention_match *match, const egi_mask_proof *proof) {
  EG_TRY(EGI_GROW(&f->arena, &f->matches, f->n_matches, &f->matches_capacity));
  EG_TRY(EGI_GROW(&f->arena, &f->proofs, f->n_matches, &f->proofs_capacity));
  f->matches[f->n_matches] = *match;
  f->proofs[f->n_matches++] = *proof;
  return EG_OK;
}

static eg_status look_at(fuser *f, egi_node_id id) {
  egi_attention_match match;
  const egi_mask_proof *proof = NULL;
  if (!egi_match_attention(f->graph, id, &f->arena, &match)) return EG_OK;
  f->run->report->n_tried++;
  if (match.reason) return report_miss(f, &match);
  EG_TRY(prove(f, &match.mask, &proof));
  match.at = match.softmax;
  match.depth += 10;
  match.reason = proof->is_proven ? check_padding(f, &match.mask, proof->padding) : proof->reason;
  if (!match.reason && proof->follows_positions && f->run->is_general)
    match.reason = "the mask follows positions, which may be any";
  if (!match.reason) return keep(f, &match, proof);
  EG_TRY(report_miss(f, &match));
  static const egi_mask_proof none;
  return is_repeated(f->graph, &match) ? keep(f, &match, &none) : EG_OK;
}

/* ---- emitting --------------------------------------------------------------------------------------------------- */

/* The last node of a replacement: it takes over the result's value. */
static eg_status add_last(fuser *f, egi_node *node, egi_value_id result) {
  egi_node_id id;
  node->outputs = &result;
  node->n_outputs = 1;
  EG_TRY(egi_graph_add_node(f->graph, node, &id));
  return egi_infer_node(f->graph, id);
}

static egi_value_id emit_turned(egi_emitter *emit, const egi_attention_operand *operand) {
  static const int64_t straight[4] = {0, 1, 2, 3};
  if (memcmp(operand->axes, straight, sizeof straight) == 0) return operand->value;
  const egi_attribute axes = egi_attribute_ints("perm", operand->axes, 4);
  return egi_emit(emit, EGI_OP_Transpose, &operand->value, 1, &axes, 1);
}

/* [batch, sequence, heads · width] -> [batch, heads, sequence, width] */
static egi_value_id emit_heads(egi_emitter *emit, egi_value_id value, int64_t heads) {
  const int64_t shape[4] = {0, 0, heads, -1};
  egi_value_id split = egi_emit_binary(emit, EGI_OP_Reshape, value, egi_emit_integers(emit, shape, 4));
  const egi_attribute axes = egi_attribute_ints("perm", (const int64_t[4]){0, 2, 1, 3}, 4);
  return egi_emit(emit, EGI_OP_Transpose, &split, 1, &axes, 1);
}

static egi_value_id emit_operand(egi_emitter *emit, const egi_attention_match *match, unsigned which) {
  const egi_attention_operand *operand = which == 0 ? &match->q : which == 1 ? &match->k : &match->v;
  int64_t heads = match->flat_heads[which > 0];
  return heads > 0 ? emit_heads(emit, operand->value, heads) : emit_turned(emit, operand);
}

static egi_value_id emit_valid(fuser *f, egi_emitter *emit, egi_value_id padding) {
  if (padding == 0) return 0;
  if (f->valid[padding] == 0) {
    const char *scope = emit->scope;
    emit->scope = NULL;
    f->valid[padding] = egi_emit_cast(emit, padding, EG_DTYPE_BOOL);
    emit->scope = scope;
  }
  return f->valid[padding];
}

static egi_value_id emit_sinks(egi_emitter *emit, egi_value_id sinks) {
  static const int64_t flat[1] = {-1};
  if (sinks == 0) return 0;
  egi_node_id id = egi_producer(emit->graph, sinks);
  egi_op op = emit->graph->nodes[id].op;
  bool is_shaped = id != 0 && (op == EGI_OP_Reshape || op == EGI_OP_Unsqueeze);
  if (is_shaped && emit->graph->values[emit->graph->nodes[id].inputs[0]].rank == 1)
    sinks = emit->graph->nodes[id].inputs[0];
  else
    sinks = egi_emit_binary(emit, EGI_OP_Reshape, sinks, egi_emit_integers(emit, flat, 1));
  return egi_emit_cast(emit, sinks, EG_DTYPE_F32);
}

static unsigned make_attributes(const egi_attention_match *match, const egi_mask_proof *proof, egi_attribute *out) {
  unsigned n = 0;
  out[n++] = egi_attribute_float("scale", (float)match->scale);
  if (match->softcap > 0) out[n++] = egi_attribute_float("softcap", (float)match->softcap);
  out[n++] = egi_attribute_int("causal", proof->is_causal);
  if (proof->window > 0) out[n++] = egi_attribute_int("window", proof->window);
  return n;
}

/* What comes behind the attention so that its result is the old one: heads joined, the old type. */
static eg_status add_tail(fuser *f, egi_emitter *emit, const egi_attention_match *match, egi_node *attention,
                          eg_dtype dtype) {
  egi_value_id y = egi_emit(emit, attention->op, attention->inputs, attention->n_inputs, attention->attributes,
                            attention->n_attributes);
  egi_node last = {.op = EGI_OP_Cast, .name = "", .scope = emit->scope};
  egi_attribute to = egi_attribute_int("to", dtype);
  egi_value_id inputs[2] = {y, 0};
  last.inputs = inputs;
  last.n_inputs = 1;
  if (match->flat_heads[0] > 0) {
    const egi_attribute axes = egi_attribute_ints("perm", (const int64_t[4]){0, 2, 1, 3}, 4);
    inputs[0] = egi_emit(emit, EGI_OP_Transpose, &y, 1, &axes, 1);
    inputs[1] = egi_emit_integers(emit, (const int64_t[3]){0, 0, -1}, 3);
    last.op = EGI_OP_Reshape;
    last.n_inputs = 2;
  } else {
    last.attributes = &to;
    last.n_attributes = 1;
  }
  EG_TRY(emit->status);
  return add_last(f, &last, match->result);
}

static const char *scope_of(const fuser *f, const egi_attention_match *match) {
  const char *scope = f->graph->nodes[match->root].scope;
  return scope ? scope : f->graph->nodes[match->softmax].scope;
}

/* An Attention's present keys and values, when they are used: without a past, its own. */
static eg_status add_present(fuser *f, const egi_node *attention, const egi_value_id *inputs, bool is_flat) {
  for (uint16_t i = 1; i <= 2 && i < attention->n_outputs; i++) {
    egi_value_id value = is_flat ? inputs[i] : attention->inputs[i];
    egi_node node = {.op = EGI_OP_Identity, .name = "", .scope = attention->scope, .inputs = &value, .n_inputs = 1};
    if (attention->op == EGI_OP_Attention && attention->outputs[i] != 0)
      EG_TRY(add_last(f, &node, attention->outputs[i]));
  }
  return EG_OK;
}

static eg_status fuse(fuser *f, const egi_attention_match *match, const egi_mask_proof *proof) {
  egi_emitter emit = {.graph = f->graph, .scope = scope_of(f, match)};
  egi_attribute attributes[4];
  const char *name = f->graph->nodes[match->root].name;
  eg_dtype dtype = f->graph->values[match->result].dtype;
  egi_value_id inputs[5];
  for (unsigned i = 0; i < 3; i++) inputs[i] = emit_operand(&emit, match, i);
  inputs[3] = emit_valid(f, &emit, proof->padding);
  inputs[4] = emit_sinks(&emit, match->sinks);
  EG_TRY(emit.status);
  eg_dtype own = f->graph->values[inputs[0]].dtype;
  inputs[2] = egi_emit_cast(&emit, inputs[2], own);
  EG_TRY(emit.status);
  egi_node node = {.op = EGI_OP_MaskedAttention, .name = name, .scope = emit.scope};
  node.inputs = inputs;
  node.n_inputs = inputs[4] != 0 ? 5 : inputs[3] != 0 ? 4 : 3;
  node.attributes = attributes;
  node.n_attributes = (uint16_t)make_attributes(match, proof, attributes);
  const egi_node root = f->graph->nodes[match->root]; /* its lists stay when it is gone */
  egi_graph_remove_node(f->graph, match->root);
  EG_TRY(add_present(f, &root, inputs, match->flat_heads[0] > 0));
  if (match->flat_heads[0] > 0 || own != dtype) return add_tail(f, &emit, match, &node, dtype);
  return add_last(f, &node, match->result);
}

/* A mask that is not known: the operator stays, with the key heads that there are. */
static eg_status share_heads(fuser *f, const egi_attention_match *match) {
  egi_emitter emit = {.graph = f->graph, .scope = scope_of(f, match)};
  for (unsigned i = 1; i < 3; i++) {
    egi_value_id value = emit_operand(&emit, match, i);
    EG_TRY(emit.status);
    f->graph->nodes[match->root].inputs[i] = value;
  }
  return EG_OK;
}

static eg_status fuse_all(fuser *f) {
  egi_graph *graph = f->graph;
  egi_map_init(&f->known, &f->arena);
  f->valid = EGI_NEW(&f->arena, egi_value_id, graph->n_values);
  if (!f->valid) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) EG_TRY(look_at(f, id));
  for (uint32_t i = 0; i < f->n_matches; i++) {
    bool is_proven = f->proofs[i].is_proven;
    EG_TRY(is_proven ? fuse(f, &f->matches[i], &f->proofs[i]) : share_heads(f, &f->matches[i]));
    graph->module->assumes_positions |= is_proven && f->proofs[i].follows_positions;
    f->run->report->n_matched += is_proven;
    f->run->has_changed = true;
  }
  if (!f->run->has_changed) return EG_OK;
  EG_TRY(egi_graph_tidy(graph));
  egi_pass_report dead = {0};
  egi_pass_run clean = {.ctx = f->run->ctx, .report = &dead};
  return egi_pass_eliminate_dead(&clean, graph);
}

eg_status egi_pass_fuse_attention(egi_pass_run *run, egi_graph *graph) {
  fuser f = {.run = run, .graph = graph};
  egi_arena_init(&f.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = fuse_all(&f);
  egi_arena_clear(&f.arena);
  return status;
}
