/* JSON lines: documents with labels of their tokens, of their own, or examples of several documents. One pass checks
 * and counts, a second fills arrays of exactly that size. All lines of a file are of one kind. */
#include <inttypes.h>
#include <string.h>

#include "io/documents_scan.h"

enum { NO_LABEL = -100 };

/* Fields whose documents make an example, in this order. */
enum { ANCHOR, POSITIVE, FIRST, SECOND, N_PARTS };
static const char *const part_names[N_PARTS] = {"anchor", "positive", "sentence1", "sentence2"};

/* What one line holds; arrays are empty while counting: an array's place in the file is kept, and read when it is its
 * turn. */
typedef struct row {
  const uint8_t *ids, *labels, *types, *targets, *negative; /* where the values begin; NULL: no such field */
  const uint8_t *parts[N_PARTS];
  uint64_t n_ids, n_labels, n_types, n_parts[N_PARTS], n_negatives, n_negative_tokens;
  int64_t prompt_length;
  bool has_prompt, is_whole; /* is_whole: the target is one number without a fraction */
  bool is_scored;            /* the targets came as "score" */
  uint32_t n_targets;
  egi_documents_kind kind;
} row;

static bool is_key(const uint8_t *text, size_t length, const char *key) {
  return strlen(key) == length && memcmp(text, key, length) == 0;
}

static eg_status fail_twice(const egi_scanner *s, const char *field) {
  return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" stands twice", s->path, s->line, field);
}

static eg_status scan_array(egi_scanner *s, const char *field, bool is_label, const uint8_t **place, uint64_t *count) {
  if (*place != NULL) return fail_twice(s, field);
  *place = s->at;
  return egi_scan_tokens(s, field, is_label, NULL, count);
}

/* A number, or an array of them. */
static eg_status scan_targets(egi_scanner *s, const char *field, row *r) {
  double number;
  bool is_whole;
  uint64_t n = 0;
  if (r->targets != NULL) return fail_twice(s, field);
  r->targets = s->at;
  if (!egi_scan_take(s, '[')) {
    EG_TRY(egi_scan_number(s, field, &number, &r->is_whole));
    r->n_targets = 1;
    return EG_OK;
  }
  do {
    EG_TRY(egi_scan_number(s, field, &number, &is_whole));
    n++;
  } while (egi_scan_take(s, ','));
  if (!egi_scan_take(s, ']') || n > UINT32_MAX)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" has no closing bracket", s->path, s->line, field);
  r->n_targets = (uint32_t)n;
  return EG_OK;
}

/* One document, or an array of them. */
static eg_status scan_negatives(egi_scanner *s, row *r) {
  uint64_t count;
  if (r->negative != NULL) return fail_twice(s, "negative");
  r->negative = s->at;
  egi_scanner inside = *s;
  bool is_list = egi_scan_take(&inside, '[') && egi_scan_take(&inside, '[');
  if (is_list) (void)egi_scan_take(s, '[');
  do {
    EG_TRY(egi_scan_tokens(s, "negative", false, NULL, &count));
    if (count == 0) return egi_scan_fail(s, "\"negative\" is empty");
    r->n_negatives++;
    r->n_negative_tokens += count;
  } while (is_list && egi_scan_take(s, ','));
  if (is_list && !egi_scan_take(s, ']')) return egi_scan_fail(s, "\"negative\" has no closing bracket");
  return EG_OK;
}

static eg_status scan_prompt(egi_scanner *s, row *r) {
  if (r->has_prompt) return fail_twice(s, "prompt_length");
  r->has_prompt = true;
  return egi_scan_integer(s, "prompt_length", &r->prompt_length);
}

