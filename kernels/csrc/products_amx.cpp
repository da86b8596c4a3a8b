// AMX: tiles of bfloat16 and int8, on processors and under systems that have them.
#include "products.h"

#if HAS_AMX_LEVEL
#include <sys/syscall.h>
#include <unistd.h>

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

// The system keeps the tiles of threads that pause for processes that have asked for that, once, for all their threads
// and children.
static bool has_permission() {
    constexpr long kAsk = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}

static bool has_tiles() {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           has_permission();
}

static bool is_supported(Element element) {
    static const bool has = has_tiles();
    return element != Element::float32 && has;
}

extern const Level amx_level = {"amx",      is_supported,    WIDTH,       amx::kMostRows, amx::kTileSteps, amx::multiply,
                               amx::round, amx::interleave, amx::convert};

}  // namespace products
#endif
