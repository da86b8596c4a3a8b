// Rows, adapters, states and products with AVX-512.
#include "lora/lora.h"
#include "products.h"
#include "rows.h"
#include "states/states.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "targets/avx512.h"
#define MAX_ROWS 14
#include "lora/level.h"
#include "rows_level.h"
#include "states/level.h"
#include "states/ends_level.h"
#include "products_level.h"
#include "weight_level.h"

namespace rows {

extern const Level avx512_level = {"avx512bf16", is_supported, avx512::normalise, avx512::gate,
                                 avx512::place, avx512::highest, avx512::note_highest};

}  // namespace rows

namespace lora {

extern const Level avx512_level = {"avx512bf16", WIDTH, is_supported, avx512::shrink, avx512::expand};

}  // namespace lora

namespace states {

extern const Level avx512_level = {"avx512bf16", is_supported, avx512::scan_space, avx512::scan_delta,
                                 avx512::convolve, avx512::gate, avx512::silu};

}  // namespace states

namespace products {

static bool is_level(Element) { return is_supported(); }

extern const Level avx512_level = {"avx512bf16", is_level, WIDTH, MAX_ROWS, 1, avx512::multiply,
                                 avx512::round, avx512::interleave, avx512::convert};

}  // namespace products
#endif
