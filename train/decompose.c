/* Low-rank factors of a frozen matrix, for adapters that begin in it. The largest singular triples by subspace
 * iteration with more directions than are asked for (Halko, Martinsson, Tropp 2011, arXiv:0909.4061, algorithm 4.4, and
 * a Rayleigh-Ritz step), which is exact at once where there are directions for all; orthogonal columns by Gram-Schmidt,
 * twice (Giraud, Langou 2002). In float64; each number is summed in one order, so that results do not depend on the
 * number of threads. */
#include "train/train.h"

#include <math.h>
#include <string.h>

enum {
  SPARE = 16,        /* directions beside those asked for */
  EXACT = 96,        /* up to that many directions are all of them */
  LEAST_ROUNDS = 6,  /* of a large matrix; small ones go on until nothing changes */
  MOST_ROUNDS = 400, /* a flat spectrum settles slowly */
  LANES = 8,         /* directions of one pass over a row */
  COLUMNS = 64,      /* that are turned together, for the cache's sake */
  MOST_SWEEPS = 60   /* of Jacobi's rotations, which settle in about ten */
};
static const double round_operations = 2e9; /* of all rounds beyond the least: time is bounded */

/* W [rows, columns] with a block of directions on each side. */
typedef struct iteration {
  eg_context *ctx;
  const float *w, *turned; /* W and its transpose */
  size_t rows, columns, n; /* n directions */
  size_t stride;           /* of a row of directions: n and zeros */
  double *left, *right;    /* [rows, stride], [columns, stride] */
  double *columns_of_left; /* [n, rows] */
  double *gram, *vectors;  /* [n, n] */
  double *values, *before; /* [n] squares of singular values, descending */
  size_t *order;
} iteration;

/* ---- products --------------------------------------------------------------------------------------------------- */

typedef struct product {
  const float *matrix; /* [.., columns] */
  size_t columns, stride;
  const double *in; /* [columns, stride] */
  double *out;      /* [.., stride] */
} product;

/* A row of the matrix with all directions: in the order of its columns. */
static void multiply_row(void *argument, size_t row, size_t worker) {
  const product *p = argument;
  const float *w = p->matrix + row * p->columns;
  (void)worker;
  for (size_t first = 0; first < p->stride; first += LANES) {
    double sums[LANES] = {0.0};
    const double *in = p->in + first;
    for (size_t c = 0; c < p->columns; c++, in += p->stride) {
      double factor = (double)w[c];
      for (int k = 0; k < LANES; k++) sums[k] += factor * in[k];
    }
    memcpy(p->out + row * p->stride + first, sums, sizeof sums);
  }
}

/* left = W · right */
static void multiply_right(const iteration *it) {
  product p = {it->w, it->columns, it->stride, it->right, it->left};
  egi_pool_run(egi_context_pool(it->ctx), it->rows, multiply_row, &p);
}

/* right = Wᵀ · left */
static void multiply_left(const iteration *it) {
  product p = {it->turned, it->rows, it->stride, it->left, it->right};
  egi_pool_run(egi_context_pool(it->ctx), it->columns, multiply_row, &p);
}

static float *transposed(const float *w, size_t rows, size_t columns, egi_arena *arena) {
  float *turned = EGI_NEW(arena, float, rows *columns);
  for (size_t first = 0; turned != NULL && first < columns; first += COLUMNS)
    for (size_t row = 0; row < rows; row++)
      for (size_t c = first; c < columns && c < first + COLUMNS; c++) turned[c * rows + row] = w[row * columns + c];
  return turned;
}

/* ---- orthogonal columns ----------------------------------------------------------------------------------------- */

static double dot(const double *x, const double *y, size_t n) {
  double sums[LANES] = {0.0}, sum = 0.0;
  size_t done = 0;
  for (; done + LANES <= n; done += LANES)
    for (int k = 0; k < LANES; k++) sums[k] += x[done + (size_t)k] * y[done + (size_t)k];
  for (; done < n; done++) sum += x[done] * y[done];
  for (int k = 0; k < LANES; k++) sum += sums[k];
  return sum;
}

/* x -= q (q . x) for all columns q before it; returns what is left of its length. */
static double remove_before(double *q, size_t rows, size_t column) {
  double *x = q + column * rows;
  for (size_t j = 0; j < column; j++) {
    const double *other = q + j * rows;
    double along = dot(other, x, rows);
    for (size_t i = 0; i < rows; i++) x[i] -= along * other[i];
  }
  return sqrt(dot(x, x, rows));
}

/* A column that depends on those before it becomes some direction that does not: of the unit vectors one at least is
 * far from all of them. */
