// AVX-512 with dot products of bfloat16 and of words (VNNI, which every such processor has).
#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,prefer-vector-width=512")
#define LEVEL avx512bf16
#define WIDTH 16
#define HAS_BF16_DOT 1
#define HAS_TILES 0
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

static bool is_supported() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

extern const Level avx512bf16_level = {"avx512bf16", is_supported, avx512bf16::decode_piece, avx512bf16::chunk_piece, avx512bf16::merge};

}  // namespace paged
#endif
