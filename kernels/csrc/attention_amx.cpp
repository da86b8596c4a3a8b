// AMX: attention in bfloat16 by tiles; caches of float32 and int8 as AVX-512 reads them.
#include "attention.h"
#include "amx.h"

#if HAS_AMX_LEVEL
#include "targets/amx.h"
#define HAS_TILES 1
#include "attention_level.h"
#include "attention_tiles.h"

namespace paged {

extern const Level amx_level = {"amx", processor::has_tiles, amx::decode_piece, amx::chunk_piece, amx::merge};

}  // namespace paged
#endif
