// AVX-512 with dot products of bfloat16, and of words (VNNI, which every such processor has). To be included after all
// other headers, by GCC for x86-64.
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,prefer-vector-width=512")
#define LEVEL avx512
#define WIDTH 16
#define HAS_BF16_DOT 1

static bool is_supported() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
