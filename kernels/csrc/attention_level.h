// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL        the namespace
//   WIDTH        floats per vector
//   HAS_BF16_DOT 1 where a bfloat16 dot product exists (AVX512-BF16)
//   HAS_TILES    1 where tiles of bfloat16 are multiplied (AMX)
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace paged {
namespace LEVEL {
namespace {

#include "vectors.h"

#include "attention_types.h"
#include "attention_int8.h"
#include "attention_order.h"
#include "attention_ahead.h"

#if HAS_BF16_DOT
#include "attention_int8_words.h"
#endif

// One query head against the key at `key`, in `kUnits` units (0: as many as it takes).
template <typename Type, int kUnits>
inline __attribute__((always_inline)) Floats dot(const Shape& shape, const float* query, const char* key) {
    const int units = kUnits ? kUnits : (shape.head_dim + Type::kElements - 1) / Type::kElements;
    Floats dot{};
    for (int u = 0; u < units; ++u) {
        const int64_t valid = kUnits || u + 1 < units ? Type::kElements : shape.head_dim - int64_t(u) * Type::kElements;
        const char* from = key + int64_t(u) * Type::kElements * Type::kBytes;
#if HAS_BF16_DOT
        if constexpr (Type::kVectors == 2) {
            const __m512bh part = (__m512bh)Type::raw(from, valid);
            dot = (Floats)_mm512_dpbf16_ps((__m512)dot, part, (__m512bh)load(query + u * WIDTH));
            continue;
        }
#endif
        Floats parts[Type::kVectors];
        Type::unit(from, valid, parts);
        for (int v = 0; v < Type::kVectors; ++v)
            dot = fused(parts[v], load(query + (u * Type::kVectors + v) * WIDTH), dot);
    }
    return dot;
}

// All query heads against the keys of `WIDTH` tokens at keys + offsets[t], of which `count` count. A few tokens at a time,
// so that slots are read nearly as they lie in memory.
template <typename Type, int kUnits, int kTogether>
void score_units(const Shape& shape, const Scratch& scratch, const char* keys, const int64_t* offsets, int count,
                 Ahead<kTogether == 1>& ahead, float* scores) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim();
    const int64_t head_bytes = kUnits ? int64_t(kUnits) * Type::kElements * Type::kBytes : shape.head_bytes();
    for (int t = 0; t < count; t += kTogether)
        for (int h = 0; h < num_heads; ++h) {
            const float* query = scratch.queries + size_t(h) * padded;
            const char* head_keys = keys + h / shape.group * head_bytes;
            Floats dots[kTogether];
            ahead.fetch(kTogether);
            for (int i = 0; i < kTogether; ++i) dots[i] = dot<Type, kUnits>(shape, query, head_keys + offsets[t + i]);
            for (int i = 0; i < kTogether; ++i) store(scratch.dots + (size_t(h) * WIDTH + t + i) * WIDTH, dots[i]);
        }
    for (int h = 0; h < num_heads; ++h) {
        Floats dots[WIDTH];
        std::memcpy(dots, scratch.dots + size_t(h) * WIDTH * WIDTH, sizeof dots);
        Floats whole = sums(dots);
        if constexpr (Type::kHasScales) {
            const char* scales = keys + shape.scale_offset(h / shape.group);
            for (int t = 0; t < WIDTH; ++t) whole[t] *= scale_at(scales + offsets[t]);
        }
        store(scores + size_t(h) * kKeys, whole);
    }
}

// For head widths of whole units, the number of units is known to the compiler.
template <typename Type, int kTogether>
inline void score_tile(const Shape& shape, const Scratch& scratch, const char* keys, const int64_t* offsets, int count,
                       Ahead<kTogether == 1>& ahead, float* scores) {
    const int units = shape.head_dim % Type::kElements ? 0 : shape.head_dim / Type::kElements;
    switch (units) {
        case 2: return score_units<Type, 2, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        case 3: return score_units<Type, 3, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        case 4: return score_units<Type, 4, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        case 8: return score_units<Type, 8, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        default: return score_units<Type, 0, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
    }
}

// The words of values of two tokens, taken apart: pairs of even dimensions, pairs of odd ones.
#if HAS_BF16_DOT
inline void pair_values(Words a, Words b, Floats* pairs) {
    pairs[0] = (Floats)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)a, (__m512i)(b << 16));
    pairs[1] = (Floats)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)(a >> 16), (__m512i)b);
}
#endif

