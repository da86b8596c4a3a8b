// AMX beside AVX-512. To be included after all other headers, where HAS_AMX_LEVEL.
#include "targets/avx512.h"

#undef LEVEL
#define LEVEL amx
#pragma GCC target("amx-tile,amx-bf16,amx-int8")
