/* Which element types operators take, and which operands must agree in type. */
#include "graph/shapes.h"

enum { FLOATS = 1, INTEGERS = 2, UNSIGNED = 4, BOOLEANS = 8, NUMBERS = FLOATS | INTEGERS | UNSIGNED };

/* Classes allowed for input 0; 0: any. */
static const uint8_t allowed[EGI_OP_COUNT] = {
    [EGI_OP_Abs] = NUMBERS,
    [EGI_OP_Acos] = FLOATS,
    [EGI_OP_Acosh] = FLOATS,
    [EGI_OP_Asin] = FLOATS,
    [EGI_OP_Asinh] = FLOATS,
    [EGI_OP_Atan] = FLOATS,
    [EGI_OP_Atanh] = FLOATS,
    [EGI_OP_Cosh] = FLOATS,
    [EGI_OP_Sinh] = FLOATS,
    [EGI_OP_Tan] = FLOATS,
    [EGI_OP_Ceil] = FLOATS,
    [EGI_OP_Cos] = FLOATS,
    [EGI_OP_Erf] = NUMBERS,
    [EGI_OP_Exp] = FLOATS,
    [EGI_OP_Floor] = FLOATS,
    [EGI_OP_Gelu] = FLOATS,
    [EGI_OP_Log] = FLOATS,
    [EGI_OP_Neg] = FLOATS | INTEGERS,
    [EGI_OP_Not] = BOOLEANS,
    [EGI_OP_IsNaN] = FLOATS,
    [EGI_OP_IsInf] = FLOATS,
    [EGI_OP_BitwiseNot] = INTEGERS | UNSIGNED,
    [EGI_OP_Reciprocal] = FLOATS,
    [EGI_OP_Relu] = FLOATS | INTEGERS,
    [EGI_OP_Round] = FLOATS,
    [EGI_OP_Sign] = NUMBERS,
    [EGI_OP_Sigmoid] = FLOATS,
    [EGI_OP_Sin] = FLOATS,
    [EGI_OP_Sqrt] = FLOATS,
    [EGI_OP_Tanh] = FLOATS,
    [EGI_OP_Add] = NUMBERS,
    [EGI_OP_Sub] = NUMBERS,
    [EGI_OP_Mul] = NUMBERS,
    [EGI_OP_Div] = NUMBERS,
    [EGI_OP_Pow] = FLOATS | INTEGERS,
    [EGI_OP_Mod] = NUMBERS,
    [EGI_OP_Max] = NUMBERS,
    [EGI_OP_Min] = NUMBERS,
    [EGI_OP_Clip] = NUMBERS,
    [EGI_OP_And] = BOOLEANS,
    [EGI_OP_Or] = BOOLEANS,
    [EGI_OP_Xor] = BOOLEANS,
    [EGI_OP_BitShift] = UNSIGNED,
    [EGI_OP_BitwiseAnd] = INTEGERS | UNSIGNED,
    [EGI_OP_BitwiseOr] = INTEGERS | UNSIGNED,
    [EGI_OP_BitwiseXor] = INTEGERS | UNSIGNED,
    [EGI_OP_Less] = NUMBERS,
    [EGI_OP_LessOrEqual] = NUMBERS,
    [EGI_OP_Greater] = NUMBERS,
    [EGI_OP_GreaterOrEqual] = NUMBERS,
    [EGI_OP_Where] = BOOLEANS,
    [EGI_OP_ReduceLogSumExp] = FLOATS,
    [EGI_OP_ReduceMax] = NUMBERS | BOOLEANS,
    [EGI_OP_ReduceMean] = NUMBERS,
    [EGI_OP_ReduceMin] = NUMBERS | BOOLEANS,
    [EGI_OP_ReduceProd] = NUMBERS,
    [EGI_OP_ArgMax] = NUMBERS,
    [EGI_OP_ArgMin] = NUMBERS,
    [EGI_OP_ReduceSum] = NUMBERS,
    [EGI_OP_Range] = FLOATS | INTEGERS,
    [EGI_OP_CumProd] = NUMBERS,
    [EGI_OP_OneHot] = NUMBERS,
    [EGI_OP_TopK] = NUMBERS,
    [EGI_OP_CumSum] = NUMBERS,
    [EGI_OP_MatMul] = NUMBERS,
    [EGI_OP_Gemm] = NUMBERS,
    [EGI_OP_Softmax] = FLOATS,
    [EGI_OP_LogSoftmax] = FLOATS,
    [EGI_OP_LayerNormalization] = FLOATS,
    [EGI_OP_RMSNormalization] = FLOATS,
    [EGI_OP_RotaryEmbedding] = FLOATS,
    [EGI_OP_Attention] = FLOATS,
    [EGI_OP_MaskedAttention] = FLOATS,
    [EGI_OP_MaskedAttentionGrad] = FLOATS,
    [EGI_OP_LinearAttention] = FLOATS,
    [EGI_OP_LinearAttentionGrad] = FLOATS,
    [EGI_OP_Conv] = FLOATS,
    [EGI_OP_ConvGrad] = FLOATS,
    [EGI_OP_Dropout] = FLOATS,
    [EGI_OP_KeyedDropout] = FLOATS,
    [EGI_OP_AddMatMul] = FLOATS,
    [EGI_OP_Linear] = FLOATS,
    [EGI_OP_LinearGrad] = FLOATS,
    [EGI_OP_GLU] = FLOATS,
    [EGI_OP_Swish] = FLOATS,
    [EGI_OP_GLUGrad] = FLOATS,
    [EGI_OP_SwishGrad] = FLOATS,
    [EGI_OP_SumTo] = NUMBERS,
    [EGI_OP_LinearLogProbability] = FLOATS,
    [EGI_OP_LogProbability] = FLOATS,
    [EGI_OP_MoE] = FLOATS,
    [EGI_OP_Route] = FLOATS,
    [EGI_OP_Dispatch] = FLOATS,
    [EGI_OP_Combine] = FLOATS,
    [EGI_OP_RaggedLinear] = FLOATS,
    [EGI_OP_RouteGrad] = FLOATS,
    [EGI_OP_RaggedLinearGrad] = FLOATS,
    [EGI_OP_RaggedReduce] = FLOATS,
    [EGI_OP_GatherGrad] = FLOATS,
    [EGI_OP_GatherElementsGrad] = FLOATS,
    [EGI_OP_GatherNDGrad] = FLOATS,
    [EGI_OP_PadGrad] = FLOATS,
    [EGI_OP_TileGrad] = FLOATS,
    [EGI_OP_SliceGrad] = FLOATS,
    [EGI_OP_GeluGrad] = FLOATS,
    [EGI_OP_SoftmaxGrad] = FLOATS,
    [EGI_OP_LogSoftmaxGrad] = FLOATS,
    [EGI_OP_LayerNormalizationGrad] = FLOATS,
    [EGI_OP_RMSNormalizationGrad] = FLOATS,
    [EGI_OP_AttentionGrad] = FLOATS,
    [EGI_OP_LinearLogProbabilityGrad] = FLOATS,
    [EGI_OP_LogProbabilityGrad] = FLOATS,
    [EGI_OP_Accumulate] = FLOATS,
    [EGI_OP_GradientNorm] = FLOATS,
    [EGI_OP_AdamW] = FLOATS,
    [EGI_OP_AdamW8bit] = FLOATS,
};