static eg_status scan_member(egi_scanner *s, row *r) {
  const uint8_t *key;
  size_t length;
  if (!egi_scan_take(s, '"')) return egi_scan_fail(s, "not a JSON object");
  EG_TRY(egi_scan_string(s, &key, &length));
  if (!egi_scan_take(s, ':')) return egi_scan_fail(s, "not a JSON object");
  if (is_key(key, length, "input_ids")) return scan_array(s, "input_ids", false, &r->ids, &r->n_ids);
  if (is_key(key, length, "labels")) return scan_array(s, "labels", true, &r->labels, &r->n_labels);
  if (is_key(key, length, "token_type_ids")) return scan_array(s, "token_type_ids", false, &r->types, &r->n_types);
  if (is_key(key, length, "prompt_length")) return scan_prompt(s, r);
  if (is_key(key, length, "chosen") || is_key(key, length, "rejected"))
    return egi_scan_fail(s, "pairs of \"chosen\" and \"rejected\" need --loss dpo");
  if (!egi_scan_is_numeric(s)) return egi_scan_skip(s); /* texts and the like, under whatever name */
  if (is_key(key, length, "label")) return scan_targets(s, "label", r);
  if (is_key(key, length, "negative")) return scan_negatives(s, r);
  if (is_key(key, length, "score")) {
    r->is_scored = true;
    return scan_targets(s, "score", r);
  }
  for (int i = 0; i < N_PARTS; i++)
    if (is_key(key, length, part_names[i])) return scan_array(s, part_names[i], false, &r->parts[i], &r->n_parts[i]);
  return egi_scan_skip(s);
}

/* ---- checks ----------------------------------------------------------------------------------------------------- */

static eg_status check_single(const egi_scanner *s, const row *r) {
  if (r->n_ids == 0) return egi_scan_fail(s, "\"input_ids\" is empty");
  if (r->n_ids > UINT32_MAX) return egi_scan_fail(s, "\"input_ids\" is too long");
  if (r->labels != NULL && r->n_labels != r->n_ids)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: %" PRIu64 " labels for %" PRIu64 " input_ids", s->path,
                    s->line, r->n_labels, r->n_ids);
  if (r->types != NULL && r->n_types != r->n_ids)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: %" PRIu64 " token_type_ids for %" PRIu64 " input_ids", s->path,
                    s->line, r->n_types, r->n_ids);
  if (r->labels != NULL && r->has_prompt) return egi_scan_fail(s, "both \"labels\" and \"prompt_length\"");
  if (r->targets != NULL && (r->labels != NULL || r->has_prompt))
    return egi_scan_fail(s, "both a \"label\" and labels of tokens");
  if (r->is_scored) return egi_scan_fail(s, "\"score\" without \"sentence1\" and \"sentence2\"");
  if (r->has_prompt && (r->prompt_length < 0 || (uint64_t)r->prompt_length > r->n_ids))
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"prompt_length\" %" PRId64 " is not in 0 … %" PRIu64, s->path,
                    s->line, r->prompt_length, r->n_ids);
  return EG_OK;
}

static eg_status check_part(const egi_scanner *s, const row *r, int part, const char *beside) {
  if (r->parts[part] == NULL)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" without \"%s\"", s->path, s->line, beside,
                    part_names[part]);
  if (r->n_parts[part] == 0 || r->n_parts[part] > UINT32_MAX)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"%s\" is %s", s->path, s->line, part_names[part],
                    r->n_parts[part] == 0 ? "empty" : "too long");
  return EG_OK;
}

static eg_status check_example(const egi_scanner *s, row *r) {
  bool is_match = r->parts[ANCHOR] != NULL || r->parts[POSITIVE] != NULL || r->negative != NULL;
  bool is_score = r->parts[FIRST] != NULL || r->parts[SECOND] != NULL;
  if (is_match && is_score)
    return egi_scan_fail(s, "\"anchor\" and \"positive\" beside \"sentence1\" and \"sentence2\"");
  if (r->types != NULL || r->labels != NULL || r->has_prompt)
    return egi_scan_fail(s, "labels or types of tokens beside an example of several documents");
  int first = is_match ? ANCHOR : FIRST, second = is_match ? POSITIVE : SECOND;
  EG_TRY(check_part(s, r, first, part_names[second]));
  EG_TRY(check_part(s, r, second, part_names[first]));
  r->kind = is_match ? EGI_DOCUMENTS_MATCHES : EGI_DOCUMENTS_SCORES;
  if (is_match && r->targets != NULL) return egi_scan_fail(s, "a number beside \"anchor\" and \"positive\"");
  if (is_score && r->n_targets != 1) return egi_scan_fail(s, "no \"score\": one number is needed");
  return EG_OK;
}

