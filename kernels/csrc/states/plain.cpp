// Vectors of 16 bytes, which every x86-64 and ARM64 processor has.
#include "states.h"

#include <cstring>

#define LEVEL plain
#define WIDTH 4
#define HAS_BF16_DOT 0
#include "level.h"
#include "ends_level.h"

namespace states {

static bool always() { return true; }

extern const Level plain_level = {"plain",          always, plain::scan_space, plain::scan_delta,
                                  plain::convolve, plain::gate,   plain::silu};

}  // namespace states
