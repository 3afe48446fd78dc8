/* Facts about symbolic dims: assumptions and their substitution, evaluation with bindings, printing. */
#include "graph/dims.h"

#define MAX_PRINTED_DEPTH 4

static egi_dim resolve_walk(egi_dims *dims, egi_dim dim);

/* ---- resolving ------------------------------------------------------------------------------------------------ */

static egi_dim resolve_atom(egi_dims *dims, uint32_t index) {
  egi_atom atom = dims->atoms[index];
  if (atom.substitute != EGI_DIM_NONE) return resolve_walk(dims, atom.substitute);
  if (atom.a == EGI_DIM_NONE) return atom.self;
  egi_dim a = resolve_walk(dims, atom.a), b = resolve_walk(dims, atom.b);
  if (a == atom.a && b == atom.b) return atom.self;
  if (atom.kind == EGI_ATOM_QUOTIENT) return egi_dim_divide(dims, a, b);
  return atom.kind == EGI_ATOM_MINIMUM ? egi_dim_minimum(dims, a, b) : egi_dim_maximum(dims, a, b);
}

/* Depth is bounded by that of atoms, since substitutes are flat; work by keeping each polynomial's result. */
static egi_dim resolve_walk(egi_dims *dims, egi_dim dim) {
  if (dim == EGI_DIM_NONE || dims->polynomials[dim].resolved_stamp == dims->resolve_stamp)
    return dim == EGI_DIM_NONE ? dim : dims->polynomials[dim].resolved;
  egi_dim sum = egi_dim_constant(dims, 0);
  bool is_changed = false;
  for (uint32_t i = 0; i < dims->polynomials[dim].n_terms; i++) {
    egi_term term = dims->polynomials[dim].terms[i];
    egi_dim product = egi_dim_constant(dims, term.coefficient);
    for (uint32_t j = 0; j < term.degree; j++) {
      egi_dim factor = resolve_atom(dims, term.atoms[j]);
      is_changed = is_changed || factor != dims->atoms[term.atoms[j]].self;
      product = egi_dim_multiply(dims, product, factor);
    }
    sum = egi_dim_add(dims, sum, product);
  }
  egi_polynomial *p = &dims->polynomials[dim];
  p->resolved = is_changed ? sum : dim;
  p->resolved_stamp = dims->resolve_stamp;
  return p->resolved;
}

egi_dim egi_dim_resolve(egi_dims *dims, egi_dim dim) {
  if (dims->resolve_stamp == 0) return dim; /* nothing was ever substituted */
  return resolve_walk(dims, dim);
}

/* ---- assumptions ---------------------------------------------------------------------------------------------- */

static bool mentions_walk(egi_dims *dims, egi_dim dim, uint32_t atom) {
  egi_polynomial *p = &dims->polynomials[dim];
  if (p->mark_stamp == dims->mark_stamp) return false;
  p->mark_stamp = dims->mark_stamp;
  for (uint32_t i = 0; i < p->n_terms; i++)
    for (uint32_t j = 0; j < p->terms[i].degree; j++) {
      uint32_t other = p->terms[i].atoms[j];
      if (other == atom) return true;
      if (dims->atoms[other].a == EGI_DIM_NONE) continue;
      if (mentions_walk(dims, dims->atoms[other].a, atom) || mentions_walk(dims, dims->atoms[other].b, atom))
        return true;
    }
  return false;
}

static bool mentions(egi_dims *dims, egi_dim dim, uint32_t atom) {
  dims->mark_stamp++;
  return mentions_walk(dims, dim, atom);
}

/* How gladly term `at` of difference = 0 is solved for: unknown sizes first, then quotients and extremes, then symbols;
 * results that are sizes themselves before differences; younger atoms before older ones. */
static int rate_candidate(egi_dims *dims, egi_dim difference, uint32_t at, egi_dim *out_solution) {
  const egi_term term = dims->polynomials[difference].terms[at];
  if (term.degree != 1 || (term.coefficient != 1 && term.coefficient != -1)) return -1;
  egi_dim self = dims->atoms[term.atoms[0]].self;
  /* difference = ±x + r = 0, so x = -r or r. */
  egi_dim rest = term.coefficient == 1 ? egi_dim_subtract(dims, self, difference) : egi_dim_add(dims, self, difference);
  if (rest == EGI_DIM_NONE || mentions(dims, rest, term.atoms[0])) return -1;
  *out_solution = rest;
  egi_atom_kind kind = dims->atoms[term.atoms[0]].kind;
  int rating = kind == EGI_ATOM_FRESH ? 4 : kind == EGI_ATOM_SYMBOL ? 0 : 2;
  return rating + (egi_dim_is_nonnegative(dims, rest) ? 1 : 0);
}