static eg_status check_row(const egi_scanner *s, row *r) {
  bool is_example = r->negative != NULL;
  for (int i = 0; i < N_PARTS; i++) is_example = is_example || r->parts[i] != NULL;
  if (r->ids == NULL && !is_example) return egi_scan_fail(s, "no \"input_ids\"");
  if (r->ids != NULL && is_example) return egi_scan_fail(s, "\"input_ids\" beside an example of several documents");
  if (is_example) return check_example(s, r);
  EG_TRY(check_single(s, r));
  if (r->targets != NULL) r->kind = r->is_whole ? EGI_DOCUMENTS_CLASS : EGI_DOCUMENTS_NUMBERS;
  return EG_OK;
}

static eg_status scan_row(egi_scanner *s, row *r) {
  *r = (row){0};
  if (!egi_scan_take(s, '{')) return egi_scan_fail(s, "not a JSON object");
  if (!egi_scan_take(s, '}')) {
    do {
      EG_TRY(scan_member(s, r));
    } while (egi_scan_take(s, ','));
    if (!egi_scan_take(s, '}')) return egi_scan_fail(s, "not a JSON object");
  }
  (void)egi_scan_take(s, ' '); /* space alone may follow */
  if (s->at < s->end) return egi_scan_fail(s, "something after the JSON object");
  return check_row(s, r);
}

/* ---- counting --------------------------------------------------------------------------------------------------- */

static const char *kind_field(egi_documents_kind kind) {
  switch (kind) {
  case EGI_DOCUMENTS_CLASS:
  case EGI_DOCUMENTS_NUMBERS:
    return "numbers as \"label\"";
  case EGI_DOCUMENTS_MATCHES:
    return "\"anchor\" and \"positive\"";
  case EGI_DOCUMENTS_SCORES:
    return "\"sentence1\" and \"sentence2\"";
  case EGI_DOCUMENTS_TOKENS:
    break;
  }
  return "labels of tokens";
}

/* A text or null as "label" is no number: the line counts as one without. */
static eg_status fail_kind(const egi_scanner *s, const row *r, const egi_documents_room *room) {
  if (r->kind == EGI_DOCUMENTS_TOKENS)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: no %s, which the lines before have", s->path, s->line,
                    kind_field(room->kind));
  return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: %s, but the lines before have %s", s->path, s->line,
                  kind_field(r->kind), kind_field(room->kind));
}

/* Whole numbers and others make numbers. */
static eg_status join_kinds(const egi_scanner *s, const row *r, egi_documents_room *room) {
  bool was_single = room->kind == EGI_DOCUMENTS_CLASS || room->kind == EGI_DOCUMENTS_NUMBERS;
  bool is_single = r->kind == EGI_DOCUMENTS_CLASS || r->kind == EGI_DOCUMENTS_NUMBERS;
  if (r->kind != room->kind && !(was_single && is_single)) return fail_kind(s, r, room);
  if (r->n_targets != room->n_numbers)
    return egi_fail(s->ctx, EG_ERROR_DATA, "%s line %zu: \"label\" has %u numbers, the lines before have %u", s->path,
                    s->line, r->n_targets, room->n_numbers);
  if (r->kind == EGI_DOCUMENTS_NUMBERS) room->kind = r->kind;
  return EG_OK;
}

static eg_status count_rows(egi_scanner *s, const egi_mapping *mapping, egi_documents_room *room) {
  size_t position = 0, rows = 0;
  while (egi_scan_line(s, mapping, &position)) {
    row r;
    EG_TRY(scan_row(s, &r));
    if (rows++ == 0) {
      room->kind = r.kind;
      room->n_numbers = r.n_targets;
    }
    EG_TRY(join_kinds(s, &r, room));
    room->has_types = room->has_types || r.types != NULL;
    room->n_documents += r.ids != NULL ? 1 : 2 + (size_t)r.n_negatives;
    room->n_tokens += r.n_ids + r.n_negative_tokens;
    for (int i = 0; i < N_PARTS; i++) room->n_tokens += r.n_parts[i];
  }
  if (rows == 0) return egi_fail(s->ctx, EG_ERROR_DATA, "%s: the file has no documents", s->path);
  return EG_OK;
}

/* ---- filling ---------------------------------------------------------------------------------------------------- */

static void end_document(egi_documents *documents, uint64_t n_tokens, uint32_t sequence) {
  if (sequence > 0 && n_tokens > sequence) {
    n_tokens = sequence;
    documents->n_cut++;
    documents->cut_length = sequence;
  }
  egi_documents_end_document(documents, n_tokens);
}

