// Rows, adapters and states, for every processor.
#include "lora/lora.h"
#include "rows.h"
#include "states/states.h"
#include "targets/plain.h"
#include "lora/level.h"
#include "rows_level.h"
#include "states/level.h"
#include "states/ends_level.h"

namespace rows {

extern const Level plain_level = {"plain", is_supported, plain::normalise, plain::gate,
                                 plain::place, plain::highest, plain::note_highest};

}  // namespace rows

namespace lora {

extern const Level plain_level = {"plain", WIDTH, is_supported, plain::shrink, plain::expand};

}  // namespace lora

namespace states {

extern const Level plain_level = {"plain", is_supported, plain::scan_space, plain::scan_delta,
                                 plain::convolve, plain::gate, plain::silu};

}  // namespace states
