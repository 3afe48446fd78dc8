/* Weights that stores over clones of one module share. Declared for the store and for what owns the module. */
#ifndef ENGRAFT_BACKEND_SHARED_WEIGHTS_H
#define ENGRAFT_BACKEND_SHARED_WEIGHTS_H

#include "backend/backend.h"

/* Place of a weight among those that can be shared on the backend, from 1; 0: it is the clone's own. */
eg_status egi_shared_weights_find(egi_shared_weights *shared, const egi_backend *backend, const egi_weight *weight,
                                  uint32_t *out_place);
/* One more user of what lies there; NULL: nothing does yet. */
void *egi_shared_weights_take(egi_shared_weights *shared, uint32_t place);
/* What was made is there for others, with one user. */
void egi_shared_weights_put(egi_shared_weights *shared, uint32_t place, void *data, uint64_t size_bytes);
/* One user less; true for the last, who releases it. */
bool egi_shared_weights_drop(egi_shared_weights *shared, uint32_t place, uint64_t *out_size_bytes);

#endif
