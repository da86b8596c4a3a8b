// Rows, adapters, states and products with AVX2: bfloat16 is multiplied as float32, int8 as integers of 16 bits.
#include "lora/lora.h"
#include "products.h"
#include "rows.h"
#include "states/states.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "targets/avx2.h"
#define MAX_ROWS 6
#include "lora/level.h"
#include "rows_level.h"
#include "states/level.h"
#include "states/ends_level.h"
#include "products_level.h"
#include "weight_level.h"

namespace rows {

extern const Level avx2_level = {"avx2", is_supported, avx2::normalise, avx2::gate,
                                 avx2::place, avx2::highest, avx2::note_highest};

}  // namespace rows

namespace lora {

extern const Level avx2_level = {"avx2", WIDTH, is_supported, avx2::shrink, avx2::expand};

}  // namespace lora

namespace states {

extern const Level avx2_level = {"avx2", is_supported, avx2::scan_space, avx2::scan_delta,
                                 avx2::convolve, avx2::gate, avx2::silu};

}  // namespace states

namespace products {

static bool is_level(Element) { return is_supported(); }

extern const Level avx2_level = {"avx2", is_level, WIDTH, MAX_ROWS, 1, avx2::multiply,
                                 avx2::round, avx2::interleave, avx2::convert};

}  // namespace products
#endif
