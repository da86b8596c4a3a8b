// Attention in bfloat16 by tiles (AMX). To be included inside a level's own namespace, by attention_tiles.h.
//
// A number of a score, or of what is summed of values, has the same sums in decodes and in chunks: of 32 dimensions, or of
// 32 keys, the products of even ones are added up in order, those of odd ones likewise, then both, and that is added to
// what was before. Which of the two factors has the rows of a tile changes nothing. So chunks multiply rows of queries by
// packed keys, and decodes rows of keys, as they lie in the cache, by queries.
//
// Registers: 0 to 3 sums, 4 rows of queries or weights, 5 and 6 packed keys or values; of decodes 0 and 1 sums, 2 scores of
// 16 keys, 3 queries, 4 weights, 5 and 6 values, 7 rows of keys.

#include "amx_tiles.h"

constexpr int64_t kKeyLine = kKeys * int64_t(sizeof(float));  // bytes from a row of scores, or of packed keys, to the next
constexpr int kWordsOfTile = kTileBytes / int(sizeof(float));

// Numbers too small for their exponent are zeros, as they are where tiles are multiplied.
class TinyIsZero {
   public:
    TinyIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~TinyIsZero() { _mm_setcsr(before_); }
    TinyIsZero(const TinyIsZero&) = delete;
    TinyIsZero& operator=(const TinyIsZero&) = delete;

   private:
    const unsigned before_;
};

inline int num_key_tiles(const Shape& shape) { return shape.padded_dim() / (2 * kWordsOfTile); }

// accumulators[rows, dim] += weights[rows, kWords] * values, for the rows that tiles are shaped to, kBeside * 16 dimensions.
template <int kBeside, int kWords = kKeys / 2>
inline void add_value_columns(const float* weights, const float* values, int dim, float* accumulators, int64_t stride) {
    _tile_loadd(0, accumulators, stride);
    _tile_loadd(1, accumulators + WIDTH, stride);
    if (kBeside == 4) _tile_loadd(2, accumulators + 2 * WIDTH, stride);
    if (kBeside == 4) _tile_loadd(3, accumulators + 3 * WIDTH, stride);
    const int64_t line = dim * int64_t(sizeof(float));
    for (int word = 0; word < kWords; word += kWordsOfTile) {
        const float* own = values + size_t(word) * dim;
        _tile_loadd(4, weights + word, kKeyLine);
        _tile_loadd(5, own, line);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, own + WIDTH, line);
        _tile_dpbf16ps(1, 4, 6);
        if (kBeside != 4) continue;
        _tile_loadd(5, own + 2 * WIDTH, line);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, own + 3 * WIDTH, line);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, accumulators, stride);
    _tile_stored(1, accumulators + WIDTH, stride);
    if (kBeside == 4) _tile_stored(2, accumulators + 2 * WIDTH, stride);
    if (kBeside == 4) _tile_stored(3, accumulators + 3 * WIDTH, stride);
}

// Values of `whole` keys, of which those behind `count` are zeros, as their weights are.
inline void pack_whole_values(const Shape& shape, const char* values, const int64_t* offsets, int count, int whole,
                              float* packed) {
    pack_values<BFloat16, BFloat16>(shape, values, offsets, count, packed);
    const int pairs = (count + 1) / 2, dim = value_dim<BFloat16>(shape);
    std::memset(packed + size_t(pairs) * dim, 0, size_t(whole / 2 - pairs) * dim * sizeof(float));
}

// A packed tile of keys, multiplied by tiles, while the slots of the next are fetched.
struct MatrixTile : Tile {
    NextSlots next;
};

struct MatrixTiles {
    static constexpr bool kHasScales = false, kFetchesMeanwhile = true;

    static inline void begin(const Shape&, const Scratch&, int num_rows) {
        TileShapes shapes;
        for (int tile = 0; tile < 5; ++tile) shapes.set(tile, num_rows < kTileRows ? num_rows : kTileRows);
        for (int tile = 5; tile < 7; ++tile) shapes.set(tile, kTileRows);
        finish_writing();
        _tile_loadconfig(&shapes);
    }
    static inline MatrixTile packed(const Shape& shape, const Call& call, const Scratch& scratch, int kv_head,
                                    const int64_t* offsets, int64_t first, int count) {
        const int64_t head = kv_head * shape.head_bytes();
        pack_keys<BFloat16, BFloat16>(shape, call.keys + head, offsets, count, scratch.keys);
        pack_whole_values(shape, call.values + head, offsets, count, kKeys, scratch.values);
        return {{first, count}, {}};
    }
};

