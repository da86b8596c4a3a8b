// AVX2 with fused multiply-add.
#include "states.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <cstring>

#pragma GCC target("avx2,fma")
#define LEVEL avx2
#define WIDTH 8
#define HAS_BF16_DOT 0
#include "level.h"
#include "ends_level.h"

namespace states {

static bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

extern const Level avx2_level = {"avx2",          is_supported, avx2::scan_space, avx2::scan_delta,
                                  avx2::convolve, avx2::gate,   avx2::silu};

}  // namespace states
#endif
