/* Tables of symbolic dims: hash-consed polynomials and atoms, and builders that bring polynomials into normal form.
 * What does not fit (overflow, too many terms, too deep) becomes a fresh unknown, so that a wrong number never comes
 * out. */
#include "graph/dims.h"

/* ---- tables --------------------------------------------------------------------------------------------------- */

eg_status egi_dims_create(egi_arena *arena, egi_dims **out_dims) {
  egi_dims *dims = EGI_NEW(arena, egi_dims, 1);
  if (dims == NULL) return EG_ERROR_MEMORY;
  dims->arena = arena;
  dims->n_slots = dims->n_atom_slots = 64;
  dims->slots = EGI_NEW(arena, uint32_t, dims->n_slots);
  dims->atom_slots = EGI_NEW(arena, uint32_t, dims->n_atom_slots);
  if (dims->slots == NULL || dims->atom_slots == NULL) return EG_ERROR_MEMORY;
  EG_TRY(EGI_GROW(arena, &dims->polynomials, 0, &dims->polynomials_capacity));
  dims->n_polynomials = 1;
  egi_map_init(&dims->symbols, arena);
  *out_dims = dims;
  return EG_OK;
}

static void *copy_array(egi_arena *arena, const void *array, size_t count, size_t element_bytes) {
  void *copy = egi_arena_get(arena, count, element_bytes);
  if (copy != NULL && count > 0) memcpy(copy, array, count * element_bytes);
  return copy;
}

eg_status egi_dims_clone(egi_arena *arena, const egi_dims *dims, egi_dims **out_dims) {
  egi_dims *copy = copy_array(arena, dims, 1, sizeof *dims);
  if (copy == NULL) return EG_ERROR_MEMORY;
  copy->arena = arena;
  copy->polynomials = copy_array(arena, dims->polynomials, dims->n_polynomials, sizeof *dims->polynomials);
  copy->atoms = copy_array(arena, dims->atoms, dims->n_atoms, sizeof *dims->atoms);
  copy->assumptions = copy_array(arena, dims->assumptions, dims->n_assumptions, sizeof *dims->assumptions);
  copy->slots = copy_array(arena, dims->slots, dims->n_slots, sizeof *dims->slots);
  copy->atom_slots = copy_array(arena, dims->atom_slots, dims->n_atom_slots, sizeof *dims->atom_slots);
  copy->substituted = copy_array(arena, dims->substituted, dims->n_substituted, sizeof *dims->substituted);
  if (copy->polynomials == NULL || copy->atoms == NULL || copy->assumptions == NULL || copy->slots == NULL ||
      copy->atom_slots == NULL || copy->substituted == NULL)
    return EG_ERROR_MEMORY;
  copy->polynomials_capacity = dims->n_polynomials;
  copy->atoms_capacity = dims->n_atoms;
  copy->assumptions_capacity = dims->n_assumptions;
  copy->substituted_capacity = dims->n_substituted;
  egi_map_init(&copy->symbols, arena);
  for (uint32_t i = 0; i < copy->n_atoms; i++)
    if (copy->atoms[i].kind == EGI_ATOM_SYMBOL)
      EG_TRY(egi_map_put(&copy->symbols, copy->atoms[i].name, copy->atoms[i].self));
  *out_dims = copy;
  return EG_OK;
}

eg_status egi_dims_status(const egi_dims *dims) {
  return dims->is_failed ? EG_ERROR_MEMORY : EG_OK;
}

static egi_dim fail(egi_dims *dims) {
  dims->is_failed = true;
  return EGI_DIM_NONE;
}

static uint32_t hash_terms(const egi_term *terms, uint32_t n_terms) {
  uint64_t hash = 0;
  for (uint32_t i = 0; i < n_terms; i++) {
    hash = egi_hash(&terms[i].coefficient, sizeof terms[i].coefficient, hash);
    hash = egi_hash(terms[i].atoms, terms[i].degree * sizeof terms[i].atoms[0], hash);
  }
  return (uint32_t)(hash ^ (hash >> 32));
}

static int compare_atoms(const egi_term *a, const egi_term *b) {
  if (a->degree != b->degree) return a->degree > b->degree ? -1 : 1;
  for (uint32_t i = 0; i < a->degree; i++)
    if (a->atoms[i] != b->atoms[i]) return a->atoms[i] < b->atoms[i] ? -1 : 1;
  return 0;
}

