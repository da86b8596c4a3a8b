// AVX-512, of the processors that have its bfloat16 products as well.
#include "states.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#define LEVEL avx512
#define WIDTH 16
#define HAS_BF16_DOT 1
#include "level.h"
#include "ends_level.h"

namespace states {

static bool is_supported() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

extern const Level avx512_level = {"avx512bf16",          is_supported, avx512::scan_space, avx512::scan_delta,
                                  avx512::convolve, avx512::gate,   avx512::silu};

}  // namespace states
#endif
