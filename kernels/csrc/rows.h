// Operations on the rows of activations, each in one pass: what the levels (instruction sets) have in common.
//
// Elements are float32 or bfloat16; arithmetic is float32. Rows lie `..._row_bytes` apart.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rows {

// out = normalised(x), or, with `residual`: residual += x first, and out = normalised(residual).
struct Norm {
    const float* weight;  // [width]
    const float* bias;    // [width], or null
    int64_t width;
    float eps;
    bool is_rms;  // no mean is subtracted, and there is no bias
    bool is_bfloat16;  // the rows; weight and bias are float32

    // Floats of scratch memory per thread.
    size_t scratch_floats() const { return size_t(width + 15) / 16 * 16; }
};

struct NormRows {
    const char* x;
    int64_t x_row_bytes;
    char* residual;  // or null
    int64_t residual_row_bytes;
    char* out;
    int64_t out_row_bytes;
};

enum class Gate { silu, gelu_tanh };

// gates_and_ups [rows, 2 * width], gates first -> out [rows, width] = activation(gate) * up
struct GateRows {
    const char* gates_and_ups;
    char* out;
    int64_t width;
    Gate gate;
    bool is_bfloat16;
};

// Rows of queries, keys and values side by side: queries and keys are rotated in place, then keys and values copied
// into the slots of the cache, or rounded to int8: the heads of a slot, then the scale of each (float32). The scale of a
// head that is not finite is NaN.
struct HeadRows {
    char* heads;  // [rows, (num_heads + 2 * kv_heads) * head_dim]
    int64_t row_bytes;
    int64_t num_heads, kv_heads, head_dim;
    const float* cos;  // [rows, half]; null: nothing is rotated
    const float* sin;
    int64_t half;          // element i < half is rotated with element half + i
    const int64_t* slots;  // [rows]
    char* keys;            // of slot 0
    char* values;
    bool is_bfloat16;
    bool is_int8;  // the cache
};

// x [rows, width] -> the first index of the highest element, and the element; NaN where the row holds one.
struct HighestRows {
    const char* x;
    int64_t row_bytes;
    int64_t width;
    int64_t* indices;  // [rows]
    float* values;     // [rows]
    bool is_bfloat16;
};

// Columns of x that are noted at a time, at most.
constexpr int64_t kChunkColumns = 32;

// x [num_rows, count] at `first_column` of wider rows: compared, lane by lane, with the highest that was noted before. A
// NaN stays.
struct HighestChunk {
    const char* x;
    int64_t row_bytes;
    int64_t num_rows;
    int64_t count;
    int32_t first_column;
    bool is_bfloat16;
    float* values;     // [num_rows, kChunkColumns]
    int32_t* columns;  // [num_rows, kChunkColumns] the first_column that the value came with: the first of equals
};

// Each works on rows [first, last), but for the last.
struct Level {
    const char* name;
    bool (*is_supported)();
    void (*normalise)(const Norm&, const NormRows&, float* scratch, int64_t first, int64_t last);
    void (*gate)(const GateRows&, int64_t first, int64_t last);
    void (*place)(const HeadRows&, int64_t first, int64_t last);
    void (*highest)(const HighestRows&, int64_t first, int64_t last);
    void (*note_highest)(const HighestChunk&);
};

}  // namespace rows
