/* Shape rules, a table for each family: numbers, symbols, and what must be refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support_graph.h"

#define CHECK(table) check_shape_cases(table, EGI_COUNT(table))

static void test_elementwise(void **state) {
  static const shape_case cases[] = {
      {"Relu", "float[b,s,4]", NULL, "float[b,s,4]"},
      {"Cos", "int64[4]", NULL, "!does not take int64"},
      {"Not", "bool[2]", NULL, "bool[2]"},
      {"Not", "float[2]", NULL, "!does not take float"},
      {"IsNaN", "float16[b]", NULL, "bool[b]"},
      {"Cast", "int64[b,2]", "to=1", "float[b,2]"},
      {"Cast", "int64[b,2]", "to=77", "!to = 77"},
      {"Cast", "int64[b,2]", NULL, "!to = 0"},
      {"Identity", "bfloat16[s]", NULL, "bfloat16[s]"},
      {"Clip", "float[b];=0f;=1f", NULL, "float[b]"},
      {"Clip", "float[b];float[2,2]", NULL, "!not a single number"},
      {"Clip", "float[b];=0", NULL, "!is int64, not float"},
      {"Add", "float[b,1,4];float[3,4]", NULL, "float[b,3,4]"},
      {"Add", "float[];float[s,2]", NULL, "float[s,2]"},
      {"Add", "float[4];float[b,s,4]", NULL, "float[b,s,4]"},
      {"Add", "float[b];float[8]", NULL, "float[8]"},
      {"Add", "float[b];float[s]", NULL, "float[b]"},
      {"Add", "float[3];float[4]", NULL, "!cannot be broadcast: 3 and 4"},
      {"Add", "float[3];int64[3]", NULL, "!is int64, not float"},
      {"Add", "bool[3];bool[3]", NULL, "!does not take bool"},
      {"Add", "float[3]", NULL, "!1 inputs; the operator takes 2 to 2"},
      {"Add", "float[3];-", NULL, "!input 1 is missing"},
      {"Pow", "float[b,2];int64[2]", NULL, "float[b,2]"},
      {"Max", "float[b,1];float[3];float[]", NULL, "float[b,3]"},
      {"And", "bool[b];float[b]", NULL, "!is float, not bool"},
      {"Less", "int64[1,s];int64[s2,1]", NULL, "bool[s2,s]"},
      {"Equal", "bool[2];bool[2]", NULL, "bool[2]"},
      {"Where", "bool[s,1];float[];float[2]", NULL, "float[s,2]"},
      {"Where", "float[1];float[1];float[1]", NULL, "!does not take float"},
      {"Where", "bool[1];float[1];int32[1]", NULL, "!is int32, not float"},
      {"Softmax", "float[b,4]", "axis=-1", "float[b,4]"},
      {"Softmax", "float[b,4]", "axis=2", "!axis 2 is outside of 2 dimensions"},
      {"Trilu", "float[b,s,s];=1", "upper=0", "float[b,s,s]"},
      {"Trilu", "float[b]", NULL, "!at least 2 are needed"},
      {"CumSum", "int64[b,s];=1", NULL, "int64[b,s]"},
  };
  (void)state;
  CHECK(cases);
}

static void test_reductions(void **state) {
  static const shape_case cases[] = {
      {"ReduceMean", "float[b,s,4];=[-1]", NULL, "float[b,s,1]"},
      {"ReduceMean", "float[b,s,4];=[0,2]", "keepdims=0", "float[s]"},
      {"ReduceSum", "float[b,s]", NULL, "float[1,1]"},
      {"ReduceSum", "float[b,s]", "keepdims=0", "float"},
      {"ReduceSum", "float[b,s];=[]", "noop_with_empty_axes=1", "float[b,s]"},
      {"ReduceSum", "float[b,s];int64[1]", "keepdims=0", "float[size_2]"},
      {"ReduceMax", "float[b,s];=[2]", NULL, "!axis 2 is outside"},
      {"ReduceMax", "float[b,s];=[0,-2]", NULL, "!named twice"},
      {"ReduceMean", "bool[b];=[0]", NULL, "!does not take bool"},
      {"ReduceSum", "float[b,s];float[1]", NULL, "!is float, not int64"},
  };
  (void)state;
  CHECK(cases);
}

static void test_joining(void **state) {
  static const shape_case cases[] = {
      {"Concat", "float[b,s];float[b,3]", "axis=1", "float[b,s + 3]"},
      {"Concat", "float[2,s];float[b,s]", "axis=-1", "float[2,2*s]"},
      {"Concat", "float[2];float[2,2]", "axis=0", "!has 2 dimensions, not 1"},
      {"Concat", "float[2,3];float[2,4]", "axis=0", "!3 and 4 differ"},
      {"Concat", "float[2,3]", "axis=2", "!axis 2"},
      {"Concat", "float[2]", NULL, "!axis is missing"},
      {"Concat", "float[2];int64[2]", "axis=0", "!is int64, not float"},
      {"Expand", "float[b,1];=[1,1,6]", NULL, "float[1,b,6]"},
      {"Expand", "float[b,4];=[1]", NULL, "float[b,4]"},
      {"Expand", "float[3];=[4]", NULL, "!3 and 4 differ"},
      {"Expand", "float[3];=[-1]", NULL, "!a negative size"},
      {"Expand", "float[3];=3", NULL, "!has 0 dimensions, not 1"},
      {"Expand", "float[3];int64[s]", NULL, "!not known before the graph runs"},
      {"Expand", "float[3];=[1,1,1,1,1,1,1,1,1]", NULL, "!at most 8 are supported"},
      {"ConstantOfShape", "=[2,3]", NULL, "float[2,3]"},
      {"ConstantOfShape", "=[]", NULL, "float"},
      {"ConstantOfShape", "=[-2]", NULL, "!a negative size"},
      {"Range", "=2;=11;=3", NULL, "int64[3]{2,5,8}"},
      {"Range", "=5;=0;=-2", NULL, "int64[3]{5,3,1}"},
      {"Range", "=5;=0;=1", NULL, "int64[0]{}"},
      {"Range", "=0;=1;=0", NULL, "!a step of 0"},
      {"Range", "=0f;=1f;=0.25f", NULL, "float[4]"},
      {"Range", "=0;int64[];=1", NULL, "int64[size_0]"},
      {"Range", "=0;=4;=1f", NULL, "!is float, not int64"},
  };
  (void)state;
  CHECK(cases);
}

static void test_reshape(void **state) {
  static const shape_case cases[] = {
      {"Reshape", "float[b,s,64];=[0,0,4,16]", NULL, "float[b,s,4,16]"},
      {"Reshape", "float[b,s,64];=[0,0,-1,16]", NULL, "float[b,s,4,16]"},
      {"Reshape", "float[b,s,64];=[-1,64]", NULL, "float[b*s,64]"},
      {"Reshape", "float[b,s];=[-1]", NULL, "float[b*s]"},
      {"Reshape", "float[2,3];=[]", NULL, "!6 and 1 differ"},
      {"Reshape", "float[1,1];=[]", NULL, "float"},
      {"Reshape", "float[2,3];=[4,-1]", NULL, "!differ"},
      {"Reshape", "float[2,3];=[5]", NULL, "!6 and 5 differ"},
      {"Reshape", "float[2,3];=[-1,-1]", NULL, "!more than one size of -1"},
      {"Reshape", "float[2,3];=[-2]", NULL, "!a negative size: -2"},
      {"Reshape", "float[2,3];=[2,3,0]", NULL, "!copies a dim that input 0 lacks"},
      {"Reshape", "float[0,3];=[3,0]", "allowzero=1", "float[3,0]"},
      {"Reshape", "float[0,3];=[0,-1]", NULL, "float[0,3]"},
      {"Reshape", "float[b,4];int64[1]", NULL, "float[4*b]"},
      {"Reshape", "float[b,4];int64[n]", NULL, "!not known before the graph runs"},
      {"Reshape", "float[b,4];=4", NULL, "!has 0 dimensions, not 1"},
      {"Reshape", "float[b,4];float[1]", NULL, "!is float, not int64"},
      {"Flatten", "float[b,s,4]", "axis=2", "float[b*s,4]"},
      {"Flatten", "float[b,s]", "axis=0", "float[1,b*s]"},
      {"Flatten", "float[b,s]", "axis=2", "float[b*s,1]"},
      {"Flatten", "float[b,s]", "axis=3", "!axis 3"},
      {"Transpose", "float[b,s,4]", "perm=[0,2,1]", "float[b,4,s]"},
      {"Transpose", "float[b,s,4]", NULL, "float[4,s,b]"},
      {"Transpose", "float[b,s]", "perm=[0,0]", "!named twice"},
      {"Transpose", "float[b,s]", "perm=[0]", "!1 entries for 2 dimensions"},
      {"Squeeze", "float[1,b,1];=[0,-1]", NULL, "float[b]"},
      {"Squeeze", "float[1,b,1]", NULL, "float[b]"},
      {"Squeeze", "float[3];=[0]", NULL, "!3 and 1 differ"},
      {"Unsqueeze", "float[b];=[0,-1]", NULL, "float[1,b,1]"},
      {"Unsqueeze", "float[b];=[3]", NULL, "!axis 3 is outside of 2 dimensions"},
      {"Unsqueeze", "float[1,1,1,1,1,1,1,1];=[0]", NULL, "!at most 8 are supported"},
  };
  (void)state;
  CHECK(cases);
}

static void test_slices(void **state) {
  static const shape_case cases[] = {
      {"Slice", "float[b,s,8];=[2];=[6];=[2]", NULL, "float[b,s,4]"},
      {"Slice", "float[b,s];=[0];=[-1];=[1]", NULL, "float[b,s - 1]"},
      {"Slice", "float[b,s];=[1];=[9223372036854775807];=[1]", NULL, "float[b,s - 1]"},
      {"Slice", "float[b,s];=[-1];=[2147483647];=[-1]", NULL, "float[b,1]"},
      {"Slice", "float[b,s];=[0];=[5];=[1]", NULL, "float[b,min(s, 5)]"},
      {"Slice", "float[10];=[8];=[1];=[0];=[-2]", NULL, "float[4]"},
      {"Slice", "float[10];=[-1];=[-9223372036854775807];=[0];=[-1]", NULL, "float[10]"},
      {"Slice", "float[10];=[1];=[100]", NULL, "float[9]"},
      {"Slice", "float[10];=[7];=[3]", NULL, "float[0]"},
      {"Slice", "float[2*s];=[0];=[1];=[0];=[0]", NULL, "!a step of 0"},
      {"Slice", "float[4];=[0];=[1];=[1]", NULL, "!axis 1"},
      {"Slice", "float[4,4];=[0,0];=[1,1];=[0,0]", NULL, "!named twice"},
      {"Slice", "float[4];=[0];=[1,2]", NULL, "!differ in length"},
      {"Slice", "float[4,5];int64[1];=[3];=[1]", NULL, "float[4,size_0]"},
      {"Split", "float[b,6]", "axis=1 num_outputs=3", "float[b,2];float[b,2];float[b,2]"},
      {"Split", "float[b,7]", "axis=-1 num_outputs=3", "float[b,3];float[b,3];float[b,1]"},
      {"Split", "float[b,8];=[6,2]", "axis=1", "float[b,6];float[b,2]"},
      {"Split", "float[b,8];=[6,3]", "axis=1", "!9 and 8 differ"},
      {"Split", "float[b,8];=[9,-1]", "axis=1", "!a negative size"},
      {"Split", "float[4]", "num_outputs=3", "!num_outputs is 3"},
  };
  (void)state;
  CHECK(cases);
}

static void test_indexing(void **state) {
  static const shape_case cases[] = {
      {"Gather", "float[100,8];int64[b,s]", NULL, "float[b,s,8]"},
      {"Gather", "float[b,s,8];=-1", "axis=1", "float[b,8]"},
      {"Gather", "float[b,s,8];int32[2,2]", "axis=-1", "float[b,s,2,2]"},
      {"Gather", "float[8];float[2]", NULL, "!not int64 or int32"},
      {"Gather", "float[];=0", NULL, "!axis 0 is outside of 0 dimensions"},
      {"GatherElements", "float[b,s];int64[b,2]", "axis=1", "float[b,2]"},
      {"GatherElements", "float[b,s];int64[2]", "axis=1", "!has 1 dimensions, not 2"},
      {"GatherND", "bool[b,s,4];int64[7,2]", NULL, "bool[7,4]"},
      {"GatherND", "bool[b,s,4];int64[b,1]", "batch_dims=1", "bool[b,4]"},
      {"GatherND", "bool[b,s];int64[7,3]", NULL, "!indices of 3 axes"},
      {"ScatterND", "float[b,4];int64[3,1];float[3,4]", NULL, "float[b,4]"},
      {"ScatterND", "float[b,4];int64[3,1];float[3]", NULL, "!updates have 1 dimensions"},
      {"ScatterND", "float[b,4];int64[3,1];int64[3,4]", NULL, "!is int64, not float"},
  };
  (void)state;
  CHECK(cases);
}

static void test_products(void **state) {
  static const shape_case cases[] = {
      {"MatMul", "float[b,s,64];float[64,8]", NULL, "float[b,s,8]"},
      {"MatMul", "float[b,1,s,4];float[2,4,s]", NULL, "float[b,2,s,s]"},
      {"MatMul", "float[4];float[4,3]", NULL, "float[3]"},
      {"MatMul", "float[b,4];float[4]", NULL, "float[b]"},
      {"MatMul", "float[4];float[4]", NULL, "float"},
      {"MatMul", "float[b,4];float[5,4]", NULL, "!the inner dims: 4 and 5 differ"},
      {"MatMul", "float[b,4];float16[4,4]", NULL, "!is float16, not float"},
      {"MatMul", "float[];float[4]", NULL, "!a product with a scalar"},
      {"Gemm", "float[4,b];float[8,4];float[8]", "transA=1 transB=1", "float[b,8]"},
      {"Gemm", "float[b,4];float[4,8];float[7]", NULL, "!8 and 7 differ"},
      {"Gemm", "float[1,b,4];float[4,8]", NULL, "!has 3 dimensions, not 2"},
      {"AddMatMul", "float[8];float[b,s,4];float[4,8]", "alpha=2f", "float[b,s,8]"},
      {"AddMatMul", "float[b,s,9];float[b,s,4];float[4,8]", NULL, "!8 and 9 differ"},
      {"SumTo", "float[b,s,8];float[8]", NULL, "float[8]"},
      {"SumTo", "float[b,s,8];float[s,1]", NULL, "float[s,1]"},
      {"SumTo", "float[8];float[b,8]", NULL, "!at most 1 are possible"},
      {"LinearLogProbability", "float[b,s,8];float[8,100];int64[b,s]", NULL, "float[b,s];float[b,s]"},
      {"LinearLogProbability", "float[b,s,8];float[8,100];int64[b]", NULL, "!has 1 dimensions, not 2"},
      {"LinearLogProbability", "float[b,s,8];float[8,100];int64[b,s];float[99]", NULL, "!99 and 100 differ"},
      {"LogProbability", "float16[b,s,9];int64[b,s]", NULL, "float[b,s];float[b,s]"},
      {"LinearLogProbabilityGrad", "float[b,s,8];float[8,9];int64[b,s];float[b,s];float[b,s]", NULL,
       "float[b,s,8];float[8,9];float[9]"},
      {"LogProbabilityGrad", "float[b,s,9];int64[b,s];float[b,s];float[b,s]", NULL, "float[b,s,9]"},
      {"GradientNorm", "float[100];uint8[64]", NULL, "float"},
      {"Accumulate", "float[4,2];float[4,3];uint8[64]", NULL, "!2 and 3 differ"},
      {"GeluGrad", "float[b,4];float[b,4]", NULL, "float[b,4]"},
      {"GeluGrad", "float[b,4];float[4]", NULL, "!has 1 dimensions, not 2"},
  };
  (void)state;
  CHECK(cases);
}

static void test_normalization(void **state) {
  static const shape_case cases[] = {
      {"LayerNormalization", "float[b,s,8];float[8];float[8]", NULL, "float[b,s,8];float[b,s,1];float[b,s,1]"},
      {"LayerNormalization", "float16[b,s,8];float16[s,8]", "axis=1", "float16[b,s,8];float[b,1,1]"},
      {"LayerNormalization", "float[b,s,8];float[7]", NULL, "!scale: 8 and 7 differ"},
      {"LayerNormalization", "float[b,s,8];float[b,8]", NULL, "!scale has 2 dimensions"},
      {"LayerNormalization", "float[b,8];float16[8]", NULL, "!is float16, not float"},
      {"RMSNormalization", "float[b,s,8];float16[8]", NULL, "float16[b,s,8]"},
      {"RMSNormalization", "float[b,s,8];int64[8]", NULL, "!not of a floating type"},
      {"RMSNormalization", "float[b,8];float[8]", "axis=5", "!axis 5"},
      {"LayerNormalizationGrad", "float[b,8];float[8];float[b,1];float[b,1];float[b,8]", NULL,
       "float[b,8];float[8];float[8]"},
      {"RMSNormalizationGrad", "float[b,8];float[8];float[b,8]", NULL, "float[b,8];float[8]"},
      {"RMSNormalizationGrad", "float[b,8];float[8];float[b,7]", NULL, "!8 and 7 differ"},
  };
  (void)state;
  CHECK(cases);
}

static void test_attention(void **state) {
  static const shape_case cases[] = {
      {"Attention", "float[b,8,s,16];float[b,2,s,16];float[b,2,s,32]", NULL, "float[b,8,s,32]"},
      {"Attention", "float[b,s,128];float[b,t,32];float[b,t,64]", "q_num_heads=8 kv_num_heads=2",
       "float[b,s,256];float[b,2,t,16];float[b,2,t,32];float[b,8,s,t];float[b,8,s]"},
      {"Attention", "float[b,s,128];float[b,t,32];float[b,t,64]", "q_num_heads=8", "!need the attribute kv_num_heads"},
      {"Attention", "float[b,4,s,16];float[b,4,t,16];float[b,4,t,16];-;float[b,4,p,16];float[b,4,p,16]", NULL,
       "float[b,4,s,16];float[b,4,t + p,16]"},
      {"Attention", "float[b,4,s,16];float[b,4,t,16];float[b,4,t,16];-;float[b,4,p,16]", NULL, "!come together"},
      {"Attention", "float[b,4,s,16];float[b,3,s,16];float[b,3,s,16]", NULL, "!4 query heads do not share 3 key heads"},
      {"Attention", "float[b,4,s,16];float[b,4,s,8];float[b,4,s,16]", NULL, "!head size of query and key: 16 and 8"},
      {"Attention", "float[b,4,s,16];float[b,4,s,16];float[b,4,s,16];bool[b,1,s,s]", NULL, "float[b,4,s,16]"},
      {"Attention", "float[b,4,6,16];float[b,4,6,16];float[b,4,6,16];float[6,5]", NULL, "float[b,4,6,16]"},
      {"Attention", "float[b,4,6,16];float[b,4,6,16];float[b,4,6,16];float[6,7]", NULL, "!the mask: 7 and 6"},
      {"Attention", "float[b,4,6,16];float[b,4,6,16];float[b,4,6,16];int64[6,6]", NULL, "!neither boolean"},
      {"Attention", "float[b,6,16];float[b,4,6,16];float[b,4,6,16]", NULL, "!has 4 dimensions, not 3"},
      {"engraft.Attention", "float[b,8,s,16];float[b,2,s,16];float[b,2,s,24];bool[b,s];float[8]", "causal=1",
       "float[b,8,s,24]"},
      {"engraft.Attention", "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16];-;float[2]", NULL,
       "!sinks and query heads"},
      {"engraft.Attention", "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16];int64[b,s]", NULL, "!int64"},
      {"engraft.Attention", "float[b,8,5,16];float[b,2,6,16];float[b,2,6,16]", NULL, "!queries and keys"},
      {"engraft.Attention", "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16]", "window=-1", "!window is negative"},
      {"MaskedAttentionGrad",
       "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16];-;float[8];float[b,8,s,16];float[b,8,s];float[b,8,s,16]", NULL,
       "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16];float[8]"},
      {"AttentionGrad",
       "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16];-;float[b,8,s,16];float[b,8,s];float[b,8,s,16]", NULL,
       "float[b,8,s,16];float[b,2,s,16];float[b,2,s,16]"},
      {"AttentionGrad", "-;float[1,2,3,4];float[1,2,3,4];-;float[1,2,3,4];float[1,2,3];float[1,2,3,4]", NULL,
       "!input 0 is missing"},
      {"RotaryEmbedding", "float[b,4,s,16];float[64,8];float[64,8];int64[b,s]", NULL, "float[b,4,s,16]"},
      {"RotaryEmbedding", "float[b,4,s,16];float[b,s,8];float[b,s,8]", NULL, "float[b,4,s,16]"},
      {"RotaryEmbedding", "float[b,4,s,16];float[1,s,8];float[1,s,8]", NULL, "float[b,4,s,16]"},
      {"RotaryEmbedding", "float[b,4,s,16];float[64,8];float[64,8];int64[1,s]", NULL, "float[b,4,s,16]"},
      {"RotaryEmbedding", "float[3,4,s,16];float[2,s,8];float[2,s,8]", NULL, "!2 and 3 differ"},
      {"RotaryEmbedding", "float[b,s,64];float[64,8];float[64,8];int64[b,s]", NULL, "!needs the attribute num_heads"},
      {"RotaryEmbedding", "float[b,4,s,16];float[b,s,8];float[b,s,8];int64[b,s]", NULL, "!has 3 dimensions, not 2"},
  };
  (void)state;
  CHECK(cases);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_elementwise), cmocka_unit_test(test_reductions),    cmocka_unit_test(test_joining),
      cmocka_unit_test(test_reshape),     cmocka_unit_test(test_slices),        cmocka_unit_test(test_indexing),
      cmocka_unit_test(test_products),    cmocka_unit_test(test_normalization), cmocka_unit_test(test_attention),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
