// Products x @ weight.T with weights in the blocks of GGUF files, or in groups of 4 bits: what the levels (instruction
// sets) have in common.
//
// A row of weights is cut into blocks of 32 inputs (16 in Q6_K, two of which are taken together). In a block
//   weight = scale * quant + minimum        quant: an unsigned integer of 4, 6 or 8 bits
// Formats without minima have them implied: Q4_0 and Q6_K subtract 8 and 32 from a quant, Q8_0's are stored plus 128.
// MXFP4's 4 bits are the number of one of 16 quants, 0 to 24, from which 12 are subtracted: twice a float of 4 bits.
// In the K formats scale and minimum are integers of a block times a float16 of a superblock of 8 blocks. The G formats
// have float32 scales and minima, which hold the products of float16 scales and zero points exactly: G4_32 for every
// block, G4_64 for every 2, G4_128 for every 4.
//
// Inputs are rounded to 8 bits, each block of 32 of a row by a scale of its own. Then
//   out = sum over blocks of (sum of quant * input) * scale * input scale + minimum * (sum of inputs) * input scale
// with the inner sums exact (32-bit integers). A row's sums are formed in the same order whatever shares its batch.
//
// Layout: panels of two vectors of columns, as products.h has them. In a panel, superblock after superblock (without
// superblocks, block after block), each value once per column:
//   head    scales, then minima where the format has them, float16 (G formats: float32; MXFP4: a power of two, one byte)
//   blocks  integer scales and minima of the K formats, one byte each; then the quants:
//           8 bits   8 steps of one word of 4 consecutive inputs per column
//           4 bits   4 words per column, the low halves of whose bytes are one step, the high halves the next
//           6 bits   the low 4 bits likewise; then 2 words whose bytes hold the high 2 bits of 4 steps, lowest first
#pragma once

#include <cstddef>
#include <cstdint>

#include "products.h"

// Older compilers do not know its instructions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HAS_AVXVNNI_LEVEL 1
#else
#define HAS_AVXVNNI_LEVEL 0
#endif

namespace products {

enum class Format { q8_0, q4_0, q4_1, q4_k, q6_k, g4_32, g4_64, g4_128, mxfp4 };

constexpr int kBlock = 32;      // inputs
constexpr int kSteps = 8;       // of 4 inputs, in a block
constexpr int kMaxBlockRows = 112;  // that are multiplied by a block at a time: their sums stay in the first cache

constexpr bool has_small_scales(Format format) { return format == Format::q4_k || format == Format::q6_k; }
constexpr bool has_groups(Format format) {
    return format == Format::g4_32 || format == Format::g4_64 || format == Format::g4_128;
}
constexpr bool has_minima(Format format) {
    return format == Format::q4_1 || format == Format::q4_k || has_groups(format);
}
constexpr int blocks_together(Format format) {
    return has_small_scales(format) ? 8 : format == Format::g4_128 ? 4 : format == Format::g4_64 ? 2 : 1;
}
constexpr int scales_per_block(Format format) { return format == Format::q6_k ? 2 : 1; }
constexpr int quant_bits(Format format) { return format == Format::q8_0 ? 8 : format == Format::q6_k ? 6 : 4; }

// What was added to make quants unsigned.
constexpr int quant_offset(Format format) {
    return format == Format::q8_0    ? 128
           : format == Format::q6_k  ? 32
           : format == Format::mxfp4 ? 12
           : format == Format::q4_0  ? 8
                                     : 0;
}

// Bytes per column.
constexpr int scale_bytes(Format format) { return has_groups(format) ? 4 : format == Format::mxfp4 ? 1 : 2; }
constexpr int head_bytes(Format format) { return scale_bytes(format) * (has_minima(format) ? 2 : 1); }
constexpr int small_scale_bytes(Format format) { return has_small_scales(format) ? 2 : 0; }
constexpr int block_bytes(Format format) { return small_scale_bytes(format) + kBlock * quant_bits(format) / 8; }
constexpr int superblock_bytes(Format format) {
    return head_bytes(format) + blocks_together(format) * block_bytes(format);
}

struct BlockWeights {
    const char* panels;
    const float* bias;  // one per packed column, 0 where there is none
    int64_t num_blocks;  // of a row
    int64_t panel_bytes;
    int64_t out_width;
    Format format;
    Activation activation;
    bool is_gated;
};

// Block of one row of inputs, rounded.
struct InputBlock {
    int8_t values[kBlock];
    float scale;
    float scaled_sum;   // of the values
    int32_t starts[2];  // of each half: its sum times -quant_offset; with one scale per block, the first is of all
};

struct BlockCall {
    const InputBlock* inputs;  // [num_blocks, num_rows]
    int64_t num_rows;
    char* out;
    int64_t out_row_bytes;
    bool is_out_bfloat16;
    Addends addends{};
};

struct BlockPart {
    int64_t first, last;  // rows, kMaxBlockRows at most
    int64_t panel;
};

// x [rows, num_blocks * 32] float32 or bfloat16 -> InputBlock [num_blocks, num_rows]
struct BlockRounding {
    const char* x;
    int64_t x_row_bytes;
    int64_t num_rows, num_blocks;
    bool is_bfloat16;
    Format format;
    InputBlock* out;
};

struct BlockLevel {
    const char* name;
    bool (*is_supported)();
    int width;  // columns of a vector
    void (*multiply)(const BlockWeights&, const BlockCall&, const BlockPart&);
    void (*round)(const BlockRounding&, int64_t first, int64_t last);  // these rows
};

}  // namespace products
