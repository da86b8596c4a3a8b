// AVX-512 with its products of int8.
#include "block_products.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,prefer-vector-width=512")
#define LEVEL block_avx512vnni
#define WIDTH 16
#define MAX_ROWS 6
#define HAS_BF16_DOT 0
#define HAS_INT8_DOT 1
#include "level.h"

namespace products {

static bool is_supported() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

extern const BlockLevel block_avx512vnni_level = {"avx512vnni", is_supported, WIDTH, block_avx512vnni::multiply,
                                                  block_avx512vnni::round};

}  // namespace products
#endif
