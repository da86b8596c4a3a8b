// Chunks: many query rows over tiles of keys and values that are packed once for all of them.
// Included after attention_level.h, once per level.

namespace paged {
namespace LEVEL {
namespace {

#include "attention_packing.h"

// Vectors beside one another in registers: kRows * kColumns sums, one row of factors.
constexpr int kColumns = WIDTH == 16 ? 4 : 2;

inline Floats everywhere(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return (Floats)(Words{} | bits);
}

template <Product kKind>
inline Floats multiply_add(Floats sum, Floats a, Floats b) {
#if HAS_BF16_DOT
    if constexpr (kKind == Product::bfloat16) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    if constexpr (kKind == Product::integers) return (Floats)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#endif
    return sum + a * b;
}

// sums[r][c] = the product of N rows of words, `stride` apart, with kBeside vectors of each of `steps` packed lines.
template <Product kKind, int N, int kBeside>
inline __attribute__((always_inline)) void outer_products(Floats (&sums)[N][kBeside], const float* rows, size_t stride,
                                                          const float* packed, size_t line, int steps) {
    for (int s = 0; s < steps; ++s) {
        Floats factors[kBeside];
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) factors[c] = load(packed + s * line + c * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) {
            const Floats word = everywhere(rows + r * stride + s);
#pragma GCC unroll 4
            for (int c = 0; c < kBeside; ++c) sums[r][c] = multiply_add<kKind>(sums[r][c], word, factors[c]);
        }
    }
}

// The same -> products[N, kKeys]. A function of its own, in which all sums stay in registers.
template <Product kKind, int N, int kBeside>
__attribute__((noinline)) void multiply_columns(const float* rows, size_t stride, const float* packed, size_t line,
                                                int steps, float* products) {
    Floats sums[N][kBeside] = {};
    outer_products<kKind>(sums, rows, stride, packed, line, steps);
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) store(products + r * kKeys + c * WIDTH, sums[r][c]);
}

// scores[N, kKeys], not yet scaled, of the first `count` keys at least.
template <Product kKind, int N>
inline void score_rows(const float* queries, size_t stride, const float* keys, int words, int count, float* scores) {
    int t = 0;
    for (; t + (kColumns - 1) * WIDTH < count; t += kColumns * WIDTH)
        multiply_columns<kKind, N, kColumns>(queries, stride, keys + t, kKeys, words, scores + t);
    for (; t + WIDTH < count; t += 2 * WIDTH)
        multiply_columns<kKind, N, 2>(queries, stride, keys + t, kKeys, words, scores + t);
    if (t < count) multiply_columns<kKind, N, 1>(queries, stride, keys + t, kKeys, words, scores + t);
}

template <Product kKind, int N, int kBeside>
inline void add_columns(const float* weights, const float* values, size_t line, int steps, float* accumulators,
                        size_t stride) {
    Floats sums[N][kBeside];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) sums[r][c] = load(accumulators + r * stride + c * WIDTH);
    outer_products<kKind>(sums, weights, kKeys, values, line, steps);
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) store(accumulators + r * stride + c * WIDTH, sums[r][c]);
}

// accumulators[N, dim] += weights[N, keys] * values
template <Product kKind, int N>
void add_rows(const float* weights, const float* values, int dim, int steps, float* accumulators, size_t stride) {
    const int columns = dim / WIDTH;
    int c = 0;
    for (; c + kColumns <= columns; c += kColumns)
        add_columns<kKind, N, kColumns>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
    for (; c + 2 <= columns; c += 2)
        add_columns<kKind, N, 2>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
    if (c < columns)
        add_columns<kKind, N, 1>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
}

// 2^x for x up to about 0, at least 2^-126. Relative error under 5e-5: less than what rounding to bfloat16 adds.
inline Floats power_of_two(Floats x) {
    x = larger(x, same(-126.0f));
    const Floats magic = same(12582912.0f);
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    Floats y = same(0.00961812910f);
    y = y * r + 0.0555041087f;
    y = y * r + 0.240226507f;
    y = y * r + 0.693147181f;
    y = y * r + 1.0f;
    return (Floats)((Ints)y + (((Ints)shifted) << 23));
}

