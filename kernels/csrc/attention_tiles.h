// Tiles of keys and values packed for many query rows: of chunks.
// Included after attention_level.h, once per level.
//
// Products run over words of 32 bits: a float, or (where a bfloat16 dot product exists) a pair of bfloat16. Keys are
// packed as [word of the head][key], values as [key, or pair of keys][dimension], so that both products are sums of
// outer products: a vector of keys or dimensions times one word of each of kRows query rows, all sums in registers.

namespace paged {
namespace LEVEL {
namespace {

// Vectors beside one another in registers: kRows * kColumns sums, one row of factors.
constexpr int kColumns = WIDTH == 16 ? 4 : 2;

// Elements of a word.
template <typename Type>
constexpr int kDepth = HAS_BF16_DOT && Type::kVectors == 2 ? 2 : 1;

// Words of one head as queries and keys are multiplied.
template <typename Type>
inline int words_of(const Shape& shape) {
    if (kDepth<Type> == 2) return (shape.head_dim + 1) / 2;
    return Type::kVectors == 1 ? shape.head_dim : (shape.head_dim + Type::kElements - 1) / Type::kElements * Type::kElements;
}

// Dimensions of one head as values are summed: whole units.
template <typename Type>
inline int value_dim(const Shape& shape) {
    return (shape.head_dim + Type::kElements - 1) / Type::kElements * Type::kElements;
}

inline Floats everywhere(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return (Floats)(Words{} | bits);
}

template <int kDepth>
inline Floats multiply_add(Floats sum, Floats a, Floats b) {
#if HAS_BF16_DOT
    if constexpr (kDepth == 2) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return sum + a * b;
}

// Exchange the upper right and the lower left quarter of every square of 2 * DISTANCE words.
#define LIST(...) __VA_ARGS__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define STAGE(x, DISTANCE, UPPER, LOWER)                          \
    _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; ++i) if (!(i & DISTANCE)) { \
        const Floats a = x[i], b = x[i + DISTANCE];               \
        x[i] = SHUFFLED(a, b, UPPER);                             \
        x[i + DISTANCE] = SHUFFLED(a, b, LOWER);                  \
    }

inline __attribute__((always_inline)) void transpose(Floats* x) {
#if WIDTH == 16
    STAGE(x, 1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    STAGE(x, 2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    STAGE(x, 4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    STAGE(x, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif WIDTH == 8
    STAGE(x, 1, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))
    STAGE(x, 2, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
    STAGE(x, 4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#else
    STAGE(x, 1, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))
    STAGE(x, 2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#endif
}

// The scale of what lies in this slot; 1 where the cache has none.
template <typename Source>
inline float scale_of(const char* scales, int64_t offset) {
    if constexpr (Source::kHasScales) return scale_at(scales + offset);
    return 1.0f;
}

// Keys at keys + offsets[t], with scales at scales + offsets[t], -> [words, kKeys], of the first `count` keys at least.
template <typename Type, typename Source>
void pack_keys(const Shape& shape, const char* keys, const char* scales, const int64_t* offsets, int count,
               float* packed) {
    constexpr int kParts = kDepth<Type> == 2 ? 1 : Type::kVectors;
    const int units = (shape.head_dim + Type::kElements - 1) / Type::kElements;
    for (int first = 0; first < count; first += WIDTH)
        for (int u = 0; u < units; ++u) {
            const int64_t skipped = int64_t(u) * Type::kElements, valid = shape.head_dim - skipped;
            Floats squares[kParts][WIDTH];
            for (int t = 0; t < WIDTH; ++t) {
                const char* from = keys + offsets[first + t] + skipped * Source::kBytes;
                const float scale = scale_of<Source>(scales, offsets[first + t]);
                if constexpr (kDepth<Type> == 2) {
                    squares[0][t] = (Floats)Source::raw(from, valid, scale);
                } else {
                    Floats parts[kParts];
                    Source::unit(from, valid, scale, parts);
                    for (int p = 0; p < kParts; ++p) squares[p][t] = parts[p];
                }
            }
            for (int p = 0; p < kParts; ++p) {
                transpose(squares[p]);
                float* to = packed + size_t(u * kParts + p) * WIDTH * kKeys + first;
                for (int w = 0; w < WIDTH; ++w) store(to + w * kKeys, squares[p][w]);
            }
        }
}

// Values likewise -> [keys or pairs of keys, value_dim], a unit's even dimensions before its odd ones.
template <typename Type, typename Source>
void pack_values(const Shape& shape, const char* values, const char* scales, const int64_t* offsets, int count,
                 float* packed) {
    const int units = (shape.head_dim + Type::kElements - 1) / Type::kElements;
    for (int t = 0; t < count; t += kDepth<Type>)
        for (int u = 0; u < units; ++u, packed += Type::kVectors * WIDTH) {
            const int64_t skipped = int64_t(u) * Type::kElements, valid = shape.head_dim - skipped;
            const char* from = values + skipped * Source::kBytes;
            const float scale = scale_of<Source>(scales, offsets[t]);
            Floats parts[Type::kVectors];
            if constexpr (kDepth<Type> == 2) {
                const float next_scale = scale_of<Source>(scales, offsets[t + 1]);
                const Words a = Source::raw(from + offsets[t], valid, scale);
                const Words b = Source::raw(from + offsets[t + 1], valid, next_scale);
                parts[0] = (Floats)((a & 0xffffu) | (b << 16));
                parts[1] = (Floats)((a >> 16) | (b & 0xffff0000u));
            } else {
                Source::unit(from + offsets[t], valid, scale, parts);
            }
            for (int v = 0; v < Type::kVectors; ++v) store(packed + v * WIDTH, parts[v]);
        }
}

// sums[r][c] = the product of N rows of words, `stride` apart, with kBeside vectors of each of `steps` packed lines.
template <int kDepth, int N, int kBeside>
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
            for (int c = 0; c < kBeside; ++c) sums[r][c] = multiply_add<kDepth>(sums[r][c], word, factors[c]);
        }
    }
}

// scores[N, kKeys], not yet scaled, of the first `count` keys at least.
template <int kDepth, int N>
void score_rows(const float* queries, size_t stride, const float* keys, int words, int count, float* scores) {
    for (int first = 0; first < count; first += kColumns * WIDTH) {
        Floats sums[N][kColumns] = {};
        outer_products<kDepth>(sums, queries, stride, keys + first, kKeys, words);
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kColumns; ++c) store(scores + r * kKeys + first + c * WIDTH, sums[r][c]);
    }
}

template <int kDepth, int N, int kBeside>
inline void add_columns(const float* weights, const float* values, size_t line, int steps, float* accumulators,
                        size_t stride) {
    Floats sums[N][kBeside];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) sums[r][c] = load(accumulators + r * stride + c * WIDTH);
    outer_products<kDepth>(sums, weights, kKeys, values, line, steps);
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) store(accumulators + r * stride + c * WIDTH, sums[r][c]);
}

// accumulators[N, dim] += weights[N, keys] * values
template <int kDepth, int N>
void add_rows(const float* weights, const float* values, int dim, int steps, float* accumulators, size_t stride) {
    const int columns = dim / WIDTH;
    int c = 0;
    for (; c + kColumns <= columns; c += kColumns)
        add_columns<kDepth, N, kColumns>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
    for (; c + 2 <= columns; c += 2)
        add_columns<kDepth, N, 2>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
    if (c < columns)
        add_columns<kDepth, N, 1>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
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

// Two vectors of weights relative to `maximum`; returns their sum.
template <int kDepth>
inline Floats soften_two(const float* scores, float scale, float maximum, float* weights) {
#if HAS_BF16_DOT
    if constexpr (kDepth == 2) {
        const Floats factor = same(scale * 1.44269504f), shift = same(maximum * 1.44269504f);
        const Floats a = power_of_two(load(scores) * factor - shift);
        const Floats b = power_of_two(load(scores + WIDTH) * factor - shift);
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(weights, &pairs, sizeof pairs);
        return a + b;
    }
#endif
    const Floats a = exponential(load(scores) * scale - maximum);
    const Floats b = exponential(load(scores + WIDTH) * scale - maximum);
    store(weights, a);
    store(weights + WIDTH, b);
    return a + b;
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

template <typename Type, int N>
void attend_rows(const Shape& shape, const Scratch& scratch, const QueryRows& rows, int at, const Tile& tile) {
    const int64_t latest = rows.position + (at + N - 1) / rows.group, earliest = rows.position + at / rows.group;
    if (latest < tile.first) return;
    if (rows.window && tile.first + tile.count <= earliest - rows.window + 1) return;
    const int count = latest - tile.first + 1 < tile.count ? int(latest - tile.first + 1) : tile.count;
    const int dim = value_dim<Type>(shape);
    const size_t padded = shape.padded_dim(), own = rows.first + at;
    score_rows<kDepth<Type>, N>(scratch.queries + own * padded, padded, scratch.keys, words_of<Type>(shape), count,
                                scratch.scores);
    const int softened = (count + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH);
    for (int r = 0; r < N; ++r) {
        const int64_t position = rows.position + (at + r) / rows.group - tile.first;  // relative to the tile
        const int64_t lowest = rows.window ? position - rows.window + 1 : 0;
        const int last = position + 1 < count ? int(position + 1) : count;
        const int first = lowest <= 0 ? 0 : lowest < softened ? int(lowest) : softened;
        float* scores = scratch.scores + r * kKeys;
        if (first >= last) {
            std::memset(scratch.weights + r * kKeys, 0, kKeys * sizeof(float));
            continue;
        }
        if (first > 0 || last < softened) hide(scores, first, last, softened);
        soften_row<kDepth<Type>>(scores, softened, shape.scale, scratch.weights + r * kKeys, &scratch.maxima[own + r],
                                 &scratch.sums[own + r], scratch.accumulators + (own + r) * padded, dim);
    }
    add_rows<kDepth<Type>, N>(scratch.weights, scratch.values, dim, (count + kDepth<Type> - 1) / kDepth<Type>,
                              scratch.accumulators + own * padded, padded);
}

// All rows over one packed tile, in runs of at most kRows and about equal length.
template <typename Type>
inline void attend_tile(const Shape& shape, const Scratch& scratch, const QueryRows& rows, const Tile& tile) {
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

template <typename Type, typename Source>
inline void pack_tile(const Shape& shape, const Call& call, const Scratch& scratch, int kv_head,
                      const int64_t* offsets, int count) {
    const int64_t head = kv_head * shape.head_bytes(), scale = shape.scale_offset(kv_head);
    pack_keys<Type, Source>(shape, call.keys + head, call.keys + scale, offsets, count, scratch.keys);
    pack_values<Type, Source>(shape, call.values + head, call.values + scale, offsets, count, scratch.values);
}

// The first `bytes` of each slot's keys and values, from `head` on, will be read soon.
inline void prefetch_slots(const Call& call, int64_t head, int64_t bytes, const int64_t* offsets, int count) {
    for (int t = 0; t < count; ++t) {
        prefetch(call.keys + head + offsets[t], bytes);
        prefetch(call.values + head + offsets[t], bytes);
    }
}

template <typename Type, typename Source = Stored<Type>>
void chunk_typed(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const int64_t head_bytes = shape.head_bytes(), head = piece.kv_head * head_bytes;
    const int64_t query = piece.kv_head * shape.row_head_bytes() * shape.group;
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        begin_rows<Type>(shape, scratch, int(i) * shape.group, shape.group,
                         call.queries + (piece.row + i) * call.query_row_bytes + query);
    const QueryRows rows = {0, int(piece.num_tokens) * shape.group, shape.group, piece.position, piece.window};
    const int64_t last = piece.position + piece.num_tokens;
    int64_t first = piece.window ? piece.position - piece.window + 1 : 0;
    if (first < 0) first = 0;
    int64_t offsets[kKeys];
    int count = slot_offsets<kKeys>(shape, call, piece.blocks, first, last, offsets);
    while (count) {
        pack_tile<Type, Source>(shape, call, scratch, piece.kv_head, offsets, count);
        const Tile tile = {first, count};
        first += kKeys;
        count = slot_offsets<kKeys>(shape, call, piece.blocks, first, last, offsets);
        prefetch_slots(call, head, head_bytes, offsets, count);
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

void decode_piece(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                  float* partials) {
    const auto decode = shape.is_int8 ? shape.is_bfloat16 ? decode_any<Int8<NaturalBFloat16>> : decode_any<Int8<Float32>>
                        : shape.is_bfloat16 ? decode_any<BFloat16> : decode_any<Float32>;
    decode(shape, call, piece, next, scratch, partials);
}

void chunk_piece(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const auto chunk = shape.is_bfloat16 ? shape.is_int8 ? chunk_typed<BFloat16, StoredInt8<BFloat16>> : chunk_typed<BFloat16>
                       : shape.is_int8 ? chunk_typed<Float32, StoredInt8<Float32>> : chunk_typed<Float32>;
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
