/* The next token from logits: temperature, then the top-k most likely, then the smallest set of probability top-p
 * (Holtzman et al., The Curious Case of Neural Text Degeneration, 2020), in Hugging Face's order. Ties go to the lower
 * token. One uniform number for each position, a pure function of the seed. */
#include "train/train.h"

#include <math.h>

enum { SAMPLE_STREAM = 0x7361 };

static int32_t most_likely(const float *logits, size_t n) {
  size_t best = 0;
  for (size_t i = 1; i < n; i++)
    if (logits[i] > logits[best]) best = i;
  return (int32_t)best;
}

static int compare_candidates(const void *a, const void *b) {
  const egi_candidate *x = a, *y = b;
  if (x->score < y->score || x->score > y->score) return x->score > y->score ? -1 : 1;
  return x->token < y->token ? -1 : x->token > y->token ? 1 : 0;
}

int32_t egi_sample(const float *logits, size_t n, const eg_generate_options *options, uint64_t position,
                   egi_candidate *scratch) {
  if (!(options->temperature > 0.0)) return most_likely(logits, n);
  for (size_t i = 0; i < n; i++) scratch[i] = (egi_candidate){logits[i], (int32_t)i};
  qsort(scratch, n, sizeof *scratch, compare_candidates);
  size_t kept = options->top_k > 0 && options->top_k < n ? options->top_k : n;
  double largest = (double)scratch[0].score, sum = 0.0;
  for (size_t i = 0; i < kept; i++) sum += exp(((double)scratch[i].score - largest) / options->temperature);
  double covered = 0.0, limit = options->top_p * sum;
  size_t n_covered = 0;
  while (n_covered < kept && (n_covered == 0 || covered < limit))
    covered += exp(((double)scratch[n_covered++].score - largest) / options->temperature);
  double target = egi_random_uniform(options->seed, SAMPLE_STREAM, position) * covered;
  for (size_t i = 0; i + 1 < n_covered; i++) {
    target -= exp(((double)scratch[i].score - largest) / options->temperature);
    if (target < 0.0) return scratch[i].token;
  }
  return scratch[n_covered - 1].token;
}