// Two vectors of weights relative to `maximum`; returns their sum, NaN where a score is not finite.
template <int kDepth>
inline Floats soften_two(const float* scores, float scale, float maximum, float* weights) {
    const Floats first = load(scores), second = load(scores + WIDTH);
    const Floats remainders = (first - first) + (second - second);
#if HAS_BF16_DOT
    if constexpr (kDepth == 2) {
        const Floats factor = same(scale * 1.44269504f), shift = same(maximum * 1.44269504f);
        const Floats a = power_of_two(first * factor - shift);
        const Floats b = power_of_two(second * factor - shift);
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(weights, &pairs, sizeof pairs);
        return a + b + remainders;
    }
#endif
    const Floats a = exponential(first * scale - maximum);
    const Floats b = exponential(second * scale - maximum);
    store(weights, a);
    store(weights + WIDTH, b);
    return a + b + remainders;
}

// One row: scores -> weights, `count` of them (a multiple of two vectors); corrects what was summed before.
template <int kDepth>
inline void soften_row(const float* scores, int count, float scale, float* weights, float* maximum, float* sum,
                       float* accumulator, int dim) {
    Floats high = load(scores);
    for (int t = WIDTH; t < count; t += WIDTH) high = larger(high, load(scores + t));
    const float most = highest(high) * scale;
    if (most > *maximum) {
        const float correction = exponential_of(*maximum - most);
        *maximum = most;
        *sum *= correction;
        for (int d = 0; d < dim; d += WIDTH) store(accumulator + d, load(accumulator + d) * correction);
    }
    Floats sums{};
    for (int t = 0; t < count; t += 2 * WIDTH)
        sums += soften_two<kDepth>(scores + t, scale, *maximum, weights + t / kDepth);
    *sum += total(sums);
}

// Only scores [first, last) of `count` stay.
inline void hide(float* scores, int first, int last, int count) {
    for (int t = 0; t < first; ++t) scores[t] = kLowest;
    for (int t = last; t < count; ++t) scores[t] = kLowest;
}

// Query rows of one key head, `group` for each token; the token of row 0 has this position.
struct QueryRows {
    int first;  // scratch row
    int count;
    int group;
    int64_t position;
    int64_t window;
};

// A packed tile of keys first, first + 1, ...
struct Tile {
    int64_t first;
    int count;
};

// Keys of the tile that the last of `n` rows from `at` on reads; 0: none of them reads any.
inline int visible_keys(const QueryRows& rows, int at, int n, const Tile& tile) {
    const int64_t latest = rows.position + (at + n - 1) / rows.group, earliest = rows.position + at / rows.group;
    if (latest < tile.first) return 0;
    if (rows.window && tile.first + tile.count <= earliest - rows.window + 1) return 0;
    return latest - tile.first + 1 < tile.count ? int(latest - tile.first + 1) : tile.count;
}

// Keys [first, last) of the `count` visible ones, those that one row reads; `first` is at most `limit`.
struct Span {
    int first, last;

    Span(const QueryRows& rows, int row, const Tile& tile, int count, int limit) {
        const int64_t position = rows.position + row / rows.group - tile.first;  // relative to the tile
        const int64_t lowest = rows.window ? position - rows.window + 1 : 0;
        last = position + 1 < count ? int(position + 1) : count;
        first = lowest <= 0 ? 0 : lowest < limit ? int(lowest) : limit;
    }
};

