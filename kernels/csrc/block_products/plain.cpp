// For every processor.
#include "block_products.h"
#include "targets/plain.h"
#undef LEVEL
#define LEVEL block_plain
#define MAX_ROWS 2
#define HAS_INT8_DOT 0
#include "level.h"

namespace products {

extern const BlockLevel block_plain_level = {"plain", is_supported, WIDTH, block_plain::multiply, block_plain::round};

}  // namespace products
