// AVX2 with fused multiply-add. Bfloat16 is multiplied as float32, int8 as integers of 16 bits.
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <cstring>

#include <immintrin.h>

#pragma GCC target("avx2,fma")
#define LEVEL avx2
#define WIDTH 8
#define MAX_ROWS 6
#define HAS_BF16_DOT 0
#include "products_level.h"
#include "weight_level.h"

namespace products {

static bool is_supported(Element) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

extern const Level avx2_level = {"avx2",      is_supported,     WIDTH, MAX_ROWS, 1, avx2::multiply,
                                  avx2::round, avx2::interleave, avx2::convert};

}  // namespace products
#endif
