/* Chooses the instruction set of the hot loops by what the processor says; see isa/isa.h. */
#include "backend/cpu/isa/isa.h"

#define DECLARE_BASELINE(member, type) extern const type type##_baseline;
#define FILL_BASELINE(member, type) &type##_baseline,
EGI_ISA_TABLES(DECLARE_BASELINE)
static const egi_isa isa_baseline = {"baseline", EGI_ISA_TABLES(FILL_BASELINE)};

#if defined(EGI_HAS_X86_ISA)
#define DECLARE_AVX2(member, type) extern const type type##_avx2;
#define FILL_AVX2(member, type) &type##_avx2,
#define DECLARE_AVX512(member, type) extern const type type##_avx512;
#define FILL_AVX512(member, type) &type##_avx512,
EGI_ISA_TABLES(DECLARE_AVX2)
EGI_ISA_TABLES(DECLARE_AVX512)
static const egi_isa isa_avx2 = {"avx2", EGI_ISA_TABLES(FILL_AVX2)};
static const egi_isa isa_avx512 = {"avx512", EGI_ISA_TABLES(FILL_AVX512)};
#endif

const egi_isa *egi_cpu_isa_at(size_t index) {
  const egi_isa *found[3];
  size_t count = 0;
#if defined(EGI_HAS_X86_ISA)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) found[count++] = &isa_avx512;
  if (has_avx2) found[count++] = &isa_avx2;
#endif
  found[count++] = &isa_baseline;
  return index < count ? found[index] : NULL;
}

const egi_isa *egi_cpu_isa(void) {
  return egi_cpu_isa_at(0);
}
