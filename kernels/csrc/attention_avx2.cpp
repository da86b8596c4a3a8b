// AVX2 with fused multiply-add.
#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#pragma GCC target("avx2,fma")
#define LEVEL avx2
#define WIDTH 8
#define HAS_BF16_DOT 0
#define HAS_TILES 0
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

static bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

extern const Level avx2_level = {"avx2", is_supported, avx2::decode_piece, avx2::chunk_piece, avx2::merge};

}  // namespace paged
#endif
