// Matrix products x @ weight.T with packed weights: what the levels (instruction sets) have in common.
//
// x is [rows, in_width], row-major, rows `..._row_bytes` apart. A weight [columns, in_width] is packed in *panels* of two
// vectors of columns. A panel is one run of memory: step after step over in_width, and in a step, for each of the two
// vectors, one word of 4 bytes per column. The word holds 1 float32, 2 bfloat16 or 4 int8 of consecutive inputs, which
// is what one multiply-add instruction takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "amx.h"

namespace products {

enum class Element { float32, bfloat16, int8 };  // of the packed weight

enum class Numbers { float32, bfloat16, float16, int8 };  // of a weight as it comes

// clamped_silu: of gates alone, which it cuts at 7; the ups, cut at -7 and 7, count 1 more (gpt-oss).
enum class Activation { none, relu, relu2, silu, gelu, gelu_tanh, clamped_silu };

struct Weights {
    const char* panels;
    const float* bias;            // one per packed column, 0 where there is none
    const float* column_scales;   // int8: likewise, of a step of 1
    const int32_t* column_sums;   // int8: likewise, the sum of the column's weights
    int64_t num_panels;
    int64_t num_words;            // of an input row that may be read
    int64_t num_steps;            // of a panel: as many, and more that hold zeros where a level takes several at once
    int64_t out_width;
    Element element;
    Activation activation;
    bool is_gated;  // the first vector of a panel holds gates, the second their ups: out = activation(gate) * up
};

// Numbers that are added to the sums of some rows, before the nonlinearity. Where the others have none, their results are
// the same to the bit. Of a row of them only those of the product's own columns are read.
struct Addends {
    const float* values;    // [rows with addends]
    int64_t stride;         // between these, in elements
    int64_t up_column;      // of the first up, where there are gates
    const int64_t* of_row;  // [rows] which of `values` is a row's own, or -1; null: no row has any
};

// Inputs are of the weight's element; of int8: rounded(input / scale) + 128, unsigned.
struct Call {
    const char* x;
    int64_t x_row_bytes;
    const float* row_scales;  // int8: [rows]
    char* out;
    int64_t out_row_bytes;
    bool is_out_bfloat16;
    Addends addends{};
};

// Rows [first, last) by one panel. `next` is read soon after: the panel that this thread is likely to take next.
struct Part {
    int64_t first, last;
    int64_t panel;
    const char* next;
};

// x [rows, width] float32 or bfloat16 -> the rounded inputs of int8, with `row_bytes` per row, 128 behind the last.
struct Rounding {
    const char* x;
    int64_t x_row_bytes;
    int64_t width;
    bool is_bfloat16;
    uint8_t* out;
    int64_t row_bytes;
    float* row_scales;
};

constexpr int kVectors = 2;  // of columns in a panel

// Rows a multiple of this apart, as those of most models are, share one set of the first cache, and push one another
// out. More than so many lie this much further apart.
constexpr int64_t kSetBytes = 4096, kRowsInPlace = 16, kApartBytes = 192;

constexpr int64_t apart(int64_t row_bytes, int64_t num_rows) {
    return num_rows > kRowsInPlace && row_bytes % kSetBytes == 0 ? row_bytes + kApartBytes : row_bytes;
}

struct Level {
    const char* name;
    bool (*is_supported)(Element);
    int width;      // columns of a vector
    int max_rows;   // rows that are multiplied at a time
    int steps;      // that it takes at once: those of a panel are a multiple
    void (*multiply)(const Weights&, const Call&, const Part&);
    void (*round)(const Rounding&, int64_t first, int64_t last);
    // Packs `num_steps` words each of as many rows as a vector is wide, as one vector of a panel's steps.
    void (*interleave)(const char* const* rows, int64_t num_steps, char* words);
    // Floats of one format into another: float32, or bfloat16 (to nearest, ties to even).
    void (*convert)(const char* from, Numbers, int64_t count, Numbers wanted, char* to);
};

}  // namespace products
