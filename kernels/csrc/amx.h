// Where tiles (AMX) are compiled, and whether this machine has them.
#pragma once

// Older compilers do not know the instructions for tiles.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 && defined(__linux__)
#define HAS_AMX_LEVEL 1
#else
#define HAS_AMX_LEVEL 0
#endif

namespace processor {

// Whether the processor has tiles of bfloat16 and int8 and the vectors that go with them, and the system keeps the tiles of
// this process and its children, for which it asks once.
bool has_tiles();

}  // namespace processor
