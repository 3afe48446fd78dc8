/* What the files of generation share. Two ways lead to the logits of the last token: pieces of the row with caches of
 * keys and values (generate_cached.c), and, for graphs in which more than attention looks back, the whole row again for
 * each token (generate_whole.c). */
#ifndef ENGRAFT_TRAIN_GENERATE_H
#define ENGRAFT_TRAIN_GENERATE_H

#include "train/train.h"

enum { EGI_GENERATE_PIECES = 5 }; /* lengths of a piece that plans are made for */

typedef struct egi_piece {
  egi_plan *plan;
  egi_session *session;
} egi_piece;

typedef struct egi_generation {
  eg_runner *runner;
  egi_arena arena;
  int32_t *tokens; /* [capacity] */
  size_t n_tokens, capacity;
  int64_t n_logits;
  float *logits;
  egi_candidate *candidates;
  /* with caches */
  bool is_cached;
  size_t n_done; /* tokens whose keys and values are in the caches */
  egi_piece pieces[EGI_GENERATE_PIECES];
  egi_arena piece_arena;
  int64_t *numbers; /* staging, of the longest piece */
  int32_t *positions;
  /* the whole row */
  egi_lanes lanes;
  egi_arena lane_arena; /* of the current plan */
} egi_generation;

/* The last token's logits, into g->logits: [1, rows, vocabulary] is output 0 of the session. */
eg_status egi_generate_read(egi_generation *g, const egi_machine *machine, egi_session *session, int64_t row);

/* Makes the machine with caches for `capacity` positions where the graph allows it; sets g->is_cached. */
eg_status egi_generate_cached_begin(egi_generation *g);
eg_status egi_generate_cached_next(egi_generation *g);
void egi_generate_cached_end(egi_generation *g);

eg_status egi_generate_whole_begin(egi_generation *g);
eg_status egi_generate_whole_next(egi_generation *g);
void egi_generate_whole_end(egi_generation *g);

#endif