static bool is_same(const egi_polynomial *polynomial, const egi_term *terms, uint32_t n_terms) {
  if (polynomial->n_terms != n_terms) return false;
  for (uint32_t i = 0; i < n_terms; i++)
    if (polynomial->terms[i].coefficient != terms[i].coefficient ||
        compare_atoms(&polynomial->terms[i], &terms[i]) != 0)
      return false;
  return true;
}

static bool rehash(egi_dims *dims) {
  uint32_t n_slots = dims->n_slots * 2;
  uint32_t *slots = EGI_NEW(dims->arena, uint32_t, n_slots);
  if (slots == NULL) return false;
  for (uint32_t i = 1; i < dims->n_polynomials; i++) {
    uint32_t at = dims->polynomials[i].hash & (n_slots - 1);
    while (slots[at] != 0) at = (at + 1) & (n_slots - 1);
    slots[at] = i;
  }
  dims->slots = slots;
  dims->n_slots = n_slots;
  return true;
}

static egi_dim intern(egi_dims *dims, const egi_term *terms, uint32_t n_terms) {
  uint32_t hash = hash_terms(terms, n_terms);
  if (dims->n_polynomials * 2 > dims->n_slots && !rehash(dims)) return fail(dims);
  uint32_t at = hash & (dims->n_slots - 1);
  for (; dims->slots[at] != 0; at = (at + 1) & (dims->n_slots - 1)) {
    const egi_polynomial *polynomial = &dims->polynomials[dims->slots[at]];
    if (polynomial->hash == hash && is_same(polynomial, terms, n_terms)) return dims->slots[at];
  }
  if (EGI_GROW(dims->arena, &dims->polynomials, dims->n_polynomials, &dims->polynomials_capacity) != EG_OK)
    return fail(dims);
  egi_term *copy = EGI_NEW(dims->arena, egi_term, n_terms);
  if (copy == NULL) return fail(dims);
  if (n_terms > 0) memcpy(copy, terms, n_terms * sizeof *copy);
  egi_polynomial *row = &dims->polynomials[dims->n_polynomials];
  memset(row, 0, sizeof *row);
  row->terms = copy;
  row->n_terms = n_terms;
  row->hash = hash;
  dims->slots[at] = dims->n_polynomials;
  return dims->n_polynomials++;
}

/* ---- atoms ---------------------------------------------------------------------------------------------------- */

static egi_dim add_atom(egi_dims *dims, const egi_atom *atom) {
  if (EGI_GROW(dims->arena, &dims->atoms, dims->n_atoms, &dims->atoms_capacity) != EG_OK) return fail(dims);
  egi_term term = {.coefficient = 1, .degree = 1, .atoms = {dims->n_atoms}};
  egi_dim self = intern(dims, &term, 1);
  if (self == EGI_DIM_NONE) return self;
  dims->atoms[dims->n_atoms] = *atom;
  dims->atoms[dims->n_atoms].self = self;
  dims->n_atoms++;
  return self;
}

static egi_dim add_named(egi_dims *dims, egi_atom_kind kind, const char *name, int64_t lower) {
  egi_atom atom = {.kind = kind, .lower = lower};
  atom.name = egi_arena_copy_text(dims->arena, name, strlen(name));
  return atom.name != NULL ? add_atom(dims, &atom) : fail(dims);
}

egi_dim egi_dim_symbol(egi_dims *dims, const char *name) {
  uint32_t handle;
  if (egi_map_get(&dims->symbols, name, &handle)) return handle;
  egi_dim symbol = add_named(dims, EGI_ATOM_SYMBOL, name, 1);
  if (symbol == EGI_DIM_NONE) return symbol;
  if (egi_map_put(&dims->symbols, dims->atoms[dims->n_atoms - 1].name, symbol) != EG_OK) return fail(dims);
  return symbol;
}

egi_dim egi_dim_fresh(egi_dims *dims, const char *hint) {
  return add_named(dims, EGI_ATOM_FRESH, hint, 0);
}

/* Stands for a number of any sign that the algebra does not hold. */
egi_dim egi_dims_unknown(egi_dims *dims) {
  return add_named(dims, EGI_ATOM_FRESH, "unknown", EGI_NO_BOUND);
}

egi_dim egi_dim_constant(egi_dims *dims, int64_t value) {
  egi_term term = {.coefficient = value};
  return intern(dims, &term, value != 0 ? 1 : 0);
}

static uint32_t depth_of(const egi_dims *dims, egi_dim dim) {
  const egi_polynomial *p = &dims->polynomials[dim];
  uint32_t depth = 0;
  for (uint32_t i = 0; i < p->n_terms; i++)
    for (uint32_t j = 0; j < p->terms[i].degree; j++)
      if (dims->atoms[p->terms[i].atoms[j]].depth > depth) depth = dims->atoms[p->terms[i].atoms[j]].depth;
  return depth;
}