/* What stands for an atom never mentions an atom that has a substitute itself: walks stay shallow. */
static eg_status flatten_substitutes(egi_dims *dims, uint32_t atom) {
  EG_TRY(EGI_GROW(dims->arena, &dims->substituted, dims->n_substituted, &dims->substituted_capacity));
  dims->substituted[dims->n_substituted++] = atom;
  dims->resolve_stamp++;
  for (uint32_t i = 0; i < dims->n_substituted; i++) {
    uint32_t index = dims->substituted[i];
    egi_dim flat = egi_dim_resolve(dims, dims->atoms[index].substitute);
    dims->atoms[index].substitute = flat;
  }
  return egi_dims_status(dims);
}

static eg_status substitute_best(egi_dims *dims, egi_dim difference) {
  int best = -1;
  uint32_t best_atom = 0;
  egi_dim best_solution = EGI_DIM_NONE, solution;
  for (uint32_t i = 0; i < dims->polynomials[difference].n_terms; i++) {
    int rating = rate_candidate(dims, difference, i, &solution);
    uint32_t atom = dims->polynomials[difference].terms[i].atoms[0];
    if (rating < 0 || rating < best || (rating == best && atom < best_atom)) continue;
    best = rating;
    best_atom = atom;
    best_solution = solution;
  }
  if (best < 0 || dims->n_substituted == EGI_MAX_SUBSTITUTES) return egi_dims_status(dims);
  dims->atoms[best_atom].substitute = best_solution;
  return flatten_substitutes(dims, best_atom);
}

/* The difference without factors that all of its terms share: sizes are positive, so it vanishes when that does. */
static egi_dim reduce(egi_dims *dims, egi_dim difference) {
  egi_term common = dims->polynomials[difference].terms[0];
  common.coefficient = common.coefficient < 0 ? -1 : 1;
  egi_dim reduced = difference;
  for (uint32_t j = 0; j < common.degree; j++) {
    egi_dim factor = dims->atoms[common.atoms[j]].self;
    egi_dim quotient = reduced;
    bool is_shared = egi_dim_is_positive(dims, factor);
    for (uint32_t i = 0; i < dims->polynomials[reduced].n_terms && is_shared; i++) {
      const egi_term *term = &dims->polynomials[reduced].terms[i];
      bool has_atom = false;
      for (uint32_t k = 0; k < term->degree; k++) has_atom = has_atom || term->atoms[k] == common.atoms[j];
      is_shared = has_atom;
    }
    if (is_shared) quotient = egi_dim_divide(dims, reduced, factor);
    if (quotient != EGI_DIM_NONE) reduced = quotient;
  }
  return reduced;
}

static egi_dim drop_content(egi_dims *dims, egi_dim difference) {
  const egi_polynomial *p = &dims->polynomials[difference];
  int64_t divisor = 0;
  for (uint32_t i = 0; i < p->n_terms; i++) {
    int64_t a = p->terms[i].coefficient, b = divisor;
    if (a == INT64_MIN) return difference;
    while (b != 0) {
      int64_t rest = a % b;
      a = b;
      b = rest;
    }
    divisor = a < 0 ? -a : a;
  }
  return divisor > 1 ? egi_dim_divide(dims, difference, egi_dim_constant(dims, divisor)) : difference;
}

static eg_status contradict(egi_dims *dims, egi_dim a, egi_dim b) {
  egi_text text;
  egi_text_init(&text, dims->arena->ctx);
  egi_dim_print(dims, a, &text);
  egi_text_add(&text, " is not ");
  egi_dim_print(dims, b, &text);
  eg_status status = egi_text_status(&text);
  if (status == EG_OK) status = egi_fail(dims->arena->ctx, EG_ERROR_SHAPE, "%s", egi_text_string(&text));
  egi_text_free(&text);
  return status;
}

