// Chunks: many query rows over tiles of keys and values that are packed once for all of them.
// Included after attention_level.h, once per level.

namespace paged {
namespace LEVEL {
namespace {

#include "attention_packing.h"
#include "attention_products.h"

// Query rows of one key head, `group` for each position up to which they read; that of row 0 is `position`.
struct QueryRows {
    int first;  // scratch row
    int count;
    int group;
    int64_t position;
    int64_t window;
    int64_t lowest;  // position that all of them read, without a window
    int64_t latest;  // position up to which all of them read, where that is behind their own

    int64_t last_read(int row) const {
        const int64_t own = position + row / group;
        return own > latest ? own : latest;
    }
};

// A packed tile of keys first, first + 1, ...
struct Tile {
    int64_t first;
    int count;
};

// A tile of a cache of int8, not yet scaled.
struct ScaledTile : Tile {
    alignas(64) float key_scales[kKeys];
    alignas(64) float value_scales[kKeys];

    ScaledTile(int64_t first, int count, const char* keys, const char* values, const int64_t* offsets) : Tile{first, count} {
        for (int t = 0; t < kKeys; ++t) {
            key_scales[t] = scale_at(keys + offsets[t]);
            value_scales[t] = scale_at(values + offsets[t]);
        }
    }
};

inline void multiply_by(const float* factors, int count, float* numbers) {
    for (int t = 0; t < count; t += WIDTH) store(numbers + t, load(numbers + t) * load(factors + t));
}

// Keys of the tile that the last of `n` rows from `at` on reads; 0: none of them reads any.
inline int visible_keys(const QueryRows& rows, int at, int n, const Tile& tile) {
    const int64_t latest = rows.last_read(at + n - 1), earliest = rows.position + at / rows.group;
    if (latest < tile.first) return 0;
    if (rows.window && tile.first + tile.count <= earliest - rows.window + 1) return 0;
    return latest - tile.first + 1 < tile.count ? int(latest - tile.first + 1) : tile.count;
}

// Keys [first, last) of the `count` visible ones, those that one row reads; `first` is at most `limit`.
struct Span {
    int first, last;

    Span(const QueryRows& rows, int row, const Tile& tile, int count, int limit) {
        const int64_t position = rows.position + row / rows.group - tile.first;  // relative to the tile
        const int64_t lowest = rows.window ? position - rows.window + 1 : rows.lowest - tile.first;
        const int64_t keys = rows.last_read(row) - tile.first + 1;
        last = keys < count ? int(keys) : count;
        first = lowest <= 0 ? 0 : lowest < limit ? int(lowest) : limit;
    }
};

template <typename Type, int N, typename AnyTile>
void attend_rows(const Shape& shape, const Scratch& scratch, const QueryRows& rows, int at, const AnyTile& tile) {
    constexpr bool kHasScales = std::is_same<AnyTile, ScaledTile>::value;
    const int count = visible_keys(rows, at, N, tile);
    if (!count) return;
    const int dim = value_dim<Type>(shape);
    const size_t padded = shape.padded_dim(), own = rows.first + at;
    score_rows<kProduct<Type>, N>(scratch.queries + own * padded, padded, scratch.keys, words_of<Type>(shape), count,
                                  scratch.scores);
    const int softened = (count + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH);
    for (int r = 0; r < N; ++r) {
        const Span span(rows, at + r, tile, count, softened);
        float *scores = scratch.scores + r * kKeys, *weights = scratch.weights + r * kKeys;
        if (span.first >= span.last) {
            std::memset(weights, 0, kKeys * sizeof(float));
            continue;
        }
        if constexpr (kHasScales) multiply_by(tile.key_scales, count, scores);
        cap_scores(shape, scores, softened);
        soften<kDepth<Type>>(scores, span.first, span.last, softened, shape.exponent_scale(), weights,
                             sums_of(shape, scratch, int(own) + r), dim);
        if constexpr (kHasScales) multiply_by(tile.value_scales, softened, weights);
    }
    add_rows<kProduct<Type>, N>(scratch.weights, scratch.values, dim, (count + kDepth<Type> - 1) / kDepth<Type>,
                                scratch.accumulators + own * padded, padded);
}

// The first `bytes` of each slot's keys and values, from `head` on, will be read soon.
inline void prefetch_slots(const Call& call, int64_t head, int64_t bytes, const int64_t* offsets, int count) {
    for (int t = 0; t < count; ++t) {
        prefetch(call.keys + head + offsets[t], bytes);
        prefetch(call.values + head + offsets[t], bytes);
    }
}

// Slots that are fetched a few at a time, while something else is computed.
struct NextSlots {
    const Call* call;
    int64_t head, bytes;
    const int64_t* offsets;
    int count;