static double find_other(double *q, size_t rows, size_t column) {
  double *x = q + column * rows, length = 0.0;
  for (size_t unit = 0; unit < rows; unit++) {
    memset(x, 0, rows * sizeof *x);
    x[unit] = 1.0;
    (void)remove_before(q, rows, column);
    length = remove_before(q, rows, column);
    if (length * length * (double)rows >= 0.25) break;
  }
  return length;
}

/* The columns of Q, n <= rows of them, one after the other, become orthonormal. */
static void orthogonalise_columns(double *q, size_t rows, size_t n) {
  for (size_t column = 0; column < n; column++) {
    double *x = q + column * rows, before = sqrt(dot(x, x, rows));
    (void)remove_before(q, rows, column);
    double length = remove_before(q, rows, column);
    if (!(length > 1e-12 * before)) length = find_other(q, rows, column);
    for (size_t i = 0; i < rows; i++) x[i] /= length;
  }
}

static void orthogonalise(const iteration *it) {
  for (size_t row = 0; row < it->rows; row++)
    for (size_t k = 0; k < it->n; k++) it->columns_of_left[k * it->rows + row] = it->left[row * it->stride + k];
  orthogonalise_columns(it->columns_of_left, it->rows, it->n);
  for (size_t row = 0; row < it->rows; row++)
    for (size_t k = 0; k < it->n; k++) it->left[row * it->stride + k] = it->columns_of_left[k * it->rows + row];
}

/* ---- eigenvalues ------------------------------------------------------------------------------------------------ */

/* Rows and columns p and q of A, and columns of V, turned so that A[p, q] is 0 (Golub, Van Loan, Matrix Computations,
 * 4th ed., 8.5.2). */
static void rotate(double *a, double *v, size_t n, size_t p, size_t q) {
  double tau = (a[q * n + q] - a[p * n + p]) / (2.0 * a[p * n + q]);
  double t = (tau >= 0.0 ? 1.0 : -1.0) / (fabs(tau) + sqrt(1.0 + tau * tau)), c = 1.0 / sqrt(1.0 + t * t), s = t * c;
  for (size_t k = 0; k < n; k++) {
    double x = a[k * n + p], y = a[k * n + q];
    a[k * n + p] = c * x - s * y;
    a[k * n + q] = s * x + c * y;
  }
  for (size_t k = 0; k < n; k++) {
    double x = a[p * n + k], y = a[q * n + k];
    a[p * n + k] = c * x - s * y;
    a[q * n + k] = s * x + c * y;
    x = v[k * n + p], y = v[k * n + q];
    v[k * n + p] = c * x - s * y;
    v[k * n + q] = s * x + c * y;
  }
}

/* A [n, n], symmetric, becomes diagonal; columns of V are the eigenvectors. */
static void diagonalise(double *a, double *v, size_t n) {
  for (size_t i = 0; i < n * n; i++) v[i] = i / n == i % n ? 1.0 : 0.0;
  for (int sweep = 0; sweep < MOST_SWEEPS; sweep++) {
    bool is_done = true;
    for (size_t p = 0; p < n; p++)
      for (size_t q = p + 1; q < n; q++) {
        if (!(fabs(a[p * n + q]) > 1e-16 * sqrt(fabs(a[p * n + p] * a[q * n + q])))) continue;
        rotate(a, v, n, p, q);
        is_done = false;
      }
    if (is_done) return;
  }
}

/* ---- singular triples ------------------------------------------------------------------------------------------- */

/* Squares of singular values in the space of `left`, whose image `right` is, and how to turn both. */
static void find_ritz(iteration *it) {
  size_t n = it->n;
  memset(it->gram, 0, n * n * sizeof *it->gram);
  for (size_t c = 0; c < it->columns; c++) {
    const double *row = it->right + c * it->stride;
    for (size_t i = 0; i < n; i++)
      for (size_t j = 0; j < n; j++) it->gram[i * n + j] += row[i] * row[j];
  }
  diagonalise(it->gram, it->vectors, n);
  for (size_t i = 0; i < n; i++) { /* insertion: descending, equal ones as they came */
    size_t at = i;
    double value = it->gram[i * n + i];
    for (; at > 0 && it->values[at - 1] < value; at--) {
      it->values[at] = it->values[at - 1];
      it->order[at] = it->order[at - 1];
    }
    it->values[at] = value;
    it->order[at] = i;
  }
}

/* Values converge with the square of the directions. */
static bool has_settled(const iteration *it, size_t rank) {
  for (size_t i = 0; i < rank; i++)
    if (!(fabs(it->values[i] - it->before[i]) <= 1e-14 * it->values[0])) return false;
  return true;
}