template <typename Type, int N>
void attend_rows(const Shape& shape, const Scratch& scratch, const QueryRows& rows, int at, const Tile& tile) {
    const int count = visible_keys(rows, at, N, tile);
    if (!count) return;
    const int dim = value_dim<Type>(shape);
    const size_t padded = shape.padded_dim(), own = rows.first + at;
    score_rows<kProduct<Type>, N>(scratch.queries + own * padded, padded, scratch.keys, words_of<Type>(shape), count,
                                  scratch.scores);
    const int softened = (count + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH);
    for (int r = 0; r < N; ++r) {
        const Span span(rows, at + r, tile, count, softened);
        float* scores = scratch.scores + r * kKeys;
        if (span.first >= span.last) {
            std::memset(scratch.weights + r * kKeys, 0, kKeys * sizeof(float));
            continue;
        }
        if (span.first > 0 || span.last < softened) hide(scores, span.first, span.last, softened);
        soften_row<kDepth<Type>>(scores, softened, shape.scale, scratch.weights + r * kKeys, &scratch.maxima[own + r],
                                 &scratch.sums[own + r], scratch.accumulators + (own + r) * padded, dim);
    }
    add_rows<kProduct<Type>, N>(scratch.weights, scratch.values, dim, (count + kDepth<Type> - 1) / kDepth<Type>,
                                scratch.accumulators + own * padded, padded);
}

// Tiles of keys and values as rows of this type are multiplied.
template <typename Type, typename Source = Stored<Type>>
struct PackedTiles {
    static constexpr bool kHasScales = Source::kHasScales;

    static inline void begin(const Shape&, const Scratch&, int) {}
    static inline Tile packed(const Shape& shape, const Call& call, const Scratch& scratch, int kv_head,
                              const int64_t* offsets, int64_t first, int count) {
        const int64_t head = kv_head * shape.head_bytes(), scale = shape.scale_offset(kv_head);
        pack_keys<Type, Source>(shape, call.keys + head, call.keys + scale, offsets, count, scratch.keys);
        pack_values<Type, Source>(shape, call.values + head, call.values + scale, offsets, count, scratch.values);
        return {first, count};
    }
};

#if HAS_BF16_DOT
#include "attention_int8_chunks.h"
#endif

// All rows over one packed tile, in runs of at most kRows and about equal length.
template <typename Type, typename AnyTile>
inline void attend_tile(const Shape& shape, const Scratch& scratch, const QueryRows& rows, const AnyTile& tile) {
    const int runs = (rows.count + kRows - 1) / kRows;
    for (int run = 0; run < runs; ++run) {
        const int at = rows.count * run / runs;
        switch (rows.count * (run + 1) / runs - at) {
            case 1: attend_rows<Type, 1>(shape, scratch, rows, at, tile); break;
            case 2: attend_rows<Type, 2>(shape, scratch, rows, at, tile); break;
            case 3: attend_rows<Type, 3>(shape, scratch, rows, at, tile); break;
            case 4: attend_rows<Type, 4>(shape, scratch, rows, at, tile); break;
            case 5: attend_rows<Type, 5>(shape, scratch, rows, at, tile); break;
            default: attend_rows<Type, 6>(shape, scratch, rows, at, tile); break;
        }
    }
}

// The first `bytes` of each slot's keys and values, from `head` on, will be read soon.
inline void prefetch_slots(const Call& call, int64_t head, int64_t bytes, const int64_t* offsets, int count) {
    for (int t = 0; t < count; ++t) {
        prefetch(call.keys + head + offsets[t], bytes);
        prefetch(call.values + head + offsets[t], bytes);
    }
}

