// Vectors of 16 bytes, which every x86-64 and ARM64 processor has. To be included after all other headers.
#include <cstring>
#include <type_traits>

#define LEVEL plain
#define WIDTH 4
#define HAS_BF16_DOT 0

static bool is_supported() { return true; }
