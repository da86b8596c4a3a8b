// AVX2 with fused multiply-add.
#include "block_products.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx2,fma,f16c")
#define LEVEL block_avx2
#define WIDTH 8
#define MAX_ROWS 4
#define HAS_BF16_DOT 0
#define HAS_INT8_DOT 0
#include "level.h"

namespace products {

static bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

extern const BlockLevel block_avx2_level = {"avx2", is_supported, WIDTH, block_avx2::multiply, block_avx2::round};

}  // namespace products
#endif