static uint32_t hash_opaque(const egi_atom *atom) {
  uint32_t key[3] = {atom->kind, atom->a, atom->b};
  uint64_t hash = egi_hash(key, sizeof key, 0);
  return (uint32_t)(hash ^ (hash >> 32));
}

static bool rehash_atoms(egi_dims *dims) {
  uint32_t n_slots = dims->n_atom_slots * 2;
  uint32_t *slots = EGI_NEW(dims->arena, uint32_t, n_slots);
  if (slots == NULL) return false;
  for (uint32_t i = 0; i < dims->n_atoms; i++) {
    if (dims->atoms[i].a == EGI_DIM_NONE) continue;
    uint32_t at = hash_opaque(&dims->atoms[i]) & (n_slots - 1);
    while (slots[at] != 0) at = (at + 1) & (n_slots - 1);
    slots[at] = i + 1;
  }
  dims->atom_slots = slots;
  dims->n_atom_slots = n_slots;
  return true;
}

egi_dim egi_dims_opaque(egi_dims *dims, egi_atom_kind kind, egi_dim a, egi_dim b, int64_t lower) {
  egi_atom atom = {.kind = kind, .a = a, .b = b, .lower = lower};
  uint32_t depth_a = depth_of(dims, a), depth_b = depth_of(dims, b);
  atom.depth = 1 + (depth_a > depth_b ? depth_a : depth_b);
  if (atom.depth > EGI_MAX_DEPTH) return egi_dims_unknown(dims);
  if (dims->n_opaque * 2 > dims->n_atom_slots && !rehash_atoms(dims)) return fail(dims);
  uint32_t at = hash_opaque(&atom) & (dims->n_atom_slots - 1);
  for (; dims->atom_slots[at] != 0; at = (at + 1) & (dims->n_atom_slots - 1)) {
    const egi_atom *row = &dims->atoms[dims->atom_slots[at] - 1];
    if (row->kind == kind && row->a == a && row->b == b) return row->self;
  }
  egi_dim self = add_atom(dims, &atom);
  if (self == EGI_DIM_NONE) return self;
  dims->atom_slots[at] = dims->n_atoms;
  dims->n_opaque++;
  return self;
}

/* ---- builders ------------------------------------------------------------------------------------------------- */

bool egi_integer_multiply(int64_t a, int64_t b, int64_t *out) {
  if (a == 0 || b == 0) {
    *out = 0;
    return true;
  }
  if (a == INT64_MIN || b == INT64_MIN) return false;
  int64_t size_a = a < 0 ? -a : a, size_b = b < 0 ? -b : b;
  if (size_a > INT64_MAX / size_b) return false;
  *out = a * b;
  return true;
}

bool egi_integer_add(int64_t a, int64_t b, int64_t *out) {
  if ((b > 0 && a > INT64_MAX - b) || (b < 0 && a < INT64_MIN - b)) return false;
  *out = a + b;
  return true;
}

static void remove_term(egi_builder *builder, uint32_t at) {
  builder->n_terms--;
  memmove(&builder->terms[at], &builder->terms[at + 1], (builder->n_terms - at) * sizeof builder->terms[0]);
}

void egi_builder_add(egi_builder *builder, const egi_term *term, int64_t factor) {
  int64_t coefficient;
  uint32_t at = 0;
  int order = 1;
  if (!egi_integer_multiply(term->coefficient, factor, &coefficient)) builder->is_overflow = true;
  if (builder->is_overflow || coefficient == 0) return;
  while (at < builder->n_terms && (order = compare_atoms(&builder->terms[at], term)) < 0) at++;
  if (at < builder->n_terms && order == 0) {
    egi_term *same = &builder->terms[at];
    if (!egi_integer_add(same->coefficient, coefficient, &same->coefficient)) builder->is_overflow = true;
    if (same->coefficient == 0) remove_term(builder, at);
    return;
  }
  if (builder->n_terms == EGI_MAX_TERMS) {
    builder->is_overflow = true;
    return;
  }
  memmove(&builder->terms[at + 1], &builder->terms[at], (builder->n_terms - at) * sizeof *term);
  builder->terms[at] = *term;
  builder->terms[at].coefficient = coefficient;
  builder->n_terms++;
}

egi_dim egi_builder_finish(egi_dims *dims, const egi_builder *builder) {
  return builder->is_overflow ? egi_dims_unknown(dims) : intern(dims, builder->terms, builder->n_terms);
}
