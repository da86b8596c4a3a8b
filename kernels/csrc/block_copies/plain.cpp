// Vectors of 16 bytes, which every x86-64 and ARM64 processor has.
#include "block_copies.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#define PRODUCTS(x) (Words) _mm_mul_epu32((__m128i)(x), _mm_srli_epi64((__m128i)(x), 32))
#define STREAM(to, x) _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)(x))
#define FENCE() _mm_sfence()
#endif

#define LEVEL plain
#define VECTOR_BYTES 16
#include "level.h"

namespace block_copies {

static bool always() { return true; }

extern const Level plain_level = {"plain", always, plain::copy_and_sum, plain::copy, plain::finish};

}  // namespace block_copies
