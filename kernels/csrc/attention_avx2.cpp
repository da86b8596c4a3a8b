// Attention with AVX2.
#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "targets/avx2.h"
#define HAS_TILES 0
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

extern const Level avx2_level = {"avx2", is_supported, avx2::decode_piece, avx2::chunk_piece, avx2::merge};

}  // namespace paged
#endif
