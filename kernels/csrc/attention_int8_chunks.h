// Chunks over a cache of int8 where dot products of 16-bit integers exist (AVX-512 VNNI): queries and weights are rounded
// to 16 bits, keys and values widened to them, and sums over a head or a tile are exact. In float32 that is two products
// per instruction more than floats have. To be included inside a level's own namespace, by attention_tiles.h.

// Sums over a wider head could overflow 32 bits.
constexpr int kWidestIntegerHead = 512;

// Scores that are capped are floats before they are weights.
inline bool has_integer_scores(const Shape& shape) { return shape.head_dim <= kWidestIntegerHead && !shape.cap; }

// A tile of integers. A score times its key's scale is the score.
struct IntegerTile : ScaledTile {
    ValueWords words;  // of all its keys

    IntegerTile(int64_t first, int count, const char* keys, const char* values, const int64_t* offsets)
        : ScaledTile(first, count, keys, values, offsets), words(value_scales, 0, count) {}
};

// Keys are packed as pairs of dimensions, as those of bfloat16 are.
struct WidenedInt8 {
    static constexpr int kBytes = 1;

    static inline Words raw(const char* from, int64_t valid) { return (Words)widened_words(from, valid); }
};

typedef int16_t Integers __attribute__((vector_size(64)));

// Values at values + offsets[t] -> [pairs of keys, padded_dim], in natural order.
inline void pack_integer_values(const Shape& shape, const char* values, const int64_t* offsets, int count, float* packed) {
    const Integers low_pairs = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                              8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const Integers high_pairs = low_pairs + 16;
    for (int t = 0; t < count; t += 2)
        for (int d = 0; d < shape.head_dim; d += 2 * WIDTH, packed += 2 * WIDTH) {
            const __m512i a = widened_words(values + offsets[t] + d, shape.head_dim - d);
            const __m512i b = widened_words(values + offsets[t + 1] + d, shape.head_dim - d);
            store(packed, (Floats)_mm512_permutex2var_epi16(a, (__m512i)low_pairs, b));
            store(packed + WIDTH, (Floats)_mm512_permutex2var_epi16(a, (__m512i)high_pairs, b));
        }
}

// Sums of products of one row -> scores, but for the factor of the query; returns the highest of the span.
inline float scale_scores(float* scores, int count, const Span& span, const float* key_scales) {
    Floats high = same(kLowest);
    const bool is_whole = span.first == 0 && span.last == count;
    for (int t = 0; t < count; t += WIDTH) {
        Floats own = (Floats)_mm512_cvtepi32_ps((__m512i)load(scores + t)) * load(key_scales + t);
        store(scores + t, own);
        if (!is_whole || t + WIDTH > count)
            own = (Floats)_mm512_mask_mov_ps((__m512)same(kLowest), lanes(span.first, span.last, t), (__m512)own);
        high = larger(high, own);
    }
    return highest(high);
}

// What was summed before is corrected by the first; weights, relative to the highest score of the tile, count by the second.
struct Shares {
    alignas(64) float both[WIDTH];

    float& before(int r) { return both[r]; }
    float& now(int r) { return both[WIDTH / 2 + r]; }
};

// accumulators[N, dim] = accumulators * shares before + weights[N, keys] * values * shares now. `products`: [N, kKeys].
template <int N>
inline void add_integer_rows(const float* weights, const float* values, int dim, int steps, Shares& shares,
                             float* products, float* accumulators) {
    for (int first = 0; first < dim; first += kColumns * WIDTH) {
        const int columns = dim - first < kColumns * WIDTH ? 2 : kColumns;  // of heads padded to twice WIDTH
        const auto multiply = columns == 2 ? multiply_columns<Product::integers, N, 2>
                                           : multiply_columns<Product::integers, N, kColumns>;
        multiply(weights, kKeys, values + first, dim, steps, products);
        for (int r = 0; r < N; ++r)
            for (int c = 0; c < columns; ++c) {
                float* own = accumulators + size_t(r) * dim + first + c * WIDTH;
                const Floats sum = (Floats)_mm512_cvtepi32_ps((__m512i)load(products + r * kKeys + c * WIDTH));
                store(own, fused(load(own), same(shares.before(r)), sum * shares.now(r)));
            }
    }
}