// scores[16, kKeys], not yet scaled, of the first `count` keys at least.
inline void score_matrix(const Shape& shape, const float* queries, const float* keys, int count, float* scores) {
    const int64_t stride = shape.padded_dim() * int64_t(sizeof(float));
    const bool has_many = count > 2 * WIDTH;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < num_key_tiles(shape); ++i, keys += kWordsOfTile * kKeys) {
        _tile_loadd(4, queries + i * kWordsOfTile, stride);
        _tile_loadd(5, keys, kKeyLine);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + WIDTH, kKeyLine);
        _tile_dpbf16ps(1, 4, 6);
        if (!has_many) continue;
        _tile_loadd(5, keys + 2 * WIDTH, kKeyLine);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, keys + 3 * WIDTH, kKeyLine);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, scores, kKeyLine);
    _tile_stored(1, scores + WIDTH, kKeyLine);
    if (!has_many) return;
    _tile_stored(2, scores + 2 * WIDTH, kKeyLine);
    _tile_stored(3, scores + 3 * WIDTH, kKeyLine);
}

// The totals of four vectors, each in the order of `total`, or the highest numbers.
template <typename Joined>
inline __m128 joined_lanes(const Floats* x, Joined joined) {
    const Floats ab = joined(__builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                             __builtin_shufflevector(x[0], x[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    const Floats cd = joined(__builtin_shufflevector(x[2], x[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                             __builtin_shufflevector(x[2], x[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    Floats all = joined(__builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                        __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    all = joined(all, PAIRS(all));
    all = joined(all, ONES(all));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, (__m512)all));
}

// What `soften` does with four rows of kKeys scores that lie one after another, number for number.
__attribute__((noinline)) void soften_four(float* scores, float factor, const Sums& rows, size_t padded, int dim) {
    constexpr int kVectors = kKeys / WIDTH;
    Floats high[4], totals[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        high[r] = load(scores + r * kKeys);
        Floats all = seen(Floats{}, high[r]);
#pragma GCC unroll 4
        for (int t = 1; t < kVectors; ++t) {
            const Floats x = load(scores + r * kKeys + t * WIDTH);
            high[r] = larger(high[r], x);
            all = seen(all, x);
        }
        totals[r] = remainder_of(all);
    }
    const __m128 most = _mm_mul_ps(joined_lanes(high, [](Floats a, Floats b) { return larger(a, b); }), _mm_set1_ps(factor));
    const __m128 bound = _mm_add_ps(_mm_loadu_ps(rows.maximum), _mm_set1_ps(kSlack));
    if (const int rising = _mm_movemask_ps(_mm_cmpgt_ps(most, bound)))
        for (int r = 0; r < 4; ++r)
            if (rising >> r & 1)
                raise_maximum({rows.accumulator + r * padded, rows.maximum + r, rows.sum + r}, most[r], dim);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        float* own = scores + r * kKeys;
        const Floats factors = same(factor), shift = same(-rows.maximum[r]);
#pragma GCC unroll 2
        for (int t = 0; t < kKeys; t += 2 * WIDTH) {
            const Floats a = power_of_two<true>(fused(load(own + t), factors, shift));
            const Floats b = power_of_two<true>(fused(load(own + t + WIDTH), factors, shift));
            totals[r] += a + b;
            const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
            std::memcpy(own + t / 2, &pairs, sizeof pairs);
        }
    }
    const __m128 added = joined_lanes(totals, [](Floats a, Floats b) { return a + b; });
    _mm_storeu_ps(rows.sum, _mm_add_ps(_mm_loadu_ps(rows.sum), added));
}

// Rows of scores of a whole tile, which all of them read.
inline void soften_whole(const Shape& shape, const Scratch& scratch, int first, int count) {
    const int dim = value_dim<BFloat16>(shape);
    const float factor = shape.exponent_scale();
    int r = first;
    if (shape.cap)
        for (int i = 0; i < count; ++i) cap_scores(shape, scratch.scores + size_t(first + i) * kKeys, kKeys);
    for (; r + 4 <= first + count; r += 4)
        soften_four(scratch.scores + size_t(r) * kKeys, factor, sums_of(shape, scratch, r), shape.padded_dim(), dim);
    for (; r < first + count; ++r) {
        float* own = scratch.scores + size_t(r) * kKeys;
        soften<2>(own, 0, kKeys, kKeys, factor, own, sums_of(shape, scratch, r), dim);
    }
}

// Rows [at, at + count) over a tile, of which the last reads `visible` keys. Where tiles are shaped to more rows, those
// that follow in the scratch are none.
struct MatrixRun {
    int at, count, visible;

    MatrixRun(const QueryRows& rows, int first, const Tile& tile)
        : at(first),
          count(rows.count - first < kTileRows ? rows.count - first : kTileRows),
          visible(visible_keys(rows, at, count, tile)) {}

    // Whether each row reads the whole tile.
    bool is_whole(const QueryRows& rows, const Tile& tile) const {
        if (rows.last_read(at) < tile.first + kKeys - 1) return false;
        if (!rows.window) return rows.lowest <= tile.first;
        return rows.position + (at + count - 1) / rows.group - rows.window < tile.first;
    }
};

inline void score_run(const Shape& shape, const Scratch& scratch, const QueryRows& rows, const MatrixRun& run) {
    const size_t own = rows.first + run.at;
    if (run.visible)
        score_matrix(shape, scratch.queries + own * shape.padded_dim(), scratch.keys, run.visible, scratch.scores + own * kKeys);
}

// Scores of a run -> weights.
inline void soften_run(const Shape& shape, const Scratch& scratch, const QueryRows& rows, const MatrixRun& run,
                       const Tile& tile) {
    const int first = rows.first + run.at;
    if (run.is_whole(rows, tile)) return soften_whole(shape, scratch, first, run.count);
    for (int r = 0; r < run.count; ++r) {
        float* own = scratch.scores + size_t(first + r) * kKeys;
        const Span span(rows, run.at + r, tile, run.visible, kKeys);
        if (span.first >= span.last) {
            std::memset(own, 0, kKeyLine);
            continue;
        }
        cap_scores(shape, own, kKeys);
        soften<2>(own, span.first, span.last, kKeys, shape.exponent_scale(), own, sums_of(shape, scratch, first + r),
                  value_dim<BFloat16>(shape));
    }
}

inline void add_run(const Shape& shape, const Scratch& scratch, const QueryRows& rows, const MatrixRun& run) {
    const int dim = value_dim<BFloat16>(shape);
    const size_t padded = shape.padded_dim(), own = rows.first + run.at;
    const float* weights = scratch.scores + own * kKeys;
    float* accumulators = scratch.accumulators + own * padded;
    const int64_t stride = padded * sizeof(float);
    finish_writing();
    int d = 0;
    for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH)
        add_value_columns<4>(weights, scratch.values + d, dim, accumulators + d, stride);
    if (d < dim) add_value_columns<2>(weights, scratch.values + d, dim, accumulators + d, stride);
}

// The scores of a run are multiplied while those of the one before become weights.
template <typename Type>
inline void attend_tile(const Shape& shape, const Scratch& scratch, const QueryRows& rows, const MatrixTile& tile) {
    finish_writing();
    MatrixRun next(rows, 0, tile);
    score_run(shape, scratch, rows, next);
    for (int at = 0; at < rows.count; at += kTileRows) {
        const MatrixRun run = next;
        if (at + kTileRows < rows.count) {
            next = MatrixRun(rows, at + kTileRows, tile);
            score_run(shape, scratch, rows, next);
        }
        tile.next.fetch(at, at + run.count, rows.count);
        if (!run.visible) continue;
        soften_run(shape, scratch, rows, run, tile);
        add_run(shape, scratch, rows, run);
    }
}