    // Those that are due when [done, to_do) of `all` is computed.
    void fetch(int done, int to_do, int all) const {
        if (!count) return;
        const int first = count * done / all, last = count * to_do / all;
        prefetch_slots(*call, head, bytes, offsets + first, last - first);
    }
};

// Tiles of keys and values as rows of this type are multiplied.
template <typename Type>
struct PackedTiles {
    static constexpr bool kHasScales = false, kFetchesMeanwhile = false;

    static inline void begin(const Shape&, const Scratch&, int) {}
    static inline Tile packed(const Shape& shape, const Call& call, const Scratch& scratch, int kv_head,
                              const int64_t* offsets, int64_t first, int count) {
        const int64_t head = kv_head * shape.head_bytes();
        pack_keys<Type, Type>(shape, call.keys + head, offsets, count, scratch.keys);
        pack_values<Type, Type>(shape, call.values + head, offsets, count, scratch.values);
        return {first, count};
    }
};

// Tiles of int8, whose elements become floats; scales multiply scores and weights.
template <typename Type>
struct ScaledTiles {
    static constexpr bool kHasScales = true, kFetchesMeanwhile = false;

    static inline void begin(const Shape&, const Scratch&, int) {}
    static inline ScaledTile packed(const Shape& shape, const Call& call, const Scratch& scratch, int kv_head,
                                    const int64_t* offsets, int64_t first, int count) {
        const int64_t head = kv_head * shape.head_bytes(), scale = shape.scale_offset(kv_head);
        pack_keys<Type, Int8<Type>>(shape, call.keys + head, offsets, count, scratch.keys);
        pack_values<Type, Int8<Type>>(shape, call.values + head, offsets, count, scratch.values);
        return {first, count, call.keys + scale, call.values + scale, offsets};
    }
};

#if HAS_BF16_DOT
#include "attention_int8_chunks.h"
#endif
#if HAS_TILES
#include "attention_by_tiles.h"
#include "attention_by_tiles_decode.h"
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

// What was summed of these rows is added to their earlier sections; the next one begins.
inline void end_section(const Shape& shape, const Scratch& scratch, int num_rows) {
    for (int r = 0; r < num_rows; ++r) {
        const Sums row = sums_of(shape, scratch, r);
        add_section(sections_of(shape, scratch, r), row.accumulator, *row.maximum, *row.sum, shape.padded_dim());
        clear(row, shape.padded_dim());
    }
}

template <typename Type>
inline void begin_chunk(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const int64_t row_bytes = shape.row_head_bytes() * shape.group, head = piece.kv_head * row_bytes;
    const char* queries = call.queries + piece.row * call.query_row_bytes + head;
    for (int64_t i = 0; i < piece.num_tokens; ++i) prefetch(queries + i * call.query_row_bytes, row_bytes);
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        begin_rows<Type>(shape, scratch, int(i) * shape.group, shape.group, queries + i * call.query_row_bytes);
    for (int64_t i = 0; i < piece.num_tokens; ++i)
        for (int64_t at = 0; at < row_bytes; at += 64)
            __builtin_prefetch(call.out + (piece.row + i) * call.out_row_bytes + head + at, 1);
}

template <typename Type, typename Tiles = PackedTiles<Type>>
void chunk_typed(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const int64_t head_bytes = shape.head_bytes(), head = piece.kv_head * head_bytes;
    const int num_rows = int(piece.num_tokens) * shape.group;
    const bool is_even = piece.context && !piece.window;  // all rows read the same
    const QueryRows rows = is_even ? QueryRows{0, num_rows, num_rows, piece.context - 1, 0, 0, 0}
                                   : QueryRows{0, num_rows, shape.group, piece.position, piece.window, piece.lowest,
                                               piece.context ? piece.context - 1 : 0};
    begin_chunk<Type>(shape, call, piece, scratch);
    Tiles::begin(shape, scratch, rows.count);
    const int64_t last = piece.context ? piece.context : piece.position + piece.num_tokens;
    const int64_t lowest =
        piece.window && piece.position >= piece.window ? piece.position - piece.window + 1 : piece.lowest;
    int64_t first = lowest / kKeys * kKeys;
    const bool has_sections = first / kSection != (last - 1) / kSection;
    for (int r = 0; has_sections && r < rows.count; ++r) clear(sections_of(shape, scratch, r), shape.padded_dim());
    int64_t offsets[kKeys];
    int count = slot_offsets(shape, call, piece.blocks, piece.is_reversed, first, lowest, last, offsets);
    while (count) {
        auto tile = Tiles::packed(shape, call, scratch, piece.kv_head, offsets, first, count);
        first += kKeys;
        count = slot_offsets(shape, call, piece.blocks, piece.is_reversed, first, lowest, last, offsets);
        if constexpr (Tiles::kFetchesMeanwhile)
            tile.next = {&call, head, head_bytes, offsets, count};
        else if (count)
            prefetch_slots(call, head, head_bytes, offsets, count);
        if constexpr (Tiles::kHasScales)
            if (count) prefetch_slots(call, shape.scale_offset(piece.kv_head), 1, offsets, count);
        attend_tile<Type>(shape, scratch, rows, tile);
        if (has_sections && (!count || first % kSection == 0)) end_section(shape, scratch, rows.count);
    }
    const int64_t query = piece.kv_head * shape.row_head_bytes() * shape.group;
    for (int64_t i = 0; i < piece.num_tokens; ++i) {
        const int row = int(i) * shape.group;
        write_rows<Type>(shape, has_sections ? sections_of(shape, scratch, row) : sums_of(shape, scratch, row),
                         call.sinks ? call.sinks + piece.kv_head * shape.group : nullptr, shape.group,
                         call.out + (piece.row + i) * call.out_row_bytes + query);
    }
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

// bfloat16 by tiles where there are any.
#if HAS_TILES
inline void chunk_bfloat16(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const TinyIsZero rounding;
    chunk_typed<BFloat16, MatrixTiles>(shape, call, piece, scratch);
    _tile_release();  // else a change of threads would have 8 KB more to save
}

constexpr auto decode_bfloat16 = decode_by_tiles;
#else
constexpr auto chunk_bfloat16 = chunk_typed<BFloat16>;
constexpr auto decode_bfloat16 = decode_any<BFloat16>;
#endif

void decode_piece(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                  float* partials) {
    Shape own = shape;
    own.kv_heads = piece.num_heads;
    own.first_head = piece.first_head;
    Call heads = call;
    heads.keys += piece.first_head * shape.head_bytes();
    heads.values += piece.first_head * shape.head_bytes();
    heads.queries += piece.first_head * shape.group * shape.row_head_bytes();
    heads.out += piece.first_head * shape.group * shape.row_head_bytes();
    if (heads.sinks) heads.sinks += piece.first_head * shape.group;
    const auto decode = shape.is_int8 ? shape.is_bfloat16 ? decode_int8<NaturalBFloat16> : decode_int8<Float32>
                        : shape.is_bfloat16 ? decode_bfloat16 : decode_any<Float32>;
    decode(own, heads, piece, next, scratch, partials);
}

template <typename RowType>
inline void chunk_int8(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
#if HAS_BF16_DOT
    if (has_integer_scores(shape)) return chunk_typed<RowType, IntegerTiles>(shape, call, piece, scratch);
#endif
    chunk_typed<RowType, ScaledTiles<RowType>>(shape, call, piece, scratch);
}

void chunk_piece(const Shape& shape, const Call& call, const ChunkPiece& piece, const Scratch& scratch) {
    const auto chunk = shape.is_int8 ? shape.is_bfloat16 ? chunk_int8<NaturalBFloat16> : chunk_int8<Float32>
                       : shape.is_bfloat16 ? chunk_bfloat16 : chunk_typed<Float32>;
    chunk(shape, call, piece, scratch);
}

void merge(const Shape& shape, const Call& call, int64_t row, const Scratch& scratch, const float* partials, int64_t count) {
#if HAS_TILES
    const TinyIsZero rounding;
#endif
    const auto merge_rows = shape.is_bfloat16 ? shape.is_int8 ? merge_typed<NaturalBFloat16> : merge_typed<BFloat16>
                            : merge_typed<Float32>;
    merge_rows(shape, call, row, scratch, partials, count);
}

}  // namespace
}  // namespace LEVEL
}  // namespace paged