static eg_status fill_single(egi_scanner s, const row *r, uint32_t sequence, egi_documents *documents) {
  uint64_t first = documents->offsets[documents->n_documents], count;
  s.at = r->ids;
  EG_TRY(egi_scan_tokens(&s, "input_ids", false, documents->tokens + first, &count));
  egi_documents_derive_labels(documents, r->n_ids, r->has_prompt ? (uint64_t)r->prompt_length : 0);
  documents->n_labelled += r->labels != NULL;
  if (r->labels != NULL) {
    s.at = r->labels;
    EG_TRY(egi_scan_tokens(&s, "labels", true, documents->labels + first, &count));
  }
  if (r->types != NULL) {
    s.at = r->types;
    EG_TRY(egi_scan_tokens(&s, "token_type_ids", false, documents->token_types + first, &count));
  }
  end_document(documents, r->n_ids, sequence);
  return EG_OK;
}

/* A document of an example at the scanner's place. */
static eg_status fill_part(egi_scanner *s, bool is_first, uint32_t sequence, egi_documents *documents) {
  uint64_t first = documents->offsets[documents->n_documents], count;
  EG_TRY(egi_scan_tokens(s, "documents", false, documents->tokens + first, &count));
  for (uint64_t i = 0; i < count; i++) documents->labels[first + i] = NO_LABEL;
  documents->is_first[documents->n_documents] = is_first;
  end_document(documents, count, sequence);
  return EG_OK;
}

static eg_status fill_example(egi_scanner s, const row *r, uint32_t sequence, egi_documents *documents) {
  bool is_first = true;
  for (int i = 0; i < N_PARTS; i++) {
    if (r->parts[i] == NULL) continue;
    s.at = r->parts[i];
    EG_TRY(fill_part(&s, is_first, sequence, documents));
    is_first = false;
  }
  if (r->negative == NULL) return EG_OK;
  s.at = r->negative;
  egi_scanner inside = s;
  if (egi_scan_take(&inside, '[') && egi_scan_take(&inside, '[')) (void)egi_scan_take(&s, '[');
  for (uint64_t i = 0; i < r->n_negatives; i++) {
    EG_TRY(fill_part(&s, false, sequence, documents));
    (void)egi_scan_take(&s, ',');
  }
  return EG_OK;
}

static eg_status fill_numbers(egi_scanner s, const row *r, float *numbers) {
  double number;
  bool is_whole;
  if (r->targets == NULL) return EG_OK;
  s.at = r->targets;
  (void)egi_scan_take(&s, '[');
  for (uint32_t i = 0; i < r->n_targets; i++) {
    EG_TRY(egi_scan_number(&s, "label", &number, &is_whole));
    (void)egi_scan_take(&s, ',');
    numbers[i] = (float)number;
  }
  return EG_OK;
}

static eg_status fill_rows(egi_scanner *s, const egi_mapping *mapping, uint32_t sequence, egi_documents *documents) {
  size_t position = 0;
  s->line = 0;
  while (egi_scan_line(s, mapping, &position)) {
    row r;
    EG_TRY(scan_row(s, &r));
    EG_TRY(fill_numbers(*s, &r, documents->numbers + documents->n_documents * documents->n_numbers));
    if (r.ids != NULL)
      EG_TRY(fill_single(*s, &r, sequence, documents));
    else
      EG_TRY(fill_example(*s, &r, sequence, documents));
  }
  return EG_OK;
}

eg_status egi_documents_read_jsonl(eg_context *ctx, const char *path, uint32_t sequence,
                                   egi_documents **out_documents) {
  egi_mapping mapping;
  egi_documents *documents = NULL;
  egi_documents_room room = {0};
  EG_TRY(egi_mapping_open(ctx, path, &mapping));
  egi_scanner s = {.ctx = ctx, .path = path};
  eg_status status = count_rows(&s, &mapping, &room);
  if (status == EG_OK) status = egi_documents_begin(ctx, path, &room, &documents);
  if (status == EG_OK) status = fill_rows(&s, &mapping, sequence, documents);
  egi_mapping_close(&mapping);
  if (status == EG_OK)
    *out_documents = documents;
  else
    egi_documents_free(documents);
  return status;
}
