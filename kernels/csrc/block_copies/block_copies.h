// Copies of listed blocks with a digest of each, in one pass: what the levels (instruction sets) have in common.
//
// The digest of a block is its XXH3 of 64 bits without a seed (Yann Collet, https://xxhash.com), of at least
// kLeastBytes: a shorter block is summed as if zeros followed it. Every byte of the source is read once, so a digest is
// of exactly the bytes that were written, whoever writes to the source meanwhile.
#pragma once

#include <cstdint>

namespace block_copies {

constexpr int64_t kLeastBytes = 256;

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
