/* Random graphs, run as planned in several interleavings of their streams and compared with naive execution. The
 * buffers are poisoned before the first run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

enum { N_GRAPHS = 400, N_INTERLEAVINGS = 8 };

static void planned_graphs_compute_what_naive_ones_do(void **state) {
  for (uint64_t seed = 0; seed < N_GRAPHS; seed++) {
    egi_module *module = make_random_graph(*state, seed, seed % 3 != 0);
    check_graph(*state, module, N_INTERLEAVINGS);
    egi_module_destroy(module);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(planned_graphs_compute_what_naive_ones_do, make_context, free_context)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
