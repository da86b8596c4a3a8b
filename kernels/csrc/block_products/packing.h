// From the rows of a GGUF file, or of groups, to panels: the same bits in another order. A row of groups is laid out as
// one of Q4_1, with float32 scales and minima before 1, 2 or 4 blocks of quants.
#pragma once

#include <cstdint>

#include "block_products.h"

namespace products {

// A row of the file: bytes of the blocks that lie one after another, each of `source_inputs` inputs.
constexpr int source_inputs(Format format) { return kBlock * blocks_together(format); }
constexpr int source_bytes(Format format) {
    switch (format) {
        case Format::q8_0: return 34;
        case Format::q4_0: return 18;
        case Format::q4_1: return 20;
        case Format::q4_k: return 144;
        case Format::q6_k: return 210;
        case Format::g4_32: return 24;
        case Format::g4_64: return 40;
        case Format::g4_128: return 72;
        case Format::mxfp4: return 17;
    }
    return 0;
}

// One block (superblock) of the file, taken apart. Unused fields are 0.
struct SourceBlock {
    uint8_t quants[256];
    uint32_t scale, minimum;  // the bits of float16 or float32; of MXFP4 an exponent
    uint8_t scales[16], minima[8];
};

void take_apart(Format format, const uint8_t* from, SourceBlock& to);

// Into a superblock of a panel: what belongs to column `column` of `num_columns`.
void place(Format format, const SourceBlock& block, int column, int num_columns, char* superblock);

}  // namespace products
