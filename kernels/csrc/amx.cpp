// Whether this machine has tiles. Compiled for every processor.
#include "amx.h"

#if HAS_AMX_LEVEL
#include <sys/syscall.h>
#include <unistd.h>

namespace processor {

// The system keeps the tiles of threads that pause for processes that have asked for that, once, for all their threads
// and children.
static bool has_permission() {
    constexpr long kAsk = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}

bool has_tiles() {
    static const bool has =
        __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
        __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_permission();
    return has;
}

}  // namespace processor
#endif
