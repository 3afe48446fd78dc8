/* Tests of the ragged products and reductions against float64: group sizes around every tile edge, one group with all
 * rows, most or all groups empty, NF4 weights in every form, strides with gaps; outputs poisoned, rows of no group and
 * gaps checked to be untouched, two runs compared bit by bit, a captured graph replayed over other offsets.
 * `ragged_test [quick]`; quick keeps to bf16, for the sanitizer. */
#include "backend/cuda/ragged.h"
#include "tests/cuda/ragged_cases.h"
#include "tests/cuda/ragged_reference.h"
#include "tests/cuda/ragged_support.h"

namespace {

const float nf4_values[16] = {-1.0f,
                              -0.6961928009986877f,
                              -0.5250730514526367f,
                              -0.39491748809814453f,
                              -0.28444138169288635f,
                              -0.18477343022823334f,
                              -0.09105003625154495f,
                              0.0f,
                              0.07958029955625534f,
                              0.16093020141124725f,
                              0.24611230194568634f,
                              0.33791524171829224f,
                              0.44070982933044434f,
                              0.5626170039176941f,
                              0.7229568362236023f,
                              1.0f};

/* An NF4 stack on the host, and what it stands for. */
struct nf4_stack {
  std::vector<uint8_t> codes, absmax_codes;
  std::vector<float> absmax, nested_absmax, nested_map, nested_offset;
};

nf4_stack draw_nf4(int n_groups, int64_t group_elements, double scale, bool is_nested, std::mt19937 &random) {
  nf4_stack stack;
  const size_t n = static_cast<size_t>(n_groups * group_elements), n_blocks = n / 64;
  std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
  stack.codes.resize(n / 2);
  for (uint8_t &code : stack.codes) code = static_cast<uint8_t>(random());
  if (!is_nested) {
    stack.absmax.resize(n_blocks);
    for (float &value : stack.absmax) value = static_cast<float>(2.0 * scale) * uniform(random);
    return stack;
  }
  stack.absmax_codes.resize(n_blocks);
  for (uint8_t &code : stack.absmax_codes) code = static_cast<uint8_t>(random());
  stack.nested_absmax.resize((n_blocks + 255) / 256);
  for (float &value : stack.nested_absmax) value = static_cast<float>(scale) * uniform(random);
  for (int i = 0; i < 256; i++) stack.nested_map.push_back(static_cast<float>(i - 127) / 128.0f);
  for (int e = 0; e < n_groups; e++) stack.nested_offset.push_back(static_cast<float>(2.0 * scale) * uniform(random));
  return stack;
}

std::vector<float> decode_on_host(const nf4_stack &stack, int64_t group_elements, egi_cuda_float dtype) {
  std::vector<float> values(stack.codes.size() * 2);
  for (size_t i = 0; i < values.size(); i++) {
    const size_t block = i / 64;
    float scale;
    if (!stack.absmax.empty()) {
      scale = stack.absmax[block];
    } else {
      const volatile float inner = stack.nested_map[stack.absmax_codes[block]] * stack.nested_absmax[block / 256];
      scale = inner + stack.nested_offset[i / static_cast<size_t>(group_elements)];
    }
    const int code = i % 2 == 0 ? stack.codes[i / 2] >> 4 : stack.codes[i / 2] & 15;
    values[i] = from_bits(to_bits(nf4_values[code] * scale, dtype), dtype);
  }
  return values;
}

/* Row-major [rows, columns] on the device with `gap` elements after each row. */
struct device_matrix {
  int rows, columns, stride;
  device_vector<uint16_t> memory;
  device_matrix(int rows_, int columns_, int gap)
      : rows(rows_), columns(columns_), stride(columns_ + gap),
        memory(static_cast<size_t>(rows_) * static_cast<size_t>(columns_ + gap)) {}
  egi_cuda_matrix view() const { return {memory.data, stride}; }
  void upload(const std::vector<float> &dense, egi_cuda_float dtype) {
    std::vector<uint16_t> bits(memory.size, 0xffff);
    for (size_t i = 0; i < dense.size(); i++)
      bits[i / static_cast<size_t>(columns) * static_cast<size_t>(stride) + i % static_cast<size_t>(columns)] =
          to_bits(dense[i], dtype);
    memory.upload(bits);
  }
};

struct device_nf4 {
  device_vector<uint8_t> codes, absmax_codes;
  device_vector<float> absmax, nested_absmax, nested_map, nested_offset;
  bool is_nested;
  explicit device_nf4(const nf4_stack &s)
      : codes(s.codes), absmax_codes(s.absmax_codes), absmax(s.absmax), nested_absmax(s.nested_absmax),
        nested_map(s.nested_map), nested_offset(s.nested_offset), is_nested(s.absmax.empty()) {}
  egi_ragged_nf4 view() const {
    if (!is_nested) return {codes.data, absmax.data, nullptr, nullptr, nullptr, nullptr};
    return {codes.data, nullptr, absmax_codes.data, nested_absmax.data, nested_map.data, nested_offset.data};
  }
};

/* Everything of one product on the device. */
struct device_product {
  const ragged_problem &p;
  device_matrix x, y, gate_up, adapter_x;
  device_vector<uint16_t> weight, adapter_weight, bias;
  device_vector<float> row_weight;
  device_vector<int32_t> offsets;
  device_nf4 nf4;
  device_vector<char> scratch;
  egi_ragged_product call = {};