// accumulator[units] += sum over tokens of weight (* scale, where the type has scales) * value, for `kUnits` units from
// `first_unit` on. Weights as `soften` leaves them.
template <typename Type, int kUnits>
inline void add_values(const Shape& shape, int first_unit, const float* weights, const char* values, const char* scales,
                       const int64_t* offsets, int count, float* accumulator) {
    constexpr int kVectors = kUnits * Type::kVectors;
    Floats acc[kVectors];
    float* own = accumulator + first_unit * Type::kElements;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[v] = load(own + v * WIDTH);
    const int64_t skipped = int64_t(first_unit) * Type::kElements;
    const int64_t last_valid = shape.head_dim - skipped - int64_t(kUnits - 1) * Type::kElements;
    for (int t = 0; t < count; t += kDepth<Type>) {
        const char* value = values + offsets[t] + skipped * Type::kBytes;
        Floats weight = everywhere(weights + t / kDepth<Type>);
        if constexpr (Type::kHasScales) weight = same(weight[0] * scale_at(scales + offsets[t]));
#pragma GCC unroll 4
        for (int u = 0; u < kUnits; ++u) {
            const int64_t at = int64_t(u) * Type::kElements * Type::kBytes;
            const int64_t valid = u + 1 < kUnits ? int64_t(Type::kElements) : last_valid;
            Floats parts[Type::kVectors];
#if HAS_BF16_DOT
            if constexpr (kDepth<Type> == 2)
                pair_values(Type::raw(value + at, valid), Type::raw(value + at + offsets[t + 1] - offsets[t], valid), parts);
            else
#endif
                Type::unit(value + at, valid, parts);
#pragma GCC unroll 2
            for (int v = 0; v < Type::kVectors; ++v)
                acc[u * Type::kVectors + v] =
                    multiply_add<kProduct<Type>>(acc[u * Type::kVectors + v], weight, parts[v]);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(own + v * WIDTH, acc[v]);
}

template <typename Type>
inline void add_all_values(const Shape& shape, const float* weights, const char* values, const char* scales,
                           const int64_t* offsets, int count, float* accumulator) {
    const int units = (shape.head_dim + Type::kElements - 1) / Type::kElements;
    int unit = 0;
    for (; unit + 4 <= units; unit += 4)
        add_values<Type, 4>(shape, unit, weights, values, scales, offsets, count, accumulator);
    switch (units - unit) {
        case 3: add_values<Type, 3>(shape, unit, weights, values, scales, offsets, count, accumulator); break;
        case 2: add_values<Type, 2>(shape, unit, weights, values, scales, offsets, count, accumulator); break;
        case 1: add_values<Type, 1>(shape, unit, weights, values, scales, offsets, count, accumulator); break;
        default: break;
    }
}

// Byte offsets of the slots of tokens [first, last) of the tile that begins at `tile`, of which they are the only ones read;
// others are those of the nearest. Returns how many of the tile's tokens come before `last`; 0: none of them is read.
inline int slot_offsets(const Shape& shape, const Call& call, const int64_t* blocks, bool is_reversed, int64_t tile,
                        int64_t first, int64_t last, int64_t* offsets) {
    if (tile >= last) return 0;
    const int lead = first > tile ? int(first - tile) : 0;
    const int count = last - tile < kKeys ? int(last - tile) : kKeys;
    const int64_t step = is_reversed ? -shape.slot_bytes() : shape.slot_bytes();
    const int64_t origin = is_reversed ? (shape.block_size - 1) * shape.slot_bytes() : 0;
    int64_t block = (tile + lead) / shape.block_size, slot = (tile + lead) % shape.block_size;
    int64_t base = blocks[block] * call.block_bytes + origin;
    for (int t = lead; t < count; ++t) {
        offsets[t] = base + slot * step;
        if (++slot == shape.block_size && t + 1 < count) {
            slot = 0;
            base = blocks[++block] * call.block_bytes + origin;
        }
    }
    for (int t = 0; t < lead; ++t) offsets[t] = offsets[lead];
    for (int t = count; t < kKeys; ++t) offsets[t] = offsets[count - 1];
    return count;
}

template <typename Type>
inline void arrange_query(const Shape& shape, const char* from, float* to) {
    const int padded = shape.padded_dim();
    std::memset(to, 0, padded * sizeof(float));
#if HAS_BF16_DOT
    if constexpr (Type::kVectors == 2) {
        std::memcpy(to, from, shape.row_head_bytes());
        return;
    }
#endif
    for (int d = 0; d < shape.head_dim; d += Type::kElements) {
        Floats parts[Type::kVectors];
        Type::unit(from + int64_t(d) * Type::kBytes, shape.head_dim - d, parts);
        std::memcpy(to + d, parts, sizeof parts);
    }
}

// The share of each weight that a row has summed; a sink takes its own, and has no value.
inline float share_of_weights(const Sums& row, const float* sink) {
    if (!sink) return 1.0f / *row.sum;
    const float most = *sink > *row.maximum ? *sink : *row.maximum;
    const float weight = power_of_two(*row.maximum - most);
    return weight / fused(*row.sum, weight, power_of_two(*sink - most));
}

// Where tiles sum values, sums of no key may turn a zero that was rounded from below into one from above.
template <typename Type>
constexpr bool has_signless_zeros = HAS_TILES && Type::kVectors == 2;

template <typename Type>
inline void write_head(const Shape& shape, const float* accumulator, float share, char* to) {
    for (int d = 0; d < shape.head_dim; d += Type::kElements) {
        Floats parts[Type::kVectors];
        for (int v = 0; v < Type::kVectors; ++v)
            parts[v] = has_signless_zeros<Type> ? fused(load(accumulator + d + v * WIDTH), same(share), Floats{})
                                                : load(accumulator + d + v * WIDTH) * share;
        Type::put(to + int64_t(d) * Type::kBytes, shape.head_dim - d, parts);
    }
}

inline Sums sums_of(const Shape& shape, const Scratch& scratch, int row) {
    return {scratch.accumulators + size_t(row) * shape.padded_dim(), scratch.maxima + row, scratch.sums + row};
}

inline Sums sections_of(const Shape& shape, const Scratch& scratch, int row) {
    return {scratch.sections + size_t(row) * shape.padded_dim(), scratch.section_maxima + row, scratch.section_sums + row};
}

inline void clear(const Sums& row, int padded_dim) {
    std::memset(row.accumulator, 0, padded_dim * sizeof(float));
    *row.maximum = kLowest;
    *row.sum = 0.0f;
}

// Scratch rows [first, first + count) for query heads that lie one after another at `query`.
template <typename Type>
inline void begin_rows(const Shape& shape, const Scratch& scratch, int first, int count, const char* query) {
    for (int i = 0; i < count; ++i) {
        clear(sums_of(shape, scratch, first + i), shape.padded_dim());
        arrange_query<Type>(shape, query + i * shape.row_head_bytes(), scratch.queries + size_t(first + i) * shape.padded_dim());
    }
}

// What was summed of rows -> query heads that lie one after another at `to`. `sinks`: of these heads, or null.
template <typename Type>
inline void write_rows(const Shape& shape, const Sums& rows, const float* sinks, int count, char* to) {
    for (int i = 0; i < count; ++i) {
        const Sums row = {rows.accumulator + size_t(i) * shape.padded_dim(), rows.maximum + i, rows.sum + i};
        write_head<Type>(shape, row.accumulator, share_of_weights(row, sinks ? sinks + i : nullptr),
                         to + i * shape.row_head_bytes());
    }
}

// The result of a decode piece: to `out` or, of a part of a context, to the partial results.
template <typename Type>
inline void finish_piece(const Shape& shape, const Call& call, const Piece& piece, const Scratch& scratch,
                         float* partials) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim();
    if (piece.partial < 0)
        return write_rows<Type>(shape, sums_of(shape, scratch, 0), call.sinks, num_heads,
                                call.out + piece.row * call.out_row_bytes);
    const size_t first = (size_t(piece.partial) * shape.slot_heads + shape.first_head) * shape.group;
    float* partial = partials + first * shape.partial_floats();
    for (int h = 0; h < num_heads; ++h, partial += shape.partial_floats()) {
        std::memcpy(partial, scratch.accumulators + size_t(h) * padded, padded * sizeof(float));
        partial[padded] = scratch.maxima[h];
        partial[padded + 1] = scratch.sums[h];
    }
}

// The first slots of the piece that this thread takes next; returns how many, 0 if there is none.
inline int next_offsets(const Shape& shape, const Call& call, const Piece* next, int64_t* offsets) {
    if (!next) return 0;
    const int64_t tile = next->first / kKeys * kKeys;
    return slot_offsets(shape, call, next->blocks, next->is_reversed, tile, next->first, next->last, offsets);
}

// `next`: the piece that this thread takes next, or null. kTogether tokens are read side by side.
template <typename Type, int kTogether>
void decode_typed(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                  float* partials) {
    constexpr int kBeside = kTogether < kDepth<Type> ? kDepth<Type> : kTogether;
    const int num_heads = shape.num_heads(), padded = shape.padded_dim(), ahead = tokens_ahead(shape);
    const int64_t head_bytes = shape.head_bytes();
    begin_rows<typename Type::Rows>(shape, scratch, 0, num_heads, call.queries + piece.row * call.query_row_bytes);
    int64_t tiles[2][kKeys];
    int64_t *offsets = tiles[0], *following = tiles[1];
    int64_t first = piece.first / kKeys * kKeys;
    int count = slot_offsets(shape, call, piece.blocks, piece.is_reversed, first, piece.first, piece.last, offsets);
    for (; count; first += kKeys) {
        const int lead = piece.first > first ? int(piece.first - first) : 0;
        Ahead<kTogether == 1> values(shape, ahead, {call.keys, offsets, count}, {call.values, offsets, count});
        for (int t = lead / WIDTH * WIDTH; t < count; t += WIDTH)
            score_tile<Type, kTogether>(shape, scratch, call.keys, offsets + t, count - t < WIDTH ? count - t : WIDTH, values,
                                        scratch.scores + t);
        const int softened = (count + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH);
        for (int h = 0; h < num_heads; ++h) {
            float* scores = scratch.scores + size_t(h) * kKeys;
            cap_scores(shape, scores, softened);
            soften<kDepth<Type>>(scores, lead, count, softened, shape.exponent_scale(), scores,
                                 sums_of(shape, scratch, h), padded);
        }
        const int following_count =
            slot_offsets(shape, call, piece.blocks, piece.is_reversed, first + kKeys, piece.first, piece.last, following);
        const int to_come = following_count ? following_count : next_offsets(shape, call, next, following);
        Ahead<kTogether == 1> keys(shape, ahead, {call.values, offsets, count}, {call.keys, following, to_come});
        for (int t = lead / kBeside * kBeside; t < count; t += kBeside)
            for (int h = 0; h < num_heads; ++h) {
                keys.fetch(kBeside);
                add_all_values<Type>(shape, scratch.scores + size_t(h) * kKeys + t / kDepth<Type>,
                                     call.values + h / shape.group * head_bytes,
                                     call.values + shape.scale_offset(h / shape.group), offsets + t,
                                     count - t < kBeside ? count - t : kBeside,
                                     scratch.accumulators + size_t(h) * padded);
            }
        int64_t* done = offsets;
        offsets = following;
        following = done;
        count = following_count;
    }
    finish_piece<typename Type::Rows>(shape, call, piece, scratch, partials);
}

// Sections of a context one after another.
template <typename Type>
void merge_typed(const Shape& shape, const Call& call, int64_t row, const Scratch& scratch, const float* partials, int64_t count) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim(), stride = shape.partial_floats();
    char* out = call.out + row * call.out_row_bytes;
    const Sums merged = sections_of(shape, scratch, 0);
    for (int h = 0; h < num_heads; ++h) {
        const float* part = partials + size_t(h) * stride;
        clear(merged, padded);
        for (int64_t i = 0; i < count; ++i, part += size_t(num_heads) * stride)
            add_section(merged, part, part[padded], part[padded + 1], padded);
        write_rows<Type>(shape, merged, call.sinks ? call.sinks + h : nullptr, 1, out + h * shape.row_head_bytes());
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace paged
