// AVX2.
#include "block_products.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "targets/avx2.h"
#undef LEVEL
#define LEVEL block_avx2
#define MAX_ROWS 4
#define HAS_INT8_DOT 0
#include "level.h"

namespace products {

extern const BlockLevel block_avx2_level = {"avx2", is_supported, WIDTH, block_avx2::multiply, block_avx2::round};

}  // namespace products
#endif
