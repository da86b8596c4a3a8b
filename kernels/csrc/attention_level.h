// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL        the namespace
//   WIDTH        floats per vector
//   HAS_BF16_DOT 1 where a bfloat16 dot product exists (AVX512-BF16)
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace paged {
namespace LEVEL {
namespace {

#include "vectors.h"

constexpr float kLowest = -3.0e38f;

inline float exponential_of(float x) { return exponential(same(x))[0]; }

// How a cache type is read: in units of `kElements`, each `kVectors` vectors of floats. A unit of bfloat16 is taken
// apart into its even and its odd elements, in which order accumulators and queries are kept as well.
struct Float32 {
    typedef Float32 Rows;
    static constexpr int kElements = WIDTH, kVectors = 1, kBytes = 4;
    static constexpr bool kHasScales = false;

    static inline void unit(const char* from, int64_t valid, Floats* out) {
        if (valid >= kElements) {
            std::memcpy(out, from, sizeof *out);
        } else {
            *out = Floats{};
            std::memcpy(out, from, valid * kBytes);
        }
    }
    static inline void put(char* to, int64_t valid, const Floats* in) {
        std::memcpy(to, in, valid >= kElements ? sizeof *in : valid * kBytes);
    }
};

struct BFloat16 {
    typedef BFloat16 Rows;
    static constexpr int kElements = 2 * WIDTH, kVectors = 2, kBytes = 2;
    static constexpr bool kHasScales = false;

    static inline Words raw(const char* from, int64_t valid) {
        Words x;
        if (valid >= kElements) {
            std::memcpy(&x, from, sizeof x);
        } else {
#if HAS_BF16_DOT
            x = (Words)_mm512_maskz_loadu_epi16(__mmask32((1ull << valid) - 1), from);
#else
            x = Words{};
            std::memcpy(&x, from, valid * kBytes);
#endif
        }
        return x;
    }
    static inline void unit(const char* from, int64_t valid, Floats* out) {
        const Words x = raw(from, valid);
        out[0] = (Floats)(x << 16);
        out[1] = (Floats)(x & 0xffff0000u);
    }
    static inline void put(char* to, int64_t valid, const Floats* in) {
        const Words x = (rounded(in[0]) >> 16) | rounded(in[1]);
        std::memcpy(to, &x, valid >= kElements ? sizeof x : valid * kBytes);
    }
};

#include "attention_int8.h"

#if WIDTH == 16
template <typename Vector>
inline Vector sums_of_four(Vector a, Vector b, Vector c, Vector d) {
    const Vector ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                      __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const Vector cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                      __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// The sum of each of 16 vectors.
template <typename Vector>
inline Vector sums(const Vector* x) {
    const Vector a = sums_of_four(x[0], x[1], x[2], x[3]), b = sums_of_four(x[4], x[5], x[6], x[7]);
    const Vector c = sums_of_four(x[8], x[9], x[10], x[11]), d = sums_of_four(x[12], x[13], x[14], x[15]);
    const Vector ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                      __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const Vector cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                      __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif WIDTH == 8
inline Floats sums_of_four(Floats a, Floats b, Floats c, Floats d) {
    const Floats ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                      __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const Floats cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                      __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    return __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
}

inline Floats sums(const Floats* x) {
    const Floats a = sums_of_four(x[0], x[1], x[2], x[3]), b = sums_of_four(x[4], x[5], x[6], x[7]);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
inline Floats sums(const Floats* x) {
    const Floats ab = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5) + __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
    const Floats cd = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5) + __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
#endif

inline void prefetch(const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// Slots that will be read, fetched in the order in which they lie in memory: a little with each of the `kTile` tokens of
// each head that is computed meanwhile, so that all are there when that is done.
class Ahead {
   public:
    Ahead(const Shape& shape, const char* base, const int64_t* offsets)
        : base_(base), offsets_(offsets), slot_bytes_(shape.slot_bytes()), left_(kTile) {
        share_ = (slot_bytes_ + shape.num_heads() - 1) / shape.num_heads();
    }

    inline void fetch() {
        if (left_ == 0) return;
        const char* slot = base_ + *offsets_;
        for (due_ += share_; at_ < due_; at_ += 64) __builtin_prefetch(slot + at_, 0, 3);
        if (at_ < slot_bytes_) return;
        at_ = due_ = 0;
        ++offsets_;
        --left_;
    }

   private:
    const char* base_;
    const int64_t* offsets_;
    int64_t slot_bytes_, share_;
    int64_t at_ = 0, due_ = 0;
    int left_;
};

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
        for (int v = 0; v < Type::kVectors; ++v) dot += parts[v] * load(query + (u * Type::kVectors + v) * WIDTH);
    }
    return dot;
}

// All query heads against the keys of `WIDTH` tokens at keys + offsets[t], of which `count` count. A few tokens at a time,
// so that slots are read nearly as they lie in memory.
template <typename Type, int kUnits, int kTogether>
void score_units(const Shape& shape, const Scratch& scratch, const char* keys, const int64_t* offsets, int count,
                 Ahead& ahead, float* scores) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim();
    const int64_t head_bytes = kUnits ? int64_t(kUnits) * Type::kElements * Type::kBytes : shape.head_bytes();
    for (int t = 0; t < count; t += kTogether)
        for (int h = 0; h < num_heads; ++h) {
            const float* query = scratch.queries + size_t(h) * padded;
            const char* head_keys = keys + h / shape.group * head_bytes;
            [[maybe_unused]] const char* head_scales = keys + shape.scale_offset(h / shape.group);
            Floats dots[kTogether];
            for (int i = 0; i < kTogether; ++i) {
                ahead.fetch();
                dots[i] = dot<Type, kUnits>(shape, query, head_keys + offsets[t + i]);
                if constexpr (Type::kHasScales) dots[i] *= same(scale_at(head_scales + offsets[t + i]));
            }
            for (int i = 0; i < kTogether; ++i) store(scratch.dots + (size_t(h) * WIDTH + t + i) * WIDTH, dots[i]);
        }
    for (int h = 0; h < num_heads; ++h) {
        Floats dots[WIDTH];
        std::memcpy(dots, scratch.dots + size_t(h) * WIDTH * WIDTH, sizeof dots);
        store(scores + size_t(h) * kTile, sums(dots) * shape.scale);
    }
}

// For head widths of whole units, the number of units is known to the compiler.
template <typename Type, int kTogether>
inline void score_tile(const Shape& shape, const Scratch& scratch, const char* keys, const int64_t* offsets, int count,
                       Ahead& ahead, float* scores) {
    const int units = shape.head_dim % Type::kElements ? 0 : shape.head_dim / Type::kElements;
    switch (units) {
        case 2: return score_units<Type, 2, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        case 3: return score_units<Type, 3, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        case 4: return score_units<Type, 4, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        case 8: return score_units<Type, 8, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
        default: return score_units<Type, 0, kTogether>(shape, scratch, keys, offsets, count, ahead, scores);
    }
}

// accumulator[units] += sum over tokens of weight (* scale, where the type has scales) * value, for `kUnits` units from `first_unit` on.
template <typename Type, int kUnits>
inline void add_values(const Shape& shape, int first_unit, const float* weights, const char* values, const char* scales,
                       const int64_t* offsets, int count, float* accumulator) {
    constexpr int kVectors = kUnits * Type::kVectors;
    Floats acc[kVectors];
    float* own = accumulator + first_unit * Type::kElements;
    for (int v = 0; v < kVectors; ++v) acc[v] = load(own + v * WIDTH);
    const int64_t skipped = int64_t(first_unit) * Type::kElements;
    const int64_t last_valid = shape.head_dim - skipped - int64_t(kUnits - 1) * Type::kElements;
    for (int t = 0; t < count; ++t) {
        const char* value = values + offsets[t] + skipped * Type::kBytes;
        const Floats weight = same(Type::kHasScales ? weights[t] * scale_at(scales + offsets[t]) : weights[t]);
        for (int u = 0; u < kUnits; ++u) {
            Floats parts[Type::kVectors];
            Type::unit(value + int64_t(u) * Type::kElements * Type::kBytes,
                       u + 1 < kUnits ? int64_t(Type::kElements) : last_valid, parts);
            for (int v = 0; v < Type::kVectors; ++v) acc[u * Type::kVectors + v] += weight * parts[v];
        }
    }
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

// Scores -> weights relative to the running maximum; corrects what was summed under a lower one. A score that is not
// finite makes the sum NaN, and so fails its request: its weight would be 0.
inline void soften(float* scores, int count, float* maximum, float* sum, float* accumulator, int padded_dim) {
    for (int t = count; t < kTile; ++t) scores[t] = kLowest;
    Floats high = load(scores);
    for (int t = WIDTH; t < kTile; t += WIDTH) high = larger(high, load(scores + t));
    const float most = highest(high);
    if (most > *maximum) {
        const float correction = exponential_of(*maximum - most);
        *maximum = most;
        *sum *= correction;
        for (int d = 0; d < padded_dim; d += WIDTH) store(accumulator + d, load(accumulator + d) * correction);
    }
    Floats sums{};
    for (int t = 0; t < kTile; t += WIDTH) {
        const Floats score = load(scores + t), weight = exponential(score - *maximum);
        store(scores + t, weight);
        sums += weight + (score - score);
    }
    *sum += total(sums);
}

// Byte offsets of the slots of tokens [first, first + kSlots), the last valid one repeated past `last`.
template <int kSlots>
inline int slot_offsets(const Shape& shape, const Call& call, const int64_t* blocks, int64_t first, int64_t last,
                        int64_t* offsets) {
    if (first >= last) return 0;
    const int64_t left = last - first;
    const int count = left < kSlots ? int(left) : kSlots;
    const int64_t slot_bytes = shape.slot_bytes();
    int64_t block = first / shape.block_size, slot = first % shape.block_size;
    int64_t base = blocks[block] * call.block_bytes;
    for (int t = 0; t < count; ++t) {
        offsets[t] = base + slot * slot_bytes;
        if (++slot == shape.block_size && t + 1 < count) {
            slot = 0;
            base = blocks[++block] * call.block_bytes;
        }
    }
    for (int t = count; t < kSlots; ++t) offsets[t] = offsets[count - 1];
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

template <typename Type>
inline void write_head(const Shape& shape, const float* accumulator, float sum, char* to) {
    const float inverse = 1.0f / sum;
    for (int d = 0; d < shape.head_dim; d += Type::kElements) {
        Floats parts[Type::kVectors];
        for (int v = 0; v < Type::kVectors; ++v) parts[v] = load(accumulator + d + v * WIDTH) * inverse;
        Type::put(to + int64_t(d) * Type::kBytes, shape.head_dim - d, parts);
    }
}

// Scratch rows [first, first + count) for query heads that lie one after another at `query`.
template <typename Type>
inline void begin_rows(const Shape& shape, const Scratch& scratch, int first, int count, const char* query) {
    const size_t padded = shape.padded_dim();
    std::memset(scratch.accumulators + first * padded, 0, count * padded * sizeof(float));
    for (int i = 0; i < count; ++i) {
        scratch.maxima[first + i] = kLowest;
        scratch.sums[first + i] = 0.0f;
        arrange_query<Type>(shape, query + i * shape.row_head_bytes(), scratch.queries + (first + i) * padded);
    }
}

// Scratch rows -> query heads that lie one after another at `to`.
template <typename Type>
inline void write_rows(const Shape& shape, const Scratch& scratch, int first, int count, char* to) {
    for (int i = 0; i < count; ++i)
        write_head<Type>(shape, scratch.accumulators + size_t(first + i) * shape.padded_dim(), scratch.sums[first + i],
                         to + i * shape.row_head_bytes());
}

// The result of a decode piece: to `out` or, of a part of a context, to the partial results.
template <typename Type>
inline void finish_piece(const Shape& shape, const Call& call, const Piece& piece, const Scratch& scratch,
                         float* partials) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim();
    if (piece.partial < 0)
        return write_rows<Type>(shape, scratch, 0, num_heads, call.out + piece.row * call.out_row_bytes);
    float* partial = partials + size_t(piece.partial) * num_heads * shape.partial_floats();
    for (int h = 0; h < num_heads; ++h, partial += shape.partial_floats()) {
        std::memcpy(partial, scratch.accumulators + size_t(h) * padded, padded * sizeof(float));
        partial[padded] = scratch.maxima[h];
        partial[padded + 1] = scratch.sums[h];
    }
}

// `next`: the piece that this thread takes next, or null. kTogether tokens are read side by side.
template <typename Type, int kTogether>
void decode_typed(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                  float* partials) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim();
    const int64_t head_bytes = shape.head_bytes();
    begin_rows<typename Type::Rows>(shape, scratch, 0, num_heads, call.queries + piece.row * call.query_row_bytes);
    int64_t tiles[2][kTile];
    int64_t *offsets = tiles[0], *following = tiles[1];
    int count = slot_offsets<kTile>(shape, call, piece.blocks, piece.first, piece.last, offsets);
    for (int64_t first = piece.first; count; first += kTile) {
        Ahead values(shape, call.values, offsets);
        for (int t = 0; t < count; t += WIDTH)
            score_tile<Type, kTogether>(shape, scratch, call.keys, offsets + t, count - t < WIDTH ? count - t : WIDTH, values,
                             scratch.scores + t);
        for (int h = 0; h < num_heads; ++h)
            soften(scratch.scores + size_t(h) * kTile, count, &scratch.maxima[h], &scratch.sums[h],
                   scratch.accumulators + size_t(h) * padded, padded);
        const int following_count = slot_offsets<kTile>(shape, call, piece.blocks, first + kTile, piece.last, following);
        const bool has_more = following_count || (next && slot_offsets<kTile>(shape, call, next->blocks, next->first,
                                                                              next->last, following));
        Ahead keys(shape, call.keys, has_more ? following : offsets);
        for (int t = 0; t < count; t += kTogether)
            for (int h = 0; h < num_heads; ++h) {
                for (int i = 0; has_more && i < kTogether; ++i) keys.fetch();
                add_all_values<Type>(shape, scratch.scores + size_t(h) * kTile + t,
                                     call.values + h / shape.group * head_bytes,
                                     call.values + shape.scale_offset(h / shape.group), offsets + t,
                                     count - t < kTogether ? count - t : kTogether,
                                     scratch.accumulators + size_t(h) * padded);
            }
        int64_t* done = offsets;
        offsets = following;
        following = done;
        count = following_count;
    }

    finish_piece<typename Type::Rows>(shape, call, piece, scratch, partials);
}

template <typename Type>
void merge_typed(const Shape& shape, const Call& call, int64_t row, const Scratch& scratch, const float* partials, int64_t count) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim(), stride = shape.partial_floats();
    char* out = call.out + row * call.out_row_bytes;
    float* merged = scratch.accumulators;
    for (int h = 0; h < num_heads; ++h) {
        const float* part = partials + size_t(h) * stride;
        const size_t step = size_t(num_heads) * stride;
        float most = kLowest, sum = 0.0f;
        for (int64_t i = 0; i < count; ++i) most = part[i * step + padded] > most ? part[i * step + padded] : most;
        std::memset(merged, 0, padded * sizeof(float));
        for (int64_t i = 0; i < count; ++i) {
            const float* own = part + i * step;
            const float share = exponential_of(own[padded] - most);
            sum += share * own[padded + 1];
            for (int d = 0; d < padded; d += WIDTH) store(&merged[d], load(&merged[d]) + load(own + d) * share);
        }
        write_head<Type>(shape, merged, sum, out + h * shape.row_head_bytes());
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace paged
