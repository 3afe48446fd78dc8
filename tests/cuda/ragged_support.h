/* What the ragged and routing tests share: 16-bit values on the host, device copies, group sizes of every awkward form,
 * and the report of a case. */
#ifndef ENGRAFT_TESTS_CUDA_RAGGED_SUPPORT_H
#define ENGRAFT_TESTS_CUDA_RAGGED_SUPPORT_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/attention.h"

#define CHECK_CUDA(call)                                          \
  do {                                                            \
    const cudaError_t error_ = (call);                            \
    if (error_ != cudaSuccess) {                                  \
      std::printf("%s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(2);                                               \
    }                                                             \
  } while (0)

inline uint16_t to_bits(float x, egi_cuda_float dtype) {
  uint16_t bits;
  if (dtype == EGI_CUDA_BF16) {
    const __nv_bfloat16 y = __float2bfloat16(x);
    std::memcpy(&bits, &y, 2);
  } else {
    const __half y = __float2half(x);
    std::memcpy(&bits, &y, 2);
  }
  return bits;
}

inline float from_bits(uint16_t bits, egi_cuda_float dtype) {
  if (dtype == EGI_CUDA_BF16) {
    const uint32_t whole = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &whole, 4);
    return x;
  }
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

/* Device memory with its size; filled with 0xff (NaN in every format) or with a host vector. */
template <class T> struct device_vector {
  T *data = nullptr;
  size_t size = 0;
  explicit device_vector(size_t n) : size(n) {
    CHECK_CUDA(cudaMalloc(&data, sizeof(T) * std::max<size_t>(n, 1)));
    poison();
  }
  explicit device_vector(const std::vector<T> &host) : device_vector(host.size()) { upload(host); }
  ~device_vector() { cudaFree(data); }
  device_vector(const device_vector &) = delete;
  device_vector &operator=(const device_vector &) = delete;
  void poison() { CHECK_CUDA(cudaMemset(data, 0xff, sizeof(T) * size)); }
  void upload(const std::vector<T> &host) {
    if (!host.empty()) CHECK_CUDA(cudaMemcpy(data, host.data(), sizeof(T) * host.size(), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> host(size);
    if (size > 0) CHECK_CUDA(cudaMemcpy(host.data(), data, sizeof(T) * size, cudaMemcpyDeviceToHost));
    return host;
  }
};

/* Normal values rounded to the format. */
inline std::vector<float> draw_values(size_t n, double scale, egi_cuda_float dtype, std::mt19937 &random) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
  std::vector<float> values(n);
  for (float &value : values) value = from_bits(to_bits(normal(random), dtype), dtype);
  return values;
}

inline std::vector<uint16_t> pack_values(const std::vector<float> &values, egi_cuda_float dtype) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); i++) bits[i] = to_bits(values[i], dtype);
  return bits;
}

enum group_form { GROUPS_EDGES, GROUPS_ONE_TAKES_ALL, GROUPS_MOST_EMPTY, GROUPS_RANDOM, GROUPS_NONE, GROUPS_MANY };

/* Offsets of a form; `rows` receives how many rows to allocate, some of which no group may own. */
inline std::vector<int32_t> make_offsets(group_form form, std::mt19937 &random, int &rows) {
  std::vector<int> sizes;
  switch (form) {
  case GROUPS_EDGES:
    sizes = {1, 63, 64, 65, 0, 127, 128, 129, 16, 15, 17, 255, 256, 257, 0, 193};
    break;
  case GROUPS_ONE_TAKES_ALL:
    sizes = {0, 0, 0, 700, 0, 0};
    break;
  case GROUPS_MOST_EMPTY:
    sizes.assign(70, 0);
    sizes[33] = 5;
    sizes[64] = 130;
    sizes[69] = 1;
    break;
  case GROUPS_NONE:
    sizes.assign(5, 0);
    break;
  case GROUPS_MANY:
    for (int e = 0; e < 100; e++) sizes.push_back(static_cast<int>(random() % 24));
    break;
  default:
    for (int e = 0; e < 9; e++) sizes.push_back(static_cast<int>(random() % 301));
  }
  std::vector<int32_t> offsets(1, 0);
  for (int size : sizes) offsets.push_back(offsets.back() + size);
  rows = std::max(offsets.back() + (form == GROUPS_RANDOM ? 37 : 0), 8);
  return offsets;
}

/* The larger of two errors; NaN counts as infinite. */
inline double larger(double a, double b) {
  return std::isnan(b) ? INFINITY : std::max(a, b);
}

struct verdict {
  bool is_good = true;
  std::string text;
  void require(bool condition, const std::string &what) {
    if (condition) return;
    is_good = false;
    text += " " + what + "!";
  }
  int report(const std::string &name) const {
    std::printf("%s %s%s\n", is_good ? "ok  " : "FAIL", name.c_str(), text.c_str());
    return !is_good;
  }
};

inline bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

inline bool has_sm90() {
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  return properties.major == 9;
}

#endif
