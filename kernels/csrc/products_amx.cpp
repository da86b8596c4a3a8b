// AMX: tiles of bfloat16 and int8, on processors and under systems that have them.
#include "products.h"

#if HAS_AMX_LEVEL
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,prefer-vector-width=512", \
                   "amx-tile,amx-bf16,amx-int8")
#define LEVEL amx
#define WIDTH 16
#define MAX_ROWS 0
#define HAS_BF16_DOT 1
#include "products_level.h"
#include "products_tiles.h"
#include "weight_level.h"

namespace products {

static bool is_supported(Element element) { return element != Element::float32 && processor::has_tiles(); }

extern const Level amx_level = {"amx",      is_supported,    WIDTH,       amx::kMostRows, amx::kTileSteps, amx::multiply,
                               amx::round, amx::interleave, amx::convert};

}  // namespace products
#endif
