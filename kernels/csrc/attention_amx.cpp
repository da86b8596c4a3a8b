// AMX: attention in bfloat16 by tiles; caches of float32 and int8 as AVX-512 reads them.
#include "attention.h"
#include "amx.h"

#if HAS_AMX_LEVEL
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,prefer-vector-width=512", \
                   "amx-tile,amx-bf16,amx-int8")
#define LEVEL amx
#define WIDTH 16
#define HAS_BF16_DOT 1
#define HAS_TILES 1
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

extern const Level amx_level = {"amx", processor::has_tiles, amx::decode_piece, amx::chunk_piece, amx::merge};

}  // namespace paged
#endif