template <typename Type, typename Tiles = PackedTiles<Type>>
void chunk_typed(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const int64_t head_bytes = shape.head_bytes(), head = piece.kv_head * head_bytes;
    const int64_t row_bytes = shape.row_head_bytes() * shape.group, query = piece.kv_head * row_bytes;
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        prefetch(call.queries + (piece.row + i) * call.query_row_bytes + query, row_bytes);
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        begin_rows<Type>(shape, scratch, int(i) * shape.group, shape.group,
                         call.queries + (piece.row + i) * call.query_row_bytes + query);
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        for (int64_t at = 0; at < row_bytes; at += 64)
            __builtin_prefetch(call.out + (piece.row + i) * call.out_row_bytes + query + at, 1);
    Tiles::begin(shape, scratch, int(piece.num_tokens) * shape.group);
    const QueryRows rows = {0, int(piece.num_tokens) * shape.group, shape.group, piece.position, piece.window};
    const int64_t last = piece.position + piece.num_tokens;
    int64_t first = piece.window ? piece.position - piece.window + 1 : 0;
    if (first < 0) first = 0;
    int64_t offsets[kKeys];
    int count = slot_offsets<kKeys>(shape, call, piece.blocks, first, last, offsets);
    while (count) {
        const auto tile = Tiles::packed(shape, call, scratch, piece.kv_head, offsets, first, count);
        first += kKeys;
        count = slot_offsets<kKeys>(shape, call, piece.blocks, first, last, offsets);
        prefetch_slots(call, head, head_bytes, offsets, count);
        if constexpr (Tiles::kHasScales) prefetch_slots(call, shape.scale_offset(piece.kv_head), 1, offsets, count);
        attend_tile<Type>(shape, scratch, rows, tile);
    }
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        write_rows<Type>(shape, scratch, int(i) * shape.group, shape.group,
                         call.out + (piece.row + i) * call.out_row_bytes + query);
}

template <typename Type>
inline void decode_any(const Shape& shape, const Call& call, const Piece& piece, const Piece* next,
                       const Scratch& scratch, float* partials) {
    // Where every query head has keys of its own, memory is the limit, and slots are read one after another; where heads
    // share keys, arithmetic is, and each query is loaded once for several tokens.
    constexpr int kMore = WIDTH < 8 ? WIDTH : 8;
    const auto decode = shape.group == 1 ? decode_typed<Type, 1> : decode_typed<Type, kMore>;
    decode(shape, call, piece, next, scratch, partials);
}

#if HAS_BF16_DOT
#include "attention_int8_decode.h"
#else
template <typename Type>
inline void decode_int8(const Shape& shape, const Call& call, const Piece& piece, const Piece* next,
                        const Scratch& scratch, float* partials) {
    decode_any<Int8<Type>>(shape, call, piece, next, scratch, partials);
}
#endif

void decode_piece(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                  float* partials) {
    const auto decode = shape.is_int8 ? shape.is_bfloat16 ? decode_int8<NaturalBFloat16> : decode_int8<Float32>
                        : shape.is_bfloat16 ? decode_any<BFloat16> : decode_any<Float32>;
    decode(shape, call, piece, next, scratch, partials);
}

template <typename Type>
inline void chunk_int8(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
#if HAS_BF16_DOT
    // In bfloat16, whose products are as fast, scaling every key and value once is less work than scaling every score.
    if constexpr (Type::kVectors == 1)
        if (shape.head_dim <= kWidestIntegerHead) return chunk_typed<Type, IntegerTiles>(shape, call, piece, scratch);
#endif
    chunk_typed<Type, PackedTiles<Type, StoredInt8<Type>>>(shape, call, piece, scratch);
}

void chunk_piece(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const auto chunk = shape.is_bfloat16 ? shape.is_int8 ? chunk_int8<BFloat16> : chunk_typed<BFloat16>
                       : shape.is_int8 ? chunk_int8<Float32> : chunk_typed<Float32>;
    chunk(shape, call, piece, scratch);
}

void merge(const Shape& shape, const Call& call, int64_t row, const Scratch& scratch, const float* partials, int64_t count) {
    const auto merge_rows = shape.is_bfloat16 ? shape.is_int8 ? merge_typed<NaturalBFloat16> : merge_typed<BFloat16>
                            : merge_typed<Float32>;
    merge_rows(shape, call, row, scratch, partials, count);
}

}  // namespace
}  // namespace LEVEL
}  // namespace paged
