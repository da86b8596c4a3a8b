// Attention for every processor.
#include "attention.h"
#include "targets/plain.h"
#define HAS_TILES 0
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

extern const Level plain_level = {"plain", is_supported, plain::decode_piece, plain::chunk_piece, plain::merge};

}  // namespace paged