  device_product(const ragged_problem &problem, const product_case &c, const nf4_stack &stack, egi_cuda_float dtype,
                 egi_ragged_kernels kernels)
      : p(problem), x(p.n_rows, p.n_in, 8), y(p.n_rows, p.n_results(), 16), gate_up(p.n_rows, p.n_out, 8),
        adapter_x(p.n_rows, std::max(p.rank, 8), 0), weight(pack_values(p.weight, dtype)),
        adapter_weight(pack_values(p.adapter_weight, dtype)), bias(pack_values(p.bias, dtype)),
        row_weight(p.row_weight), offsets(p.offsets), nf4(stack), scratch(scratch_bytes(problem, c)) {
    x.upload(p.x, dtype);
    if (p.rank > 0) adapter_x.upload(p.adapter_x, dtype);
    call.n_groups = p.n_groups;
    call.n_in = p.n_in;
    call.n_out = p.n_out;
    call.n_rows = p.n_rows;
    call.offsets = offsets.data;
    call.dtype = dtype;
    call.direction = p.direction;
    call.pairing = p.pairing;
    call.activation = p.activation;
    call.alpha = static_cast<float>(p.alpha);
    call.limit = static_cast<float>(p.limit);
    call.x = x.view();
    call.y = y.view();
    if (c.has_gate_up) call.gate_up = gate_up.view();
    call.rank = p.rank;
    call.adapter_x = adapter_x.view();
    call.adapter_weight = adapter_weight.data;
    call.bias = p.bias.empty() ? nullptr : bias.data;
    call.row_weight = p.row_weight.empty() ? nullptr : row_weight.data;
    if (c.weight == DENSE) {
      call.weight = weight.data;
      return;
    }
    call.nf4 = nf4.view();
    const bool is_inside = c.weight == NF4_INSIDE || c.weight == NF4_NESTED;
    call.scratch_bytes = is_inside ? egi_cuda_ragged_scratch(&call, kernels) : scratch.size;
    call.scratch = call.scratch_bytes > 0 ? scratch.data : nullptr;
  }
  static size_t scratch_bytes(const ragged_problem &p, const product_case &c) {
    const size_t group = static_cast<size_t>(p.n_in) * static_cast<size_t>(p.n_out) * 2;
    if (c.weight == DENSE) return 0;
    return c.weight == NF4_SMALL_SCRATCH ? 3 * group + 2 : static_cast<size_t>(p.n_groups) * group;
  }
  std::vector<uint16_t> run(egi_ragged_kernels kernels, bool &is_launched) {
    y.memory.poison();
    gate_up.memory.poison();
    scratch.poison();
    is_launched = egi_cuda_ragged_product(&call, kernels, nullptr) == EGI_CUDA_OK;
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<uint16_t> bits = y.memory.download();
    const std::vector<uint16_t> more = gate_up.memory.download();
    bits.insert(bits.end(), more.begin(), more.end());
    return bits;
  }
};

/* Elements may miss by one rounding of the format plus a little; elements of no group and gaps must be untouched. */
struct element_check {
  double largest = 0.0; /* error over what is allowed */
  bool is_untouched = true;
};

element_check compare(const std::vector<uint16_t> &got, const device_matrix &m, const std::vector<double> &want,
                      const ragged_problem &p, egi_cuda_float dtype) {
  element_check check;
  const double unit = dtype == EGI_CUDA_BF16 ? 1.0 / 250.0 : 1.0 / 2000.0,
               floor = 2e-4 * (dtype == EGI_CUDA_BF16 ? 1.0 : 0.25);
  std::vector<bool> is_owned(static_cast<size_t>(m.rows), false);
  for (int r = p.offsets.front(); r < p.offsets.back(); r++) is_owned[static_cast<size_t>(r)] = true;
  for (int r = 0; r < m.rows; r++)
    for (int c = 0; c < m.stride; c++) {
      const uint16_t bits = got[static_cast<size_t>(r) * static_cast<size_t>(m.stride) + static_cast<size_t>(c)];
      if (c >= m.columns || !is_owned[static_cast<size_t>(r)] || want.empty()) {
        check.is_untouched = check.is_untouched && bits == 0xffff;
        continue;
      }
      const double expected = want[static_cast<size_t>(r) * static_cast<size_t>(m.columns) + static_cast<size_t>(c)];
      const double error =
          std::fabs(static_cast<double>(from_bits(bits, dtype)) - expected) / (unit * std::fabs(expected) + floor);
      check.largest = larger(check.largest, error);
    }
  return check;
}

void judge(verdict &v, const std::vector<uint16_t> &got, const device_product &d, const ragged_result &want,
           bool has_gate_up) {
  const size_t split = d.y.memory.size;
  const std::vector<uint16_t> y(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(split));
  const std::vector<uint16_t> gate_up(got.begin() + static_cast<std::ptrdiff_t>(split), got.end());
  const element_check first = compare(y, d.y, want.y, d.p, d.call.dtype);
  const element_check second =
      compare(gate_up, d.gate_up, has_gate_up ? want.gate_up : std::vector<double>(), d.p, d.call.dtype);
  char line[64];
  std::snprintf(line, sizeof line, " y %.2f gate_up %.2f", first.largest, second.largest);
  v.text += line;
  v.require(first.largest <= 1.0, "y");
  v.require(second.largest <= 1.0, "gate_up");
  v.require(first.is_untouched && second.is_untouched, "wrote outside");
}

ragged_problem draw_problem(const product_case &c, egi_cuda_float dtype, nf4_stack &stack, std::mt19937 &random) {
  ragged_problem p = {};
  p.offsets = make_offsets(c.groups, random, p.n_rows);
  p.n_groups = static_cast<int>(p.offsets.size()) - 1;
  p.n_in = c.n_in;
  p.n_out = c.n_out;
  p.rank = c.rank;
  p.direction = c.direction;
  p.pairing = c.pairing;
  p.activation = c.activation;
  p.alpha = 1.702f;
  p.limit = 0.75; /* so that both clamps are met */
  const size_t rows = static_cast<size_t>(p.n_rows), groups = static_cast<size_t>(p.n_groups),
               n_out = static_cast<size_t>(p.n_out);
  const size_t n_in = static_cast<size_t>(p.n_in), rank = static_cast<size_t>(p.rank);
  const double scale = 1.0 / std::sqrt(static_cast<double>(c.n_in));
  p.x = draw_values(rows * n_in, 1.0, dtype, random);
  for (size_t i = static_cast<size_t>(p.offsets.back()) * n_in; i < p.x.size(); i++)
    p.x[i] = NAN; /* rows of no group */
  if (c.weight == DENSE) {
    p.weight = draw_values(groups * n_out * n_in, scale, dtype, random);
  } else {
    const bool is_nested =
        c.weight == NF4_NESTED || (c.weight == NF4_SMALL_SCRATCH && c.pairing != EGI_RAGGED_UNPAIRED);
    stack = draw_nf4(p.n_groups, static_cast<int64_t>(n_out * n_in), scale, is_nested, random);
    p.weight = decode_on_host(stack, static_cast<int64_t>(n_out * n_in), dtype);
  }
  p.adapter_x = draw_values(rows * rank, 1.0, dtype, random);
  p.adapter_weight = draw_values(groups * n_out * rank, 0.2, dtype, random);
  if (c.has_bias) p.bias = draw_values(groups * n_out, 0.5, dtype, random);
  if (c.has_row_weight) p.row_weight = draw_values(rows, 1.0, EGI_CUDA_BF16, random);
  return p;
}

int run_product_case(const product_case &c, egi_cuda_float dtype, std::mt19937 &random) {
  nf4_stack stack;
  const ragged_problem p = draw_problem(c, dtype, stack, random);
  const ragged_result want = multiply_reference(p);
  int n_failed = 0;
  for (egi_ragged_kernels kernels : {EGI_RAGGED_MMA, EGI_RAGGED_SM90}) {
    if (kernels == EGI_RAGGED_SM90 && !has_sm90()) continue;
    device_product d(p, c, stack, dtype, kernels);
    verdict v;
    bool is_first = false, is_second = false;
    const std::vector<uint16_t> first = d.run(kernels, is_first), second = d.run(kernels, is_second);
    judge(v, first, d, want, c.has_gate_up);
    v.require(is_first && is_second, "launch");
    v.require(first == second, "second run differs");
    n_failed += v.report(std::string(kernels == EGI_RAGGED_SM90 ? "sm90 " : "mma  ") +
                         (dtype == EGI_CUDA_BF16 ? "bf16 " : "f16  ") + c.name);
  }
  return n_failed;
}

/* out on the device, and where element (group, i, j) lies in it. */
std::vector<float> run_reduction(const reduction_problem &p, const reduction_case &c, egi_cuda_float dtype,
                                 egi_ragged_kernels kernels, bool &is_launched) {
  device_matrix left(p.n_rows, p.n_left, 8), right(p.n_rows, p.n_right, 0);
  left.upload(p.left, dtype);
  right.upload(p.right, dtype);
  const device_vector<int32_t> offsets(p.offsets);
  const size_t n = static_cast<size_t>(p.n_groups) * static_cast<size_t>(p.n_left) * static_cast<size_t>(p.n_right);
  device_vector<float> out(n);
  if (c.is_added) out.upload(std::vector<float>(n, 0.5f));
  egi_ragged_reduction call = {};
  call.n_groups = p.n_groups;
  call.n_left = p.n_left;
  call.n_right = p.n_right;
  call.n_rows = p.n_rows;
  call.offsets = offsets.data;
  call.dtype = dtype;
  call.left = left.view();
  call.right = right.view();
  call.out = out.data;
  call.group_stride = static_cast<int64_t>(p.n_left) * p.n_right;
  call.left_stride = c.is_turned ? 1 : p.n_right;
  call.right_stride = c.is_turned ? p.n_left : 1;
  call.is_added = c.is_added;
  is_launched = egi_cuda_ragged_reduction(&call, kernels, nullptr) == EGI_CUDA_OK;
  CHECK_CUDA(cudaDeviceSynchronize());
  return out.download();
}

void judge_reduction(verdict &v, const std::vector<float> &got, const reduction_problem &p, const reduction_case &c,
                     const reduction_result &want) {
  const size_t n_left = static_cast<size_t>(p.n_left), n_right = static_cast<size_t>(p.n_right);
  double largest = 0.0;
  bool is_untouched = true;
  for (size_t i = 0; i < want.out.size(); i++) {
    const size_t group = i / (n_left * n_right), row = i / n_right % n_left, column = i % n_right;
    const float value = got[group * n_left * n_right + (c.is_turned ? column * n_left + row : row * n_right + column)];
    if (p.offsets[group] == p.offsets[group + 1]) {
      is_untouched = is_untouched && (c.is_added ? value == 0.5f : std::isnan(value));
      continue;
    }
    if (!std::isfinite(want.out[i])) continue; /* the group with infinities in it */
    const double expected = want.out[i] + (c.is_added ? 0.5 : 0.0);
    const double error = std::fabs(static_cast<double>(value) - expected) / (2e-5 * want.spread[i] + 1e-6);
    largest = larger(largest, error);
  }
  char line[64];
  std::snprintf(line, sizeof line, " %.2f", largest);
  v.text += line;
  v.require(largest <= 1.0, "out");
  v.require(is_untouched, "empty group written");
}

int run_reduction_case(const reduction_case &c, egi_cuda_float dtype, std::mt19937 &random) {
  reduction_problem p = {};
  p.offsets = make_offsets(c.groups, random, p.n_rows);
  p.n_groups = static_cast<int>(p.offsets.size()) - 1;
  p.n_left = c.n_left;
  p.n_right = c.n_right;
  p.left = draw_values(static_cast<size_t>(p.n_rows) * static_cast<size_t>(c.n_left), 1.0, dtype, random);
  p.right = draw_values(static_cast<size_t>(p.n_rows) * static_cast<size_t>(c.n_right), 1.0, dtype, random);
  /* Infinities in group 3 and in the rows of no group must not reach the neighbours. */
  for (int r = 0; r < p.n_rows; r++) {
    if (r < p.offsets.back() && !(r >= p.offsets[3] && r < p.offsets[4] && c.groups == GROUPS_EDGES)) continue;
    for (int i = 0; i < c.n_left; i++)
      p.left[static_cast<size_t>(r) * static_cast<size_t>(c.n_left) + static_cast<size_t>(i)] = INFINITY;
    for (int i = 0; i < c.n_right; i++)
      p.right[static_cast<size_t>(r) * static_cast<size_t>(c.n_right) + static_cast<size_t>(i)] = NAN;
  }
  const reduction_result want = reduce_reference(p);
  int n_failed = 0;
  for (egi_ragged_kernels kernels : {EGI_RAGGED_MMA, EGI_RAGGED_SM90}) {
    if (kernels == EGI_RAGGED_SM90 && !has_sm90()) continue;
    verdict v;
    bool is_first = false, is_second = false;
    const std::vector<float> first = run_reduction(p, c, dtype, kernels, is_first);
    const std::vector<float> second = run_reduction(p, c, dtype, kernels, is_second);
    judge_reduction(v, first, p, c, want);
    v.require(is_first && is_second, "launch");
    v.require(std::memcmp(first.data(), second.data(), sizeof(float) * first.size()) == 0, "second run differs");
    n_failed += v.report(std::string(kernels == EGI_RAGGED_SM90 ? "sm90 " : "mma  ") +
                         (dtype == EGI_CUDA_BF16 ? "bf16 " : "f16  ") + c.name);
  }
  return n_failed;
}

/* The decoded stack equals the host's, bit by bit. */
int test_decoding(egi_cuda_float dtype, bool is_nested, std::mt19937 &random) {
  const int n_groups = 7, first = 2, count = 4;
  const int64_t elements = 64 * 37;
  const nf4_stack stack = draw_nf4(n_groups, elements, 0.1, is_nested, random);
  const device_nf4 on_device(stack);
  device_vector<uint16_t> dst(static_cast<size_t>(count * elements));
  const egi_ragged_decoding call = {on_device.view(), first, count, elements, dtype, dst.data};
  verdict v;
  v.require(egi_cuda_ragged_decode(&call, nullptr) == EGI_CUDA_OK, "launch");
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<uint16_t> got = dst.download(), all = pack_values(decode_on_host(stack, elements, dtype), dtype);
  const std::vector<uint16_t> want(all.begin() + first * elements, all.begin() + (first + count) * elements);
  v.require(got == want, "bits");
  return v.report(std::string("nf4 decoding ") + (is_nested ? "nested " : "") +
                  (dtype == EGI_CUDA_BF16 ? "bf16" : "f16"));
}

const product_case graph_case = {"captured graph",    GROUPS_RANDOM,    136,   264,  8,    EGI_RAGGED_FORWARD,
                                 EGI_RAGGED_UNPAIRED, EGI_RAGGED_PLAIN, DENSE, true, true, false};

/* A graph captured over one set of offsets must serve another: nothing of the launch may depend on them. */
int test_graph(egi_ragged_kernels kernels, std::mt19937 &random) {
  nf4_stack stack;
  ragged_problem p = draw_problem(graph_case, EGI_CUDA_BF16, stack, random);
  device_product d(p, graph_case, stack, EGI_CUDA_BF16, kernels);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  verdict v;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  v.require(egi_cuda_ragged_product(&d.call, kernels, stream) == EGI_CUDA_OK, "capture");
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  const int last = p.offsets.back();
  for (size_t e = 1; e + 1 < p.offsets.size(); e++) p.offsets[e] = static_cast<int32_t>(e < 5 ? 0 : last / 2);
  d.offsets.upload(p.offsets);
  d.y.memory.poison();
  CHECK_CUDA(cudaGraphLaunch(replay, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::vector<uint16_t> bits = d.y.memory.download();
  const std::vector<uint16_t> more = d.gate_up.memory.download();
  bits.insert(bits.end(), more.begin(), more.end());
  judge(v, bits, d, multiply_reference(p), false);
  CHECK_CUDA(cudaGraphExecDestroy(replay));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return v.report(graph_case.name);
}

/* The judge must see a wrong element, an unwritten one and one written outside; bad arguments must be refused. */
int test_the_judge(std::mt19937 &random) {
  nf4_stack stack;
  const ragged_problem p = draw_problem(graph_case, EGI_CUDA_BF16, stack, random);
  device_product d(p, graph_case, stack, EGI_CUDA_BF16, EGI_RAGGED_MMA);
  bool is_launched = false;
  const std::vector<uint16_t> good = d.run(EGI_RAGGED_MMA, is_launched);
  const ragged_result want = multiply_reference(p);
  const auto is_accepted = [&](const std::vector<uint16_t> &bits) {
    verdict v;
    judge(v, bits, d, want, false);
    return v.is_good;
  };
  verdict v;
  v.require(is_launched && is_accepted(good), "good one refused");
  std::vector<uint16_t> bad = good;
  bad[3] = to_bits(from_bits(good[3], EGI_CUDA_BF16) * 1.02f + 0.01f, EGI_CUDA_BF16);
  v.require(!is_accepted(bad), "wrong element");
  bad = good;
  bad[5] = 0xffff; /* NaN */
  v.require(!is_accepted(bad), "unwritten element");
  bad = good;
  bad[static_cast<size_t>(d.y.columns)] = 0;
  v.require(!is_accepted(bad), "written gap");
  egi_ragged_product call = d.call;
  call.n_in = 12;
  v.require(egi_cuda_ragged_product(&call, EGI_RAGGED_AUTO, nullptr) == EGI_CUDA_UNSUPPORTED, "odd size taken");
  call = d.call;
  call.offsets = nullptr;
  v.require(egi_cuda_ragged_product(&call, EGI_RAGGED_AUTO, nullptr) == EGI_CUDA_INVALID, "no offsets taken");
  call = d.call;
  call.activation = EGI_RAGGED_SWIGLU;
  v.require(egi_cuda_ragged_product(&call, EGI_RAGGED_AUTO, nullptr) == EGI_CUDA_INVALID, "unpaired gate taken");
  return v.report("the judge notices faults");
}

} // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!has_device()) return 77; /* skipped */
  const bool is_quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 7u);
  int n_failed = 0;
  for (egi_cuda_float dtype : {EGI_CUDA_BF16, EGI_CUDA_F16}) {
    if (is_quick && dtype == EGI_CUDA_F16) continue;
    for (bool is_nested : {false, true}) n_failed += test_decoding(dtype, is_nested, random);
    for (const product_case &c : make_product_cases()) n_failed += run_product_case(c, dtype, random);
    for (const reduction_case &c : make_reduction_cases()) n_failed += run_reduction_case(c, dtype, random);
  }
  n_failed += test_graph(EGI_RAGGED_MMA, random);
  if (has_sm90()) n_failed += test_graph(EGI_RAGGED_SM90, random);
  n_failed += test_the_judge(random);
  std::printf("%d failed\n", n_failed);
  return n_failed != 0;
}