/* Operands with the type of input 0, a bit for each; EVERY: all of them. */
#define EVERY 0xffffffffu
static const uint32_t agreeing[EGI_OP_COUNT] = {
    [EGI_OP_Add] = EVERY,
    [EGI_OP_Sub] = EVERY,
    [EGI_OP_Mul] = EVERY,
    [EGI_OP_Div] = EVERY,
    [EGI_OP_Mod] = EVERY,
    [EGI_OP_Max] = EVERY,
    [EGI_OP_Min] = EVERY,
    [EGI_OP_Clip] = EVERY,
    [EGI_OP_And] = EVERY,
    [EGI_OP_Or] = EVERY,
    [EGI_OP_Xor] = EVERY,
    [EGI_OP_BitShift] = EVERY,
    [EGI_OP_BitwiseAnd] = EVERY,
    [EGI_OP_BitwiseOr] = EVERY,
    [EGI_OP_BitwiseXor] = EVERY,
    [EGI_OP_Equal] = EVERY,
    [EGI_OP_Less] = EVERY,
    [EGI_OP_LessOrEqual] = EVERY,
    [EGI_OP_Greater] = EVERY,
    [EGI_OP_GreaterOrEqual] = EVERY,
    [EGI_OP_Concat] = EVERY,
    [EGI_OP_Range] = EVERY,
    [EGI_OP_Pad] = 1u << 2,
    [EGI_OP_ScatterElements] = 1u << 2,
    [EGI_OP_ScatterND] = 1u << 2,
    [EGI_OP_MatMul] = EVERY,
    [EGI_OP_Gemm] = EVERY,
    [EGI_OP_LayerNormalization] = EVERY,
    [EGI_OP_RotaryEmbedding] = 1u << 1 | 1u << 2,
    [EGI_OP_Attention] = 1u << 1,
    [EGI_OP_MaskedAttention] = 1u << 1 | 1u << 2,
    [EGI_OP_MaskedAttentionGrad] = 1u << 1 | 1u << 2 | 1u << 5 | 1u << 7,
    [EGI_OP_AddMatMul] = EVERY,
    [EGI_OP_GLU] = EVERY,
    [EGI_OP_GLUGrad] = EVERY,
    [EGI_OP_SwishGrad] = EVERY,
    [EGI_OP_Linear] = 1u << 2,
    [EGI_OP_LinearLogProbability] = 1u << 3,
    [EGI_OP_GatherGrad] = 1u << 2,
    [EGI_OP_GatherElementsGrad] = 1u << 2,
    [EGI_OP_GatherNDGrad] = 1u << 2,
    [EGI_OP_PadGrad] = 1u << 1,
    [EGI_OP_TileGrad] = 1u << 1,
    [EGI_OP_SliceGrad] = 1u << 1,
    [EGI_OP_GeluGrad] = EVERY,
    [EGI_OP_SoftmaxGrad] = EVERY,
    [EGI_OP_LogSoftmaxGrad] = EVERY,
    [EGI_OP_LayerNormalizationGrad] = 1u << 1 | 1u << 4,
    [EGI_OP_AttentionGrad] = 1u << 1 | 1u << 4 | 1u << 6,
    [EGI_OP_LinearLogProbabilityGrad] = 1u << 5,
    [EGI_OP_Accumulate] = 1u << 1,
};

