/* Algebra of symbolic dims: sums, products, quotients, bounds, minimum and maximum. */
#include "graph/dims.h"

static void add_polynomial(egi_builder *builder, const egi_dims *dims, egi_dim dim, int64_t factor) {
  const egi_polynomial *p = &dims->polynomials[dim];
  for (uint32_t i = 0; i < p->n_terms; i++) egi_builder_add(builder, &p->terms[i], factor);
}

/* ---- sums and products ---------------------------------------------------------------------------------------- */

static egi_dim combine(egi_dims *dims, egi_dim a, egi_dim b, int64_t factor) {
  egi_builder builder;
  if (a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  builder.n_terms = 0;
  builder.is_overflow = false;
  add_polynomial(&builder, dims, a, 1);
  add_polynomial(&builder, dims, b, factor);
  return egi_builder_finish(dims, &builder);
}

egi_dim egi_dim_add(egi_dims *dims, egi_dim a, egi_dim b) {
  return combine(dims, a, b, 1);
}

egi_dim egi_dim_subtract(egi_dims *dims, egi_dim a, egi_dim b) {
  return combine(dims, a, b, -1);
}

/* Product of two terms; false when it does not fit. */
static bool multiply_terms(const egi_term *a, const egi_term *b, egi_term *out) {
  uint32_t i = 0, j = 0;
  if (a->degree + b->degree > EGI_MAX_DEGREE) return false;
  if (!egi_integer_multiply(a->coefficient, b->coefficient, &out->coefficient)) return false;
  memset(out->atoms, 0, sizeof out->atoms);
  out->degree = a->degree + b->degree;
  for (uint32_t k = 0; k < out->degree; k++) {
    bool is_from_a = j == b->degree || (i < a->degree && a->atoms[i] <= b->atoms[j]);
    out->atoms[k] = is_from_a ? a->atoms[i++] : b->atoms[j++];
  }
  return true;
}

static void add_product(egi_builder *builder, const egi_polynomial *p, const egi_term *term, int64_t factor) {
  egi_term product;
  for (uint32_t i = 0; i < p->n_terms && !builder->is_overflow; i++) {
    if (multiply_terms(&p->terms[i], term, &product))
      egi_builder_add(builder, &product, factor);
    else
      builder->is_overflow = true;
  }
}

egi_dim egi_dim_multiply(egi_dims *dims, egi_dim a, egi_dim b) {
  egi_builder builder;
  if (a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  builder.n_terms = 0;
  builder.is_overflow = false;
  const egi_polynomial *q = &dims->polynomials[b];
  for (uint32_t i = 0; i < q->n_terms; i++) add_product(&builder, &dims->polynomials[a], &q->terms[i], 1);
  return egi_builder_finish(dims, &builder);
}

/* ---- quotients ------------------------------------------------------------------------------------------------ */

/* a / b for single terms; false when b does not divide a. */
static bool divide_terms(const egi_term *a, const egi_term *b, egi_term *out) {
  uint32_t j = 0;
  if (b->coefficient == -1 && a->coefficient == INT64_MIN) return false;
  if (a->coefficient % b->coefficient != 0) return false;
  memset(out, 0, sizeof *out);
  out->coefficient = a->coefficient / b->coefficient;
  for (uint32_t i = 0; i < a->degree; i++) {
    if (j < b->degree && a->atoms[i] == b->atoms[j])
      j++;
    else
      out->atoms[out->degree++] = a->atoms[i];
  }
  return j == b->degree;
}

/* Long division by the leading term: exact where the remainder vanishes. Ends because each round removes the leading
 * term of the remainder and terms only fall in order; `rounds` bounds the work all the same. */
static bool divide_exactly(egi_dims *dims, egi_dim a, egi_dim b, egi_dim *out_quotient) {
  egi_builder rest, quotient;
  egi_term term;
  const egi_polynomial *q = &dims->polynomials[b];
  rest.n_terms = quotient.n_terms = 0;
  rest.is_overflow = quotient.is_overflow = false;
  add_polynomial(&rest, dims, a, 1);
  for (unsigned rounds = 0; rest.n_terms > 0; rounds++) {
    if (rounds > 4 * EGI_MAX_TERMS || !divide_terms(&rest.terms[0], &q->terms[0], &term)) return false;
    egi_builder_add(&quotient, &term, 1);
    add_product(&rest, q, &term, -1);
    if (rest.is_overflow || quotient.is_overflow) return false;
  }
  *out_quotient = egi_builder_finish(dims, &quotient);
  return true;
}

static int64_t floor_divide(int64_t a, int64_t b) {
  int64_t quotient = a / b;
  return a % b != 0 && (a % b < 0) != (b < 0) ? quotient - 1 : quotient;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a < 0 ? -a : a;
}

/* gcd of all coefficients; 0 for none, or when one has no absolute value. */
static int64_t content(const egi_polynomial *p) {
  int64_t divisor = 0;
  for (uint32_t i = 0; i < p->n_terms; i++) {
    if (p->terms[i].coefficient == INT64_MIN) return 0;
    divisor = greatest_common_divisor(p->terms[i].coefficient, divisor);
  }
  return divisor;
}

static egi_dim scale_down(egi_dims *dims, egi_dim dim, int64_t divisor) {
  egi_dim quotient = dim;
  if (divisor <= 1) return dim;
  egi_dim number = egi_dim_constant(dims, divisor);
  if (number == EGI_DIM_NONE || !divide_exactly(dims, dim, number, &quotient)) return EGI_DIM_NONE;
  return quotient;
}

/* floor((q*c + r) / c) = q + floor(r / c) for a number c > 0: r keeps coefficients in [0, c). */
static egi_dim divide_by_number(egi_dims *dims, egi_dim a, int64_t c) {
  egi_builder whole, rest;
  whole.n_terms = rest.n_terms = 0;
  whole.is_overflow = rest.is_overflow = false;
  for (uint32_t i = 0; i < dims->polynomials[a].n_terms; i++) {
    egi_term term = dims->polynomials[a].terms[i];
    int64_t quotient = floor_divide(term.coefficient, c);
    int64_t remainder = term.coefficient - quotient * c;
    term.coefficient = 1;
    egi_builder_add(&whole, &term, quotient);
    egi_builder_add(&rest, &term, remainder);
  }
  egi_dim q = egi_builder_finish(dims, &whole), r = egi_builder_finish(dims, &rest);
  if (r == EGI_DIM_NONE || q == EGI_DIM_NONE) return EGI_DIM_NONE;
  int64_t number;
  if (egi_dim_value(dims, r, &number)) return q; /* a number in [0, c) */
  int64_t divisor = greatest_common_divisor(content(&dims->polynomials[r]), c);
  if (divisor > 1) r = scale_down(dims, r, divisor);
  int64_t lower = egi_dim_lower_bound(dims, r);
  if (lower != EGI_NO_BOUND) lower = floor_divide(lower, divisor > 1 ? c / divisor : c);
  egi_dim b = egi_dim_constant(dims, divisor > 1 ? c / divisor : c);
  if (r == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  return egi_dim_add(dims, q, egi_dims_opaque(dims, EGI_ATOM_QUOTIENT, r, b, lower));
}

egi_dim egi_dim_divide(egi_dims *dims, egi_dim a, egi_dim b) {
  int64_t x, y;
  egi_dim quotient;
  if (a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  bool is_number = egi_dim_value(dims, b, &y);
  if (is_number && y == 0) return egi_dims_unknown(dims);
  if (is_number && egi_dim_value(dims, a, &x)) {
    if (x == INT64_MIN && y == -1) return egi_dims_unknown(dims);
    return egi_dim_constant(dims, floor_divide(x, y));
  }
  if (divide_exactly(dims, a, b, &quotient)) return quotient;
  if (is_number && y > 0) return divide_by_number(dims, a, y);
  int64_t divisor = greatest_common_divisor(content(&dims->polynomials[a]), content(&dims->polynomials[b]));
  a = scale_down(dims, a, divisor);
  b = scale_down(dims, b, divisor);
  if (a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  bool is_bounded = egi_dim_is_nonnegative(dims, a) && egi_dim_is_positive(dims, b);
  return egi_dims_opaque(dims, EGI_ATOM_QUOTIENT, a, b, is_bounded ? 0 : EGI_NO_BOUND);
}

/* ---- bounds, minimum, maximum --------------------------------------------------------------------------------- */

bool egi_dim_value(const egi_dims *dims, egi_dim dim, int64_t *out_value) {
  if (dim == EGI_DIM_NONE) return false;
  const egi_polynomial *p = &dims->polynomials[dim];
  if (p->n_terms > 1 || (p->n_terms == 1 && p->terms[0].degree > 0)) return false;
  *out_value = p->n_terms == 1 ? p->terms[0].coefficient : 0;
  return true;
}

/* Lower bound of coefficient * atoms; false when an atom may be negative or the number does not fit. */
static bool bound_term(const egi_dims *dims, const egi_term *term, int64_t *out) {
  int64_t bound = term->coefficient;
  for (uint32_t i = 0; i < term->degree; i++) {
    int64_t lower = dims->atoms[term->atoms[i]].lower;
    if (lower < 0 || !egi_integer_multiply(bound, lower, &bound)) return false;
  }
  *out = bound;
  return true;
}

/* Takes -c·m out of a term c'·m·k with c' >= c whose k >= 1: what is left of both is c'·m·k - c·m >= (c' - c)·m·k. */
static bool cover_negative(const egi_dims *dims, egi_term *terms, uint32_t n_terms, const egi_term *negative) {
  egi_term monomial = *negative, rest;
  monomial.coefficient = 1;
  int64_t bound;
  for (uint32_t i = 0; i < n_terms; i++) {
    if (terms[i].coefficient <= 0 || terms[i].coefficient < -negative->coefficient) continue;
    if (!divide_terms(&terms[i], &monomial, &rest)) continue;
    rest.coefficient = 1;
    monomial.coefficient = 1;
    if (!bound_term(dims, &rest, &bound) || bound < 1 || !bound_term(dims, &monomial, &bound)) continue;
    terms[i].coefficient += negative->coefficient;
    return true;
  }
  return false;
}

int64_t egi_dim_lower_bound(const egi_dims *dims, egi_dim dim) {
  egi_term terms[EGI_MAX_TERMS];
  int64_t sum = 0, bound;
  if (dim == EGI_DIM_NONE) return EGI_NO_BOUND;
  const egi_polynomial *p = &dims->polynomials[dim];
  if (p->n_terms > 0) memcpy(terms, p->terms, p->n_terms * sizeof *terms);
  for (uint32_t i = 0; i < p->n_terms; i++)
    if (terms[i].coefficient < 0 && terms[i].degree > 0) {
      if (terms[i].coefficient == INT64_MIN || !cover_negative(dims, terms, p->n_terms, &terms[i])) return EGI_NO_BOUND;
      terms[i].coefficient = 0;
    }
  for (uint32_t i = 0; i < p->n_terms; i++)
    if (!bound_term(dims, &terms[i], &bound) || !egi_integer_add(sum, bound, &sum)) return EGI_NO_BOUND;
  return sum;
}

bool egi_dim_is_nonnegative(const egi_dims *dims, egi_dim dim) {
  int64_t lower = egi_dim_lower_bound(dims, dim);
  return lower != EGI_NO_BOUND && lower >= 0;
}

bool egi_dim_is_positive(const egi_dims *dims, egi_dim dim) {
  int64_t lower = egi_dim_lower_bound(dims, dim);
  return lower != EGI_NO_BOUND && lower >= 1;
}

static egi_dim extreme(egi_dims *dims, egi_atom_kind kind, egi_dim a, egi_dim b) {
  if (a == EGI_DIM_NONE || b == EGI_DIM_NONE) return EGI_DIM_NONE;
  if (a == b) return a;
  if (egi_dim_is_nonnegative(dims, egi_dim_subtract(dims, a, b))) return kind == EGI_ATOM_MAXIMUM ? a : b;
  if (egi_dim_is_nonnegative(dims, egi_dim_subtract(dims, b, a))) return kind == EGI_ATOM_MAXIMUM ? b : a;
  int64_t lower_a = egi_dim_lower_bound(dims, a), lower_b = egi_dim_lower_bound(dims, b);
  bool is_a_larger = lower_a > lower_b; /* "no bound" is the smallest number */
  int64_t lower = is_a_larger == (kind == EGI_ATOM_MAXIMUM) ? lower_a : lower_b;
  return a < b ? egi_dims_opaque(dims, kind, a, b, lower) : egi_dims_opaque(dims, kind, b, a, lower);
}

egi_dim egi_dim_minimum(egi_dims *dims, egi_dim a, egi_dim b) {
  return extreme(dims, EGI_ATOM_MINIMUM, a, b);
}

egi_dim egi_dim_maximum(egi_dims *dims, egi_dim a, egi_dim b) {
  return extreme(dims, EGI_ATOM_MAXIMUM, a, b);
}
