// AVX2 with fused multiply-add. To be included after all other headers, by GCC for x86-64.
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#pragma GCC target("avx2,fma,f16c")
#define LEVEL avx2
#define WIDTH 8
#define HAS_BF16_DOT 0

static bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
