// Low-rank products of adapters over groups of rows: what the levels (instruction sets) have in common.
//
// An adapter adds B (A x) to a product's results. Both matrices are packed in *panels* of one vector of columns, input
// after input: A of all modules that read one input side by side, B of each by itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lora {

constexpr int kRows = 4;     // that are multiplied at a time, at most
constexpr int kVectors = 4;  // of columns of B likewise

// Rows by one vector of A's columns: float32 or bfloat16 inputs -> float32.
struct Shrink {
    const char* const* x;  // [num_rows]
    bool is_bfloat16;
    int64_t in_width;
    const float* panel;  // [in_width, WIDTH]
    float* const* out;   // [num_rows]
};

// Rows by columns of one module's B -> as many results of each row.
struct Expand {
    const float* const* x;  // [num_rows]
    int64_t rank;           // 0: the results are zeros
    const float* panels;    // [vectors of columns, rank, WIDTH]
    int64_t num_columns;
    float* const* out;  // [num_rows]
};

struct Level {
    const char* name;
    int width;  // columns of a vector
    bool (*is_supported)();
    // Of kRows rows at most.
    void (*shrink)(const Shrink&, int num_rows);
    void (*expand)(const Expand&, int num_rows);
};

}  // namespace lora
