// Attention over keys and values that lie in blocks: what the levels (instruction sets) have in common.
//
// Memory: blocks [num_blocks, num_layers, 2 (keys, values), block_size, kv_heads, head_dim], float32 or bfloat16; or int8,
// and behind the heads of each slot their scales [kv_heads] float32. With 1 in place of 2 the values are the keys.
// Query head h reads key head h / group. Scores, softmax and sums are float32. Nothing outside a context is read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged {

// Tokens of one step of the online softmax: those at positions kKeys * i and on.
constexpr int kKeys = 64;
// Tokens that are summed one tile after another, from a position kSection * i on; sections may be summed by several
// threads. A multiple of kKeys.
constexpr int64_t kSection = 512;
// Query rows whose scores are computed together, in registers.
constexpr int kRows = 6;
// Query rows (tokens x group) for which a tile of keys and values is packed once.
constexpr int kChunkRows = 192;

struct Shape {
    int kv_heads;  // that are computed: those from first_head on
    int group;
    int head_dim;
    int block_size;
    bool is_bfloat16;  // queries and results; the cache as well, unless it is int8
    bool is_int8;
    float scale;
    int slot_heads;  // key heads of a slot
    int first_head;
    float cap;  // scores are at most this, and near it only slowly rise: cap * tanh(score / cap); 0: they are as they are

    int num_heads() const { return kv_heads * group; }
    // Of one head of a query or a result.
    int64_t row_head_bytes() const { return int64_t(head_dim) * (is_bfloat16 ? 2 : 4); }
    // Of one head in the cache.
    int64_t head_bytes() const { return is_int8 ? head_dim : row_head_bytes(); }
    int64_t slot_bytes() const { return (head_bytes() + (is_int8 ? int64_t(sizeof(float)) : 0)) * slot_heads; }
    // Of a slot, those that are read.
    int64_t read_bytes() const { return kv_heads == slot_heads ? slot_bytes() : head_bytes() * kv_heads; }
    // Scores times this are powers of two.
    float exponent_scale() const { return scale * 1.44269504f; }
    // From the first computed head in a slot to the scale of this one.
    int64_t scale_offset(int kv_head) const {
        return head_bytes() * (slot_heads - first_head) + (first_head + kv_head) * int64_t(sizeof(float));
    }
    // Floats of one head's accumulator: head_dim, rounded up to what the widest level loads at once.
    int padded_dim() const { return (head_dim + 31) / 32 * 32; }
    // Floats of one head's part of a partial result: accumulator, maximum, sum.
    int partial_floats() const { return padded_dim() + 2; }
};

// What one call (one layer) reads and writes.
struct Call {
    const char* keys;  // of block 0
    const char* values;
    int64_t block_bytes;  // from a block to the next
    const char* queries;  // [rows, num_heads, head_dim]
    int64_t query_row_bytes;
    char* out;  // [rows, num_heads, head_dim]
    int64_t out_row_bytes;
    const float* sinks;  // [num_heads] exponents of two: what each head weighs beside its keys; null: nothing
};

// Tokens [first, last) of the context of one query row, of one section, over some key heads.
struct Piece {
    int64_t row;
    const int64_t* blocks;  // the sequence's block table
    int64_t first;
    int64_t last;
    bool is_reversed;  // token i of a block lies in slot block_size - 1 - i
    int64_t partial;  // where the partial result goes; -1: the piece is the whole context and goes to `out`
    int first_head;
    int num_heads;  // key heads
};

// Tokens of a chunk whose keys and values are in the blocks already, over one key head.
struct ChunkPiece {
    int64_t row;  // query row of the first token; the others follow
    int64_t num_tokens;
    int64_t position;  // of the first token: it reads positions up to its own
    int64_t window;    // 0, or how many of these it reads
    int64_t context;   // 0, or how many positions every token reads, those after its own too
    const int64_t* blocks;
    bool is_reversed;
    int kv_head;
    int64_t lowest;  // position that is read; of a window each token has its own
};

// Buffers of one thread. No class of the standard library here: what a level's source file instantiates
// of it would be compiled for that level's instructions, and the linker might keep that copy for all.
struct Scratch {
    float* queries;       // [rows, padded_dim]
    float* accumulators;  // [rows, padded_dim]
    float* sections;      // [rows, padded_dim]: sums of the sections that are complete
    float* keys;          // [padded_dim, kKeys]: a packed tile
    float* values;        // [kKeys, padded_dim]
    float* dots;          // [heads, dot_floats()]
    float* scores;        // [rows, kKeys]
    float* weights;       // [kRows, kKeys]
    float* maxima;        // [rows]
    float* sums;          // [rows]
    float* section_maxima;
    float* section_sums;

    // One row per head of a decoding token, or per token and head of a piece of a chunk.
    static size_t rows(const Shape& shape) {
        const size_t most = shape.num_heads() > kChunkRows ? shape.num_heads() : kChunkRows;
        return (most + 15) / 16 * 16;  // tiles have so many
    }
    // Of each head, what is to be summed of some scores, or its query once more.
    static size_t dot_floats(const Shape& shape) { return shape.padded_dim() > 512 ? shape.padded_dim() / 2 : 256; }
    static size_t floats(const Shape& shape) {
        const size_t padded = shape.padded_dim();
        return rows(shape) * (3 * padded + kKeys + 4) + 2 * kKeys * padded + kRows * kKeys + dot_floats(shape) * shape.num_heads() + 16;
    }
    static Scratch in(const Shape& shape, float* memory) {
        const size_t num_rows = rows(shape), padded = shape.padded_dim();
        Scratch scratch;
        scratch.queries = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        scratch.accumulators = scratch.queries + num_rows * padded;
        scratch.sections = scratch.accumulators + num_rows * padded;
        scratch.keys = scratch.sections + num_rows * padded;
        scratch.values = scratch.keys + kKeys * padded;
        scratch.weights = scratch.values + kKeys * padded;
        scratch.dots = scratch.weights + kRows * kKeys;
        scratch.scores = scratch.dots + dot_floats(shape) * shape.num_heads();
        scratch.maxima = scratch.scores + num_rows * kKeys;
        scratch.sums = scratch.maxima + num_rows;
        scratch.section_maxima = scratch.sums + num_rows;
        scratch.section_sums = scratch.section_maxima + num_rows;
        return scratch;
    }
};

struct Level {
    const char* name;
    bool (*is_supported)();
    // `next`: the piece that this thread takes next, whose first keys are fetched; or null.
    void (*decode_piece)(const Shape&, const Call&, const Piece&, const Piece* next, const Scratch&, float* partials);
    void (*chunk_piece)(const Shape&, const Call&, const ChunkPiece&, const Scratch&);
    // Merge `count` partial results that lie one after another, and write the row.
    void (*merge)(const Shape&, const Call&, int64_t row, const Scratch&, const float* partials, int64_t count);
};

}  // namespace paged
