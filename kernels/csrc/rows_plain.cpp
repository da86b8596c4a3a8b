// Vectors of 16 bytes, which every x86-64 and ARM64 processor has.
#include "rows.h"

#include <cstring>

#define LEVEL plain
#define WIDTH 4
#define HAS_BF16_DOT 0
#include "rows_level.h"

namespace rows {

static bool always() { return true; }

extern const Level plain_level = {"plain",     always,       plain::normalise,
                                  plain::gate, plain::place, plain::highest, plain::note_highest};

}  // namespace rows
