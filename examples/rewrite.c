/* A host's own rewrites: a rule given as two texts, and a pass that walks the graph.
 * usage: rewrite MODEL.onnx OUT.onnx */
#include <stdio.h>
#include <string.h>

#include <engraft.h>

/* x / root(mean(x²) + eps) · w. Exporters write the root and the division in several ways: they read as one. */
static const char *const patterns[] = {
    "(x, axes, eps, w) => (y) { two = Constant <value_float = 2.0> () q = Pow (x, two) "
    "m = ReduceMean <keepdims = 1> (q, axes) a = Add (m, eps) r = Sqrt (a) n = Div (x, r) y = Mul (n, w) }",
};
static const char replacement[] =
    "(x, w) => (y) { y = RMSNormalization <axis = -1, epsilon: float = @epsilon> (x, w) }";

/* The operator takes the last axis and a scale along it. */
static int check_norm(eg_match *match, void *userdata) {
  double axis = 0, epsilon = 0;
  eg_value_info x, w;
  unsigned *n_norms = userdata;
  if (!eg_match_value(match, "x", &x) || !eg_match_value(match, "w", &w)) return 0;
  if (!eg_match_number(match, "axes", &axis) || (axis != -1 && axis != x.rank - 1))
    return eg_match_refuse(match, "the mean is not over the last axis");
  if (w.rank != 1 || w.dims[0] != x.dims[x.rank - 1]) return eg_match_refuse(match, "the scale is no vector");
  if (!eg_match_number(match, "eps", &epsilon)) return eg_match_refuse(match, "epsilon is not a number");
  eg_match_set_float(match, "epsilon", (float)epsilon);
  ++*n_norms;
  return 1;
}

/* For a target without Sigmoid. Products are listed with the modules they belong to. */
static eg_status spell_out(eg_graph *graph, void *userdata) {
  unsigned *n_replaced = userdata;
  for (size_t i = 0; i < eg_graph_node_count(graph); i++) {
    eg_node_info node;
    eg_value_info weight;
    if (!eg_graph_node(graph, i, &node)) continue;
    if (strcmp(node.op, "MatMul") == 0 && eg_graph_input(graph, i, 1, &weight) && weight.op[0] == '\0')
      printf("product of [%d, %d] in %s\n", (int)weight.dims[0], (int)weight.dims[1], node.scope);
    if (strcmp(node.op, "Sigmoid") != 0) continue;
    eg_status status = eg_graph_replace(graph, i,
                                        "(x) => (y) { one = Constant <value_float = 1.0> () n = Neg (x) e = Exp (n) "
                                        "a = Add (e, one) y = Reciprocal (a) }");
    if (status != EG_OK) return status;
    ++*n_replaced;
  }
  return EG_OK;
}

static eg_status rewrite(eg_model *model, const char *out) {
  unsigned n_norms = 0, n_replaced = 0;
  eg_rule rule = EG_RULE_INIT;
  rule.name = "my_norm";
  rule.patterns = patterns;
  rule.n_patterns = 1;
  rule.replacement = replacement;
  rule.check = check_norm;
  rule.userdata = &n_norms;
  eg_status status = eg_model_add_rule(model, &rule);
  if (status == EG_OK) status = eg_model_add_pass(model, "spell_out", spell_out, &n_replaced);
  if (status == EG_OK) status = eg_model_rewrite(model, "fold_constants,my_norm,spell_out", 1);
  if (status == EG_OK) printf("%u norms, %u sigmoids\n", n_norms, n_replaced);
  return status == EG_OK ? eg_model_save(model, out) : status;
}

int main(int n_arguments, char **arguments) {
  eg_context *context = NULL;
  eg_model *model = NULL;
  if (n_arguments != 3 || eg_context_create(NULL, &context) != EG_OK) return 2;
  eg_status status = eg_model_load(context, arguments[1], NULL, &model);
  if (status == EG_OK) status = rewrite(model, arguments[2]);
  if (status != EG_OK) fprintf(stderr, "rewrite: %s\n", eg_context_error(context));
  eg_model_destroy(model);
  eg_context_destroy(context);
  return status == EG_OK ? 0 : 1;
}
