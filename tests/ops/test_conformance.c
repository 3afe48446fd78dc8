/* Runs the conformance case of every operator of ops.def, or those that a pattern names: test_conformance "case_Ma*".
 * With ENGRAFT_TEST_DEVICE=cuda the kernels of that backend are tested; 77 says that it cannot be had. */
#include "support_ops.h"

#define CASE(symbol, function)              \
  static void case_##symbol(void **state) { \
    function(state, EGI_OP_##symbol);       \
  }
#include "cases.def"
#undef CASE

int main(int argc, char **argv) {
  int code = ops_probe_device();
  if (code != 0) return code;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  const struct CMUnitTest tests[] = {
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  cmocka_unit_test(case_##symbol),
#include "graph/ops.def"
#undef EGI_OP
  };
  return cmocka_run_group_tests_name("conformance", tests, ops_set_up, ops_tear_down);
}
