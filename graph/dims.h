/* Inside of the symbolic dims: shared by dims.c (tables), dims_algebra.c and dims_facts.c (assumptions,
 * evaluation, printing). */
#ifndef ENGRAFT_GRAPH_DIMS_H
#define ENGRAFT_GRAPH_DIMS_H

#include "graph/graph.h"

/* Larger polynomials become unknown sizes: work for each operation stays bounded whatever a file says. */
#define EGI_MAX_DEGREE 12
#define EGI_MAX_TERMS 48
#define EGI_MAX_DEPTH 24
/* Later assumptions are recorded and checked, but no longer used to simplify. */
#define EGI_MAX_SUBSTITUTES 1024
#define EGI_NO_BOUND INT64_MIN

typedef enum egi_atom_kind {
  EGI_ATOM_SYMBOL,
  EGI_ATOM_FRESH,
  EGI_ATOM_QUOTIENT, /* floor(a / b) */
  EGI_ATOM_MINIMUM,
  EGI_ATOM_MAXIMUM
} egi_atom_kind;

typedef struct egi_atom {
  egi_atom_kind kind;
  const char *name;   /* SYMBOL, FRESH */
  egi_dim a, b;       /* operands of the others */
  egi_dim self;       /* the atom as a dim */
  egi_dim substitute; /* what it was assumed to be equal to, or NONE */
  int64_t lower;      /* its value is at least that while symbols are >= 1; EGI_NO_BOUND: nothing known */
  uint32_t depth;     /* nesting of operands and of substitutes */
} egi_atom;

/* coefficient * product of atoms (ascending, repeated for powers) */
typedef struct egi_term {
  int64_t coefficient;
  uint32_t degree;
  uint32_t atoms[EGI_MAX_DEGREE];
} egi_term;

/* Outcome of an evaluation. */
typedef enum egi_knowledge {
  EGI_KNOWN,
  EGI_UNKNOWN, /* a size that the bindings do not decide */
  EGI_CONFLICT /* an assumption is violated, or the number does not exist */
} egi_knowledge;

/* Terms in falling order (degree, then atoms), no zero coefficients; no terms: zero. */
typedef struct egi_polynomial {
  const egi_term *terms;
  uint32_t n_terms;
  uint32_t hash;
  /* Results of the running or last walk over the polynomials; valid while the stamps agree. */
  uint32_t resolved_stamp, value_stamp, mark_stamp;
  egi_dim resolved;
  egi_knowledge knowledge;
  int64_t value;
} egi_polynomial;

typedef struct egi_assumption {
  egi_dim a, b;
} egi_assumption;

struct egi_dims {
  egi_arena *arena;
  egi_polynomial *polynomials; /* [0] unused */
  egi_atom *atoms;
  egi_assumption *assumptions;
  uint32_t *substituted; /* atoms with a substitute */
  uint32_t n_polynomials, n_atoms, n_assumptions, n_substituted;
  uint32_t polynomials_capacity, atoms_capacity, assumptions_capacity, substituted_capacity;
  uint32_t *slots; /* hash table of polynomials, size a power of two */
  uint32_t n_slots;
  uint32_t *atom_slots; /* hash table of opaque atoms, index + 1 */
  uint32_t n_atom_slots, n_opaque;
  egi_map symbols; /* name -> handle */
  uint32_t resolve_stamp, value_stamp, mark_stamp;
  bool is_failed; /* memory ran out; recorded */
};

/* A polynomial in the making. */
typedef struct egi_builder {
  egi_term terms[EGI_MAX_TERMS];
  uint32_t n_terms;
  bool is_overflow;
} egi_builder;

/* Adds coefficient * term of the same atoms. */
void egi_builder_add(egi_builder *builder, const egi_term *term, int64_t factor);
/* The handle of what was built; a fresh unknown after an overflow. */
egi_dim egi_builder_finish(egi_dims *dims, const egi_builder *builder);

/* A number of any sign that the algebra does not hold, different from every other. */
egi_dim egi_dims_unknown(egi_dims *dims);
/* The atom kind(a, b), always the same handle for the same operands. */
egi_dim egi_dims_opaque(egi_dims *dims, egi_atom_kind kind, egi_dim a, egi_dim b, int64_t lower);

/* false on overflow. */
bool egi_integer_add(int64_t a, int64_t b, int64_t *out);
bool egi_integer_multiply(int64_t a, int64_t b, int64_t *out);

/* Copy with the same handles in another arena; texts are shared. */
eg_status egi_dims_clone(egi_arena *arena, const egi_dims *dims, egi_dims **out_dims);
/* EG_ERROR_MEMORY once memory ran out: handles may be NONE for that reason. */
eg_status egi_dims_status(const egi_dims *dims);
/* Largest proven lower bound while symbols are >= 1, EGI_NO_BOUND when nothing is known. */
int64_t egi_dim_lower_bound(const egi_dims *dims, egi_dim dim);
/* Proven dim >= 0. */
bool egi_dim_is_nonnegative(const egi_dims *dims, egi_dim dim);

#endif
