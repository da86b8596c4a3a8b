// AVX-512 with its products of bfloat16 and int8.
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,prefer-vector-width=512")
#define LEVEL avx512
#define WIDTH 16
#define MAX_ROWS 14
#define HAS_BF16_DOT 1
#include "products_level.h"
#include "weight_level.h"

namespace products {

static bool is_supported(Element) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

extern const Level avx512_level = {"avx512bf16",  is_supported,       WIDTH, MAX_ROWS, 1, avx512::multiply,
                                  avx512::round, avx512::interleave, avx512::convert};

}  // namespace products
#endif
