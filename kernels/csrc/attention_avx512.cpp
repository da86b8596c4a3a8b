// Attention with AVX-512.
#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "targets/avx512.h"
#define HAS_TILES 0
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

extern const Level avx512_level = {"avx512bf16", is_supported, avx512::decode_piece, avx512::chunk_piece, avx512::merge};

}  // namespace paged
#endif
