// AVX2.
#include "block_copies.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC target("avx2")
#define PRODUCTS(x) (Words) _mm256_mul_epu32((__m256i)(x), _mm256_srli_epi64((__m256i)(x), 32))
#define STREAM(to, x) _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)(x))
#define FENCE() _mm_sfence()
#define LEVEL avx2
#define VECTOR_BYTES 32
#include "level.h"

namespace block_copies {

static bool is_supported() { return __builtin_cpu_supports("avx2"); }

extern const Level avx2_level = {"avx2", is_supported, avx2::copy_and_sum, avx2::copy, avx2::finish};

}  // namespace block_copies
#endif
