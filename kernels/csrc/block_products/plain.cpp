// Vectors of 16 bytes, which every x86-64 and ARM64 processor has.
#include "block_products.h"

#include <cstring>

#define LEVEL block_plain
#define WIDTH 4
#define MAX_ROWS 2
#define HAS_BF16_DOT 0
#define HAS_INT8_DOT 0
#include "level.h"

namespace products {

static bool always() { return true; }

extern const BlockLevel block_plain_level = {"plain", always, WIDTH, block_plain::multiply, block_plain::round};

}  // namespace products