// Scores of one row -> words in `weights`; its sum and its shares. `words`: of all of the tile's values.
inline void round_row(float* scores, int count, const Span& span, float factor, float most, const IntegerTile& tile,
                      float* weights, float* sum, float before, float* now) {
    const auto round = [&](const ValueWords& words) {
        const float added = round_weights(scores, count, span.first, span.last, factor, most, words.factors, weights);
        *sum = fused(*sum, before, added * *now);
        *now *= words.scale;
    };
    if (span.first == 0 && span.last == tile.count)
        round(tile.words);
    else
        round(ValueWords(tile.value_scales, span.first, span.last));
}

template <typename, int N>
void attend_rows(const Shape& shape, const Scratch& scratch, const QueryRows& rows, int at, const IntegerTile& tile) {
    static_assert(N <= WIDTH / 2);
    const int count = visible_keys(rows, at, N, tile);
    if (!count) return;
    const size_t padded = shape.padded_dim(), own = rows.first + at;
    float* queries = scratch.queries + own * padded;
    multiply_keys<Product::integers, N>(queries, padded, scratch.keys, (shape.head_dim + 1) / 2, count, scratch.scores);
    float most[N];
    Shares shares = {};
    for (int r = 0; r < N; ++r) {
        const Span span(rows, at + r, tile, count, count);
        const float factor = queries[r * padded + padded / 2];
        most[r] = span.first < span.last
                      ? scale_scores(scratch.scores + r * kKeys, count, span, tile.key_scales) * factor
                      : kLowest;
        float* maximum = &scratch.maxima[own + r];
        const float before = *maximum;
        *maximum = most[r] > before ? most[r] : before;
        shares.before(r) = before - *maximum;
        shares.now(r) = most[r] - *maximum;
    }
    store(shares.both, exact_power_of_two(load(shares.both)));
    for (int r = 0; r < N; ++r) {
        const Span span(rows, at + r, tile, count, count);
        float* weights = scratch.weights + r * kKeys;
        if (span.first < span.last) {
            round_row(scratch.scores + r * kKeys, count, span, queries[r * padded + padded / 2], most[r], tile, weights,
                      &scratch.sums[own + r], shares.before(r), &shares.now(r));
        } else {
            std::memset(weights, 0, kKeys * sizeof(float));
            shares.now(r) = 0.0f;
        }
    }
    add_integer_rows<N>(scratch.weights, scratch.values, int(padded), (count + 1) / 2, shares, scratch.scores,
                        scratch.accumulators + own * padded);
}

struct IntegerTiles {
    static constexpr bool kHasScales = true, kFetchesMeanwhile = false;

    static inline void begin(const Shape& shape, const Scratch& scratch, int num_rows) {
        const int padded = shape.padded_dim();
        for (int r = 0; r < num_rows; ++r) {
            float* query = scratch.queries + size_t(r) * padded;
            round_query(query, padded);
            query[padded / 2] *= shape.scale * 1.44269504f;
        }
    }
    static inline IntegerTile packed(const Shape& shape, const Call& call, const Scratch& scratch, int kv_head,
                                     const int64_t* offsets, int64_t first, int count) {
        const int64_t head = kv_head * shape.head_bytes(), scale = shape.scale_offset(kv_head);
        pack_keys<BFloat16, WidenedInt8>(shape, call.keys + head, offsets, count, scratch.keys);
        pack_integer_values(shape, call.values + head, offsets, count, scratch.values);
        return {first, count, call.keys + scale, call.values + scale, offsets};
    }
};