/* Operands that are indices: int32 or int64. */
static const uint32_t indices[EGI_OP_COUNT] = {
    [EGI_OP_CumProd] = 1u << 1,
    [EGI_OP_CumSum] = 1u << 1,
    [EGI_OP_Gather] = 1u << 1,
    [EGI_OP_GatherElements] = 1u << 1,
    [EGI_OP_GatherND] = 1u << 1,
    [EGI_OP_Pad] = 1u << 3,
    [EGI_OP_ScatterElements] = 1u << 1,
    [EGI_OP_ScatterND] = 1u << 1,
    [EGI_OP_Slice] = 1u << 1 | 1u << 2 | 1u << 3 | 1u << 4,
    [EGI_OP_Trilu] = 1u << 1,
    [EGI_OP_RotaryEmbedding] = 1u << 3,
    [EGI_OP_LinearLogProbability] = 1u << 2,
    [EGI_OP_LogProbability] = 1u << 1,
    [EGI_OP_GatherGrad] = 1u << 1,
    [EGI_OP_GatherElementsGrad] = 1u << 1,
    [EGI_OP_GatherNDGrad] = 1u << 1,
    [EGI_OP_PadGrad] = 1u << 3,
    [EGI_OP_SliceGrad] = 1u << 2 | 1u << 3 | 1u << 4 | 1u << 5,
    [EGI_OP_LinearLogProbabilityGrad] = 1u << 2,
    [EGI_OP_LogProbabilityGrad] = 1u << 1,
};

/* Operands that are shapes or axes: int64. */
static const uint32_t shapes[EGI_OP_COUNT] = {
    [EGI_OP_ReduceLogSumExp] = 1u << 1,
    [EGI_OP_ReduceMin] = 1u << 1,
    [EGI_OP_ReduceProd] = 1u << 1,
    [EGI_OP_TopK] = 1u << 1,
    [EGI_OP_Tile] = 1u << 1,
    [EGI_OP_Pad] = 1u << 1,
    [EGI_OP_PadGrad] = 1u << 2,
    [EGI_OP_ReverseSequence] = 1u << 1,
    [EGI_OP_ConstantOfShape] = 1u << 0,
    [EGI_OP_Expand] = 1u << 1,
    [EGI_OP_Reshape] = 1u << 1,
    [EGI_OP_Squeeze] = 1u << 1,
    [EGI_OP_Split] = 1u << 1,
    [EGI_OP_Unsqueeze] = 1u << 1,
    [EGI_OP_ReduceMax] = 1u << 1,
    [EGI_OP_ReduceSum] = 1u << 1,
    [EGI_OP_ReduceMean] = 1u << 1,
};

static uint8_t class_bit(eg_dtype dtype) {
  switch (egi_dtype_kind(dtype)) {
  case EGI_CLASS_FLOAT:
    return FLOATS;
  case EGI_CLASS_INTEGER:
    return INTEGERS;
  case EGI_CLASS_UNSIGNED:
    return UNSIGNED;
  case EGI_CLASS_BOOLEAN:
    return BOOLEANS;
  case EGI_CLASS_COMPLEX:
  case EGI_CLASS_STRING:
  case EGI_CLASS_NONE:
    break;
  }
  return 0;
}

static bool has_bit(uint32_t mask, unsigned index) {
  return mask == EVERY || (index < 32 && (mask >> index & 1u) != 0);
}

eg_status egi_shape_check_types(const egi_inference *in) {
  egi_op op = in->node->op;
  const egi_value *first = egi_shape_input(in, 0);
  if (first == NULL) return EG_OK;
  if (allowed[op] != 0 && (allowed[op] & class_bit(first->dtype)) == 0)
    return egi_shape_fail(in, "the operator does not take %s", egi_dtype_name(first->dtype));
  for (unsigned i = 0; i < in->node->n_inputs; i++) {
    if (i > 0 && has_bit(agreeing[op], i)) EG_TRY(egi_shape_check_type(in, i, first->dtype));
    if (has_bit(indices[op], i)) EG_TRY(egi_shape_check_index_type(in, i));
    if (has_bit(shapes[op], i)) EG_TRY(egi_shape_check_type(in, i, EG_DTYPE_I64));
  }
  return EG_OK;
}