static void iterate(iteration *it, size_t rank) {
  double operations = 8.0 * (double)it->rows * (double)it->columns * (double)it->n;
  size_t rounds = LEAST_ROUNDS + (size_t)(round_operations / operations);
  bool is_exact = it->n == it->rows || it->n == it->columns;
  if (rounds > MOST_ROUNDS) rounds = MOST_ROUNDS;
  for (size_t round = 0; round < rounds; round++) {
    multiply_right(it);
    orthogonalise(it);
    multiply_left(it);
    memcpy(it->before, it->values, it->n * sizeof *it->values);
    find_ritz(it);
    if (is_exact || (round > 0 && has_settled(it, rank))) return;
  }
}

static double along(const double *row, const iteration *it, size_t index) {
  double sum = 0.0;
  for (size_t k = 0; k < it->n; k++) sum += row[k] * it->vectors[k * it->n + it->order[index]];
  return sum;
}

/* B = U sqrt(S / scale), A = sqrt(S / scale) Vᵀ: right = Wᵀ · left is V · S after turning. */
static void write_factors(const iteration *it, size_t rank, double scale, float *a, float *b) {
  for (size_t i = 0; i < rank; i++) {
    double sigma = sqrt(it->values[i] > 0.0 ? it->values[i] : 0.0), factor = sqrt(sigma / scale);
    for (size_t row = 0; row < it->rows; row++)
      b[row * rank + i] = (float)(along(it->left + row * it->stride, it, i) * factor);
    for (size_t c = 0; c < it->columns; c++)
      a[i * it->columns + c] = sigma > 0.0 ? (float)(along(it->right + c * it->stride, it, i) * factor / sigma) : 0.0f;
  }
}

static eg_status prepare(iteration *it, egi_arena *arena) {
  size_t n = it->n;
  it->stride = (n + LANES - 1) / LANES * LANES;
  it->left = EGI_NEW(arena, double, it->rows * it->stride);
  it->right = EGI_NEW(arena, double, it->columns * it->stride);
  it->columns_of_left = EGI_NEW(arena, double, it->rows *n);
  it->gram = EGI_NEW(arena, double, n *n);
  it->vectors = EGI_NEW(arena, double, n *n);
  it->values = EGI_NEW(arena, double, n);
  it->before = EGI_NEW(arena, double, n);
  it->order = EGI_NEW(arena, size_t, n);
  it->turned = transposed(it->w, it->rows, it->columns, arena);
  bool is_there = it->columns_of_left != NULL && it->left != NULL && it->right != NULL && it->gram != NULL &&
                  it->vectors != NULL && it->values != NULL && it->before != NULL && it->order != NULL &&
                  it->turned != NULL;
  return is_there ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_principal_factors(eg_context *ctx, const egi_factors *f, uint64_t seed) {
  size_t rows = (size_t)f->rows, columns = (size_t)f->columns, least = rows < columns ? rows : columns;
  iteration it = {.ctx = ctx, .w = f->matrix, .rows = rows, .columns = columns};
  egi_arena arena;
  it.n = least <= EXACT || f->rank + SPARE > least ? least : f->rank + SPARE;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  eg_status status = prepare(&it, &arena);
  for (size_t i = 0; status == EG_OK && i < columns * it.n; i++)
    it.right[i / it.n * it.stride + i % it.n] = egi_random_normal(seed, 0, i);
  if (status == EG_OK) {
    iterate(&it, f->rank);
    write_factors(&it, f->rank, f->scale, f->a, f->b);
  }
  egi_arena_clear(&arena);
  return status;
}

/* ---- QR --------------------------------------------------------------------------------------------------------- */

eg_status egi_orthogonal_factors(eg_context *ctx, const egi_factors *f) {
  size_t rows = (size_t)f->rows, columns = (size_t)f->columns, n = f->rank;
  iteration it = {.ctx = ctx, .w = f->matrix, .rows = rows, .columns = columns, .n = n};
  egi_arena arena;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  eg_status status = prepare(&it, &arena);
  if (status == EG_OK) {
    for (size_t i = 0; i < rows * n; i++)
      it.left[i / n * it.stride + i % n] = (double)f->matrix[i / n * columns + i % n];
    orthogonalise(&it);
    multiply_left(&it);
    for (size_t i = 0; i < rows * n; i++) f->b[i] = (float)it.left[i / n * it.stride + i % n];
    for (size_t i = 0; i < n * columns; i++) f->a[i] = (float)it.right[i % columns * it.stride + i / columns];
  }
  egi_arena_clear(&arena);
  return status;
}
