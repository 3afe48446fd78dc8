/* Functions that the host and a CUDA device must compute alike, bit for bit: one definition for both. */
#ifndef ENGRAFT_BASE_ANYWHERE_H
#define ENGRAFT_BASE_ANYWHERE_H

#include <stdint.h>

#ifdef __CUDACC__
#define EGI_ANYWHERE static inline __host__ __device__
#else
#define EGI_ANYWHERE static inline
#endif

/* Philox 4x32-10 (Salmon et al., SC 2011), in place of the counter. */
EGI_ANYWHERE void egi_philox_words(uint64_t key, uint32_t words[4]) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t low = (uint64_t)0xD2511F53u * words[0], high = (uint64_t)0xCD9E8D57u * words[2];
    words[0] = (uint32_t)(high >> 32) ^ words[1] ^ k0;
    words[1] = (uint32_t)high;
    words[2] = (uint32_t)(low >> 32) ^ words[3] ^ k1;
    words[3] = (uint32_t)low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

/* The words of element `index` of a stream of numbers under a seed. */
EGI_ANYWHERE void egi_random_words(uint64_t seed, uint64_t stream, uint64_t index, uint32_t words[4]) {
  words[0] = (uint32_t)index;
  words[1] = (uint32_t)(index >> 32);
  words[2] = (uint32_t)stream;
  words[3] = (uint32_t)(stream >> 32);
  egi_philox_words(seed, words);
}

/* 53 bits of two words, in [0, 1). */
EGI_ANYWHERE double egi_random_unit(uint32_t high, uint32_t low) {
  return (double)(((uint64_t)high << 21) | (low >> 11)) * 0x1p-53;
}

/* Codes of 4 bits for a number in [-1, 1]; see blockwise.h. NF4: the number of thresholds that it is above: one that is
 * equal keeps the lower code. */
EGI_ANYWHERE int32_t egi_nf4_code(float x) {
  return (x > -0.8480964004993439F) + (x > -0.6106329262256622F) + (x > -0.4599952697753906F) +
         (x > -0.33967943489551544F) + (x > -0.23460740596055984F) + (x > -0.13791173323988914F) +
         (x > -0.045525018125772476F) + (x > 0.03979014977812767F) + (x > 0.1202552504837513F) +
         (x > 0.2035212516784668F) + (x > 0.2920137718319893F) + (x > 0.3893125355243683F) + (x > 0.5016634166240692F) +
         (x > 0.6427869200706482F) + (x > 0.8614784181118011F);
}

/* FP4: thresholds of magnitudes; the codes of the pairs 2, 4 and 6 fall where magnitudes rise. The sign is the bit
 * of 8.
 */
EGI_ANYWHERE int32_t egi_fp4_code(float x) {
  float magnitude = x < 0.0F ? -x : x;
  int32_t rank = (magnitude > 0.00260417F) + (magnitude > 0.0859375F) + (magnitude > 0.20833333F) +
                 (magnitude > 0.29166667F) + (magnitude > 0.4166667F) + (magnitude > 0.583333F) +
                 (magnitude > 0.8333333F);
  return ((8 - (rank & 6)) & 7) | (rank & 1) | (x < 0.0F) << 3;
}

#endif
