// AVX2 with products of int8: processors without AVX-512 that have them.
#include "block_products.h"

#if HAS_AVXVNNI_LEVEL
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx2,avxvnni,fma,f16c")
#define LEVEL block_avxvnni
#define WIDTH 8
#define MAX_ROWS 4
#define HAS_BF16_DOT 0
#define HAS_INT8_DOT 1
#include "level.h"

namespace products {

static bool is_supported() {
    return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

extern const BlockLevel block_avxvnni_level = {"avxvnni", is_supported, WIDTH, block_avxvnni::multiply,
                                               block_avxvnni::round};

}  // namespace products
#endif