eg_status egi_dim_assume(egi_dims *dims, egi_dim first, egi_dim second) {
  egi_dim a = egi_dim_resolve(dims, first), b = egi_dim_resolve(dims, second);
  EG_TRY(egi_dims_status(dims));
  if (a == b || a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EG_OK;
  egi_dim difference = egi_dim_subtract(dims, a, b), opposite = egi_dim_subtract(dims, b, a);
  EG_TRY(egi_dims_status(dims));
  int64_t number;
  if (egi_dim_value(dims, difference, &number) || egi_dim_is_positive(dims, difference) ||
      egi_dim_is_positive(dims, opposite))
    return contradict(dims, a, b);
  EG_TRY(EGI_GROW(dims->arena, &dims->assumptions, dims->n_assumptions, &dims->assumptions_capacity));
  dims->assumptions[dims->n_assumptions++] = (egi_assumption){first, second};
  difference = drop_content(dims, reduce(dims, difference));
  EG_TRY(egi_dims_status(dims));
  if (egi_dim_value(dims, difference, &number) && number != 0) return contradict(dims, a, b);
  return substitute_best(dims, difference);
}

/* A symbol stands for itself until it is substituted; anything else is assumed to be the number. */
eg_status egi_dim_fix(egi_dims *dims, egi_dim symbol, int64_t value) {
  egi_dim own = egi_dim_resolve(dims, symbol), number = egi_dim_constant(dims, value);
  EG_TRY(egi_dims_status(dims));
  if (own == EGI_DIM_NONE || own == number) return EG_OK;
  const egi_polynomial *p = &dims->polynomials[own];
  bool is_atom = p->n_terms == 1 && p->terms[0].degree == 1 && p->terms[0].coefficient == 1;
  if (!is_atom || dims->n_substituted == EGI_MAX_SUBSTITUTES) return egi_dim_assume(dims, own, number);
  uint32_t atom = p->terms[0].atoms[0];
  dims->atoms[atom].substitute = number;
  return flatten_substitutes(dims, atom);
}

/* ---- evaluation ----------------------------------------------------------------------------------------------- */

typedef struct evaluation {
  egi_dims *dims;
  const egi_binding *bindings;
  size_t n;
} evaluation;

static egi_knowledge evaluate_walk(const evaluation *run, egi_dim dim, int64_t *out_value);

static egi_knowledge evaluate_opaque(const evaluation *run, const egi_atom *atom, int64_t *out) {
  int64_t a, b;
  egi_knowledge of_a = evaluate_walk(run, atom->a, &a), of_b = evaluate_walk(run, atom->b, &b);
  if (of_a != EGI_KNOWN) return of_a;
  if (of_b != EGI_KNOWN) return of_b;
  if (atom->kind == EGI_ATOM_MINIMUM) *out = a < b ? a : b;
  if (atom->kind == EGI_ATOM_MAXIMUM) *out = a > b ? a : b;
  if (atom->kind == EGI_ATOM_QUOTIENT) {
    if (b == 0 || (a == INT64_MIN && b == -1)) return EGI_CONFLICT;
    *out = a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
  }
  return EGI_KNOWN;
}

static egi_knowledge evaluate_own(const evaluation *run, const egi_atom *atom, int64_t *out) {
  for (size_t i = 0; i < run->n; i++)
    if (run->bindings[i].symbol == atom->self) {
      *out = run->bindings[i].value;
      return EGI_KNOWN;
    }
  return atom->a != EGI_DIM_NONE ? evaluate_opaque(run, atom, out) : EGI_UNKNOWN;
}

/* By itself, by what it was assumed to equal, or by both: then they must agree. */
static egi_knowledge evaluate_atom(const evaluation *run, uint32_t index, int64_t *out) {
  const egi_atom *atom = &run->dims->atoms[index];
  int64_t own = 0, other = 0;
  egi_knowledge of_own = evaluate_own(run, atom, &own), of_other = EGI_UNKNOWN;
  if (atom->substitute != EGI_DIM_NONE) of_other = evaluate_walk(run, atom->substitute, &other);
  if (of_own == EGI_CONFLICT || of_other == EGI_CONFLICT) return EGI_CONFLICT;
  if (of_own == EGI_KNOWN && of_other == EGI_KNOWN && own != other) return EGI_CONFLICT;
  *out = of_own == EGI_KNOWN ? own : other;
  return of_own == EGI_KNOWN ? of_own : of_other;
}

static egi_knowledge evaluate_terms(const evaluation *run, egi_dim dim, int64_t *out_value) {
  const egi_polynomial *p = &run->dims->polynomials[dim];
  egi_knowledge result = EGI_KNOWN;
  int64_t sum = 0, factor;
  for (uint32_t i = 0; i < p->n_terms; i++) {
    int64_t product = p->terms[i].coefficient;
    for (uint32_t j = 0; j < p->terms[i].degree; j++) {
      egi_knowledge of_factor = evaluate_atom(run, p->terms[i].atoms[j], &factor);
      if (of_factor == EGI_CONFLICT) return of_factor;
      if (of_factor == EGI_UNKNOWN) result = of_factor;
      if (result == EGI_KNOWN && !egi_integer_multiply(product, factor, &product)) return EGI_CONFLICT;
    }
    if (result == EGI_KNOWN && !egi_integer_add(sum, product, &sum)) return EGI_CONFLICT;
  }
  *out_value = sum;
  return result;
}

static egi_knowledge evaluate_walk(const evaluation *run, egi_dim dim, int64_t *out_value) {
  egi_polynomial *p = &run->dims->polynomials[dim];
  if (p->value_stamp != run->dims->value_stamp) {
    p->knowledge = evaluate_terms(run, dim, &p->value);
    p->value_stamp = run->dims->value_stamp;
  }
  *out_value = p->value;
  return p->knowledge;
}

static egi_knowledge evaluate(egi_dims *dims, egi_dim dim, const egi_binding *bindings, size_t n, int64_t *out_value) {
  const evaluation run = {dims, bindings, n};
  if (dim == EGI_DIM_NONE) return EGI_UNKNOWN;
  dims->value_stamp++;
  return evaluate_walk(&run, dim, out_value);
}

bool egi_dim_evaluate(egi_dims *dims, egi_dim dim, const egi_binding *bindings, size_t n, int64_t *out_value) {
  int64_t value;
  if (evaluate(dims, dim, bindings, n, &value) != EGI_KNOWN) return false;
  *out_value = value;
  return true;
}

const char *egi_dims_check(egi_dims *dims, const egi_binding *bindings, size_t n) {
  for (uint32_t i = 0; i < dims->n_assumptions; i++) {
    const egi_assumption *fact = &dims->assumptions[i];
    int64_t a = 0, b = 0;
    egi_knowledge of_a = evaluate(dims, fact->a, bindings, n, &a);
    egi_knowledge of_b = evaluate(dims, fact->b, bindings, n, &b);
    bool is_conflict = of_a == EGI_CONFLICT || of_b == EGI_CONFLICT;
    if (!is_conflict && (of_a == EGI_UNKNOWN || of_b == EGI_UNKNOWN || a == b)) continue;
    egi_text text;
    egi_text_init(&text, dims->arena->ctx);
    egi_dim_print(dims, fact->a, &text);
    egi_text_add(&text, " == ");
    egi_dim_print(dims, fact->b, &text);
    char *copy = egi_arena_copy_text(dims->arena, egi_text_string(&text), strlen(egi_text_string(&text)));
    egi_text_free(&text);
    return copy != NULL ? copy : "an assumption about sizes";
  }
  return NULL;
}

/* ---- printing ------------------------------------------------------------------------------------------------- */

static void print_walk(const egi_dims *dims, egi_dim dim, unsigned depth, egi_text *out);

static void print_atom(const egi_dims *dims, uint32_t index, unsigned depth, egi_text *out) {
  const egi_atom *atom = &dims->atoms[index];
  if (atom->kind == EGI_ATOM_SYMBOL) {
    egi_text_add(out, atom->name);
    return;
  }
  if (atom->kind == EGI_ATOM_FRESH) {
    egi_text_format(out, "%s_%u", atom->name, index);
    return;
  }
  egi_text_add(out, atom->kind == EGI_ATOM_QUOTIENT ? "floor(" : atom->kind == EGI_ATOM_MINIMUM ? "min(" : "max(");
  print_walk(dims, atom->a, depth + 1, out);
  egi_text_add(out, atom->kind == EGI_ATOM_QUOTIENT ? " / " : ", ");
  print_walk(dims, atom->b, depth + 1, out);
  egi_text_add(out, ")");
}

static void print_term(const egi_dims *dims, const egi_term *term, bool is_first, unsigned depth, egi_text *out) {
  int64_t coefficient = term->coefficient;
  uint64_t size = coefficient < 0 ? 0 - (uint64_t)coefficient : (uint64_t)coefficient;
  if (!is_first) egi_text_add(out, coefficient < 0 ? " - " : " + ");
  if (is_first && coefficient < 0) egi_text_add(out, "-");
  if (size != 1 || term->degree == 0) egi_text_format(out, "%llu", (unsigned long long)size);
  for (uint32_t i = 0; i < term->degree; i++) {
    if (i > 0 || size != 1) egi_text_add(out, "*");
    print_atom(dims, term->atoms[i], depth, out);
  }
}

static void print_walk(const egi_dims *dims, egi_dim dim, unsigned depth, egi_text *out) {
  const egi_polynomial *p = &dims->polynomials[dim];
  if (dim == EGI_DIM_NONE || depth > MAX_PRINTED_DEPTH) {
    egi_text_add(out, "?");
    return;
  }
  if (p->n_terms == 0) egi_text_add(out, "0");
  for (uint32_t i = 0; i < p->n_terms; i++) print_term(dims, &p->terms[i], i == 0, depth, out);
}

void egi_dim_print(const egi_dims *dims, egi_dim dim, egi_text *out) {
  print_walk(dims, dim, 0, out);
}

size_t egi_dims_symbol_count(const egi_dims *dims) {
  size_t count = 0;
  for (uint32_t i = 0; i < dims->n_atoms; i++) count += dims->atoms[i].kind == EGI_ATOM_SYMBOL;
  return count;
}

egi_dim egi_dims_symbol_at(const egi_dims *dims, size_t index, const char **out_name) {
  for (uint32_t i = 0; i < dims->n_atoms; i++) {
    if (dims->atoms[i].kind != EGI_ATOM_SYMBOL || index-- != 0) continue;
    *out_name = dims->atoms[i].name;
    return dims->atoms[i].self;
  }
  return EGI_DIM_NONE;
}
