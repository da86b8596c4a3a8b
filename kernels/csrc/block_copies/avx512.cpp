// AVX-512 with products of 64-bit words.
#include "block_copies.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512dq")
#define PRODUCTS(x) (Words) _mm512_mul_epu32((__m512i)(x), _mm512_srli_epi64((__m512i)(x), 32))
#define STREAM(to, x) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)(x))
#define FENCE() _mm_sfence()
#define LEVEL avx512
#define VECTOR_BYTES 64
#include "level.h"

namespace block_copies {

static bool is_supported() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }

extern const Level avx512_level = {"avx512", is_supported, avx512::copy_and_sum, avx512::copy, avx512::finish};

}  // namespace block_copies
#endif
