/* join_slices: tensors filled slice by slice, and such as are not filled, or not once. */
#include "support_rewrites.h"

#define F "float[B,S,8] "
#define ROWS "int64[3,1] low = {0, 1, 2}, int64[5,1] high = {3, 4, 5, 6, 7}, int64[3] shape = {8, 4, 2}"
#define TEXT(nodes) \
  "(float[3,4,2] a, float[5,4,2] b) => (float[8,4,2] y) <" ROWS "> { e = ConstantOfShape (shape) " nodes " }"
/* The grid of indices that a traced `e[.., from:to] = part` has. */
#define COMPONENT(name, range) name "_e = Expand (" range ", " name "_s) " name " = Unsqueeze (" name "_e, last) "
#define GRID(n, columns, part)                                                                                  \
  n "s = Shape (" part ") i" n "0_s = Identity (" n "s) i" n "1_s = Identity (" n "s) i" n "2_s = Identity (" n \
    "s) " COMPONENT("i" n "0", "rows") COMPONENT("i" n "1", "steps")                                            \
        COMPONENT("i" n "2", columns) "i" n " = Concat <axis = -1> (i" n "0, i" n "1, i" n "2) "
#define RANGES                                                                                                    \
  "sb = Shape <start = 0, end = 1> (a) nb = Squeeze (sb) rb = Range (zero, nb, one) rows = Reshape (rb, column) " \
  "ss = Shape <start = 1, end = 2> (a) ns = Squeeze (ss) rs = Range (zero, ns, one) steps = Unsqueeze (rs, last) "
#define GRIDS                                                                                                          \
  "(float[B,S,3] a, float[B,S,5] b) => (" F                                                                            \
  "y) <int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}, int64[3] column = "                                    \
  "{-1, 1, 1}, int64[3] low = {0, 1, 2}, int64[5] high = {3, 4, 5, 6, 7}, int64[1] eight = {8}, int64[3] moved = {1, " \
  "2, 3}> {"
#define EMPTY "whole = Concat <axis = 0> (sb, ss, eight) e = ConstantOfShape (whole) "

#define JOIN(title, text) \
  { title, "join_slices", EGI_OP_Concat, 1, text, NULL }
#define NO_JOIN(title, text) \
  { title, "join_slices", EGI_OP_NONE, 0, text, NULL }

static const spelling spellings[] = {
    JOIN("rows, the first first", TEXT("f = ScatterND (e, low, a) y = ScatterND (f, high, b)")),
    JOIN("rows, the last first", TEXT("f = ScatterND (e, high, b) y = ScatterND (f, low, a)")),
};

static const spelling near_misses[] = {
    NO_JOIN("a slice alone", TEXT("y = ScatterND (e, high, b)")),
    NO_JOIN("one slice twice", TEXT("f = ScatterND (e, low, a) y = ScatterND (f, low, a) z = Neg (b)")),
    NO_JOIN("sums", TEXT("f = ScatterND <reduction = \"add\"> (e, low, a) y = ScatterND (f, high, b)")),
    NO_JOIN("rows in another order",
            "(float[3,2] a, float[2,2] b) => (float[5,2] y) <int64[3,1] low = {0, 2, 1}, int64[2,1] high = {3, 4}, "
            "int64[2] shape = {5, 2}> { e = ConstantOfShape (shape) f = ScatterND (e, low, a) y = ScatterND (f, high, "
            "b) }"),
    NO_JOIN("columns that overlap", GRIDS RANGES EMPTY GRID("p", "moved", "a")
                                        GRID("q", "high", "b") "f = ScatterND (e, ip, a) y = ScatterND (f, iq, b) }"),
};

static void test_spellings(void **state) {
  for (size_t i = 0; i < EGI_COUNT(spellings); i++) check_spelling(*state, &spellings[i]);
}

static void test_near_misses(void **state) {
  for (size_t i = 0; i < EGI_COUNT(near_misses); i++) check_spelling(*state, &near_misses[i]);
}

/* The grids of a traced assignment go with it. */
static void test_grids(void **state) {
  static const spelling grids = {"columns of a grid",
                                 "join_slices,eliminate_dead",
                                 EGI_OP_ScatterND,
                                 0,
                                 GRIDS RANGES EMPTY GRID("p", "low", "a")
                                     GRID("q", "high", "b") "f = ScatterND (e, ip, a) y = ScatterND (f, iq, b) }",
                                 NULL};
  check_spelling(*state, &grids);
  pass_expect(*state, "%1 = Concat<axis=2>(a, b)\n-> y=%1\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_spellings, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_near_misses, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(test_grids, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
