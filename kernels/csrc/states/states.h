// Recurrent states, token by token: what the levels (instruction sets) have in common.
//
// All elements are float32. A state stays in the cache while the tokens of a chunk pass: it is read and written once a
// token and head, in the order of the tokens, so that a result does not depend on how a prompt was cut.
#pragma once

#include <cstddef>
#include <cstdint>

namespace states {

// The sequences of a pass. Part i ends with token row ends[i], and leaves its state in block targets[i].
struct Sequences {
    const int64_t* firsts;       // [sequences] first token row
    const int64_t* sources;      // [sequences] block of the state before it; negative: nothing is before
    const int64_t* first_parts;  // [sequences + 1]
    const int64_t* ends;         // [parts]
    const int64_t* targets;      // [parts]
};

// States of one layer: of block b at `first + b * block_bytes`, head by head.
struct Memory {
    char* first;
    int64_t block_bytes;
    int64_t head_floats;
};

// Mamba-2: of each head, state = decay * state + dt * b x^T, out = c^T state + skip * x. State [state_size, head_dim].
struct SpaceScan {
    const float* x;  // [tokens, heads * head_dim], rows `stride` apart, as those of b and c
    const float* b;  // [tokens, groups * state_size]
    const float* c;
    int64_t stride;
    const float* dt;     // [tokens, heads]
    const float* decay;  // [tokens, heads]
    const float* skip;   // [heads]
    float* out;          // [tokens, heads * head_dim]
    int64_t heads, head_dim, groups, state_size;  // head_dim: a multiple of 16
};

// The gated delta rule: state = decay * state, state += k (beta * (v - k^T state))^T, out = q^T state, with q and k of
// length 1, and q divided by the root of their width. State [key_dim, value_dim].
struct DeltaScan {
    const float* q;  // [tokens, key_heads * key_dim], rows `stride` apart, as those of k and v
    const float* k;
    const float* v;  // [tokens, heads * value_dim]
    int64_t stride;
    const float* beta;   // [tokens, heads]
    const float* decay;  // [tokens, heads]
    float* out;          // [tokens, heads * value_dim]
    int64_t heads, value_dim, key_heads, key_dim;  // both widths: multiples of 16; key_dim: at most kMostKeys
};

constexpr int64_t kMostKeys = 512;

// Before a recurrence: each channel of x with its last tokens, and the silu of that. Or, with gates, gate_behind times each
// channel of gate * x with its last tokens, every product rounded to the rows' elements.
struct Convolution {
    const char* x;            // [tokens, channels], float32 or bfloat16, as are gates and tails
    const char* gate;         // likewise, or null
    const char* gate_behind;  // likewise, or null; both or none
    int64_t row_bytes;        // from row to row of x and of gates
    const float* weight;      // [taps, channels]: the last row is a token's own
    const float* bias;        // [channels], or null
    char* tails;              // of block 0: the inputs before, [taps - 1, channels]
    int64_t tail_bytes;       // from block to block
    char* out;                // [tokens, channels]: of the rows' elements with gates, else float32
    int64_t channels;         // a multiple of 16
    int64_t taps;             // kLeastTaps to kMostTaps
    bool is_bfloat16;
};

constexpr int64_t kLeastTaps = 2, kMostTaps = 4;

// Behind one: results are multiplied by the silu of their gates, and groups of them normalised, before or after.
struct GatedRows {
    float* x;               // [rows, groups * width], overwritten
    const char* gates;      // likewise, float32 or bfloat16
    int64_t gate_row_bytes;
    const float* weight;    // [groups * width]; null: nothing is normalised
    char* out;              // [rows, groups * width], of the gates' elements
    int64_t groups, width;  // width: a multiple of 16
    float eps;
    bool gates_first, is_bfloat16;
};

struct Level {
    const char* name;
    bool (*is_supported)();
    // All tokens of one sequence, on one head.
    void (*scan_space)(const SpaceScan&, const Sequences&, const Memory&, int64_t sequence, int64_t head);
    void (*scan_delta)(const DeltaScan&, const Sequences&, const Memory&, int64_t sequence, int64_t head);
    // All tokens of one sequence, of channels [first, last).
    void (*convolve)(const Convolution&, const Sequences&, int64_t sequence, int64_t first, int64_t last);
    // Groups of rows, counted over all rows.
    void (*gate)(const GatedRows&, int64_t first, int64_t last);
    // x = x * sigmoid(x), of elements [first, last).
    void (*silu)(float* x, int64_t first, int64_t last);
};

}  // namespace states
