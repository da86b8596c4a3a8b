// Vectors of 16 bytes, which every x86-64 and ARM64 processor has.
#include "attention.h"

#include <cstring>
#include <type_traits>

#define LEVEL plain
#define WIDTH 4
#define HAS_BF16_DOT 0
#define HAS_TILES 0
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

static bool always() { return true; }

extern const Level plain_level = {"plain", always, plain::decode_piece, plain::chunk_piece, plain::merge};

}  // namespace paged
