// Copies of listed blocks with a digest of each, in one pass: what the levels (instruction sets) have in common.
//
// kernels/cpu/row_digest.py has the rules of a digest. Every byte of the source is read once, so a digest is of exactly
// the bytes that were written, whoever writes to the source meanwhile.
#pragma once

#include <cstdint>

namespace block_copies {

constexpr int64_t kPartBytes = 16 << 10;  // a multiple of 64, as blocks that are streamed
constexpr int64_t kLeastBytes = 256;      // of a part, that are summed

// How a block is written.
enum class Stores {
    none,      // not at all: it is only summed
    cached,    // as usual: it is soon read again
    streamed,  // past the caches, without first reading what is overwritten; at addresses that are multiples of 64
};

struct Block {
    const char* source;
    char* target;
    int64_t bytes;
    const char* next;  // the source of the block that follows; it is fetched ahead
};

struct Level {
    const char* name;
    bool (*is_supported)();
    uint64_t (*copy_and_sum)(const Block&, Stores);
    void (*copy)(const Block&, Stores);
    void (*finish)();  // makes streamed blocks visible to other cores; once, after the last
};

}  // namespace block_copies
