// AMX: tiles of bfloat16 and int8, on processors and under systems that have them.
#include "products.h"

#if HAS_AMX_LEVEL
#include "targets/amx.h"
#define MAX_ROWS 0
#include "products_level.h"
#include "products_tiles.h"
#include "weight_level.h"

namespace products {

static bool is_level(Element element) { return element != Element::float32 && processor::has_tiles(); }

extern const Level amx_level = {"amx",      is_level,        WIDTH,       amx::kMostRows, amx::kTileSteps, amx::multiply,
                               amx::round, amx::interleave, amx::convert};

}  // namespace products
#endif
