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

struct Level {
    const char* name;
    bool (*is_supported)();
    // All tokens of one sequence, on one head.
    void (*scan_space)(const SpaceScan&, const Sequences&, const Memory&, int64_t sequence, int64_t head);
    void (*scan_delta)(const DeltaScan&, const Sequences&, const Memory&, int64_t sequence, int64_t head);
    // x = x * sigmoid(x), of elements [first, last).
    void (*silu)(float* x, int64_t first, int64_t last);
};

}  // namespace states
