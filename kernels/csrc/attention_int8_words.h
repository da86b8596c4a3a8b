// Decoding over a cache of int8 where dot products of 16-bit words exist (AVX-512 VNNI): queries and weights are rounded
// to 16 bits, sums over a head or a tile are exact integers. Rounding the cache costs some hundred times as much. To be
// included inside a level's own namespace, after `Ahead` of attention_level.h.

constexpr float kLargestWord = 32767.0f;

inline __m512i loaded(const void* from) { return _mm512_loadu_si512(from); }

// `valid` elements of int8, 32 at most, as words; the others are 0.
inline __m512i widened_words(const char* from, int64_t valid) {
    const __m256i bytes = valid >= 32 ? _mm256_loadu_si256((const __m256i*)from)
                                      : _mm256_maskz_loadu_epi8(__mmask32((1u << valid) - 1), from);
    return _mm512_cvtepi8_epi16(bytes);
}

// Two vectors of floats times `factor` -> 32 words in the same order.
inline void store_words(Floats low, Floats high, float factor, void* to) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)(low * factor))));
    _mm256_storeu_si256((__m256i*)to + 1, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)(high * factor))));
}

// The largest magnitude / 32767, NaN where `remainders` are, and in `factor` its inverse (0 of zeros).
inline float word_scale(Floats largest, Floats remainders, float* factor) {
    const float most = highest(largest);
    *factor = most > 1e-30f ? kLargestWord / most : 0.0f;
    return most / kLargestWord + total(remainders);
}

// One head of floats [padded_dim] -> words in its first half, and behind them their scale.
inline void round_query(float* query, int padded_dim) {
    Floats largest{}, remainders{};
    for (int d = 0; d < padded_dim; d += WIDTH) {
        const Floats x = load(query + d);
        largest = larger(largest, larger(x, -x));
        remainders += x - x;
    }
    float factor;
    const float scale = word_scale(largest, remainders, &factor);
    for (int d = 0; d < padded_dim; d += 2 * WIDTH) {
        const Floats low = load(query + d), high = load(query + d + WIDTH);
        store_words(low, high, factor, query + d / 2);
    }
    query[padded_dim / 2] = scale;
}

// Weights of one head over a tile, times the scales of its values, rounded.
struct TileWords {
    alignas(64) int16_t words[kTile];
    float scale;

    inline void round(const float* weights, const float* scales) {
        const Floats low = load(weights) * load(scales), high = load(weights + WIDTH) * load(scales + WIDTH);
        float factor;
        scale = word_scale(larger(low, high), (low - low) + (high - high), &factor);
        store_words(low, high, factor, words);
    }
};

// accumulators[kHeads, 32 * kUnits] += scale * sum over `count` tokens of word * value; of heads that share the values.
template <int kUnits, int kHeads>
inline void add_words(const TileWords* heads, const char* values, int64_t valid, const int64_t* offsets, int count,
                      float* accumulators, size_t padded) {
    __m512i low[kHeads][kUnits], high[kHeads][kUnits];
    for (int h = 0; h < kHeads; ++h)
        for (int u = 0; u < kUnits; ++u) low[h][u] = high[h][u] = _mm512_setzero_si512();
    for (int t = 0; t < count; t += 2)
        for (int u = 0; u < kUnits; ++u) {
            const int64_t left = u + 1 < kUnits ? 32 : valid - 32 * u;
            const __m512i a = widened_words(values + offsets[t] + 32 * u, left);
            const __m512i b = widened_words(values + offsets[t + 1] + 32 * u, left);
            const __m512i first = _mm512_unpacklo_epi16(a, b), last = _mm512_unpackhi_epi16(a, b);
            for (int h = 0; h < kHeads; ++h) {
                int32_t pair;
                std::memcpy(&pair, heads[h].words + t, sizeof pair);
                low[h][u] = _mm512_dpwssd_epi32(low[h][u], first, _mm512_set1_epi32(pair));
                high[h][u] = _mm512_dpwssd_epi32(high[h][u], last, _mm512_set1_epi32(pair));
            }
        }
    for (int h = 0; h < kHeads; ++h)
        for (int u = 0; u < kUnits; ++u) {
            const Floats a = (Floats)_mm512_cvtepi32_ps(low[h][u]), b = (Floats)_mm512_cvtepi32_ps(high[h][u]);
            const Floats first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const Floats last =
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            float* own = accumulators + h * padded + 2 * WIDTH * u;
            store(own, load(own) + first * heads[h].scale);
            store(own + WIDTH, load(own + WIDTH) + last * heads[h].scale);
        }
}

template <int kHeads>
inline void add_heads(const Shape& shape, const float* weights, const float* tile_scales, const char* values,
                      const int64_t* offsets, int count, float* accumulators) {
    const size_t padded = shape.padded_dim();
    TileWords heads[kHeads];
    for (int h = 0; h < kHeads; ++h) heads[h].round(weights + h * kTile, tile_scales);
    int d = 0;
    for (; d + 32 < shape.head_dim; d += 64)
        add_words<2, kHeads>(heads, values + d, shape.head_dim - d, offsets, count, accumulators + d, padded);
    if (d < shape.head_dim)
        add_words<1, kHeads>(heads, values + d, shape.head_dim - d, offsets, count, accumulators + d, padded);
}

// accumulators[group, head_dim] += sum over the tile's tokens of weight * scale * value, of the query heads of one key
// head. `offsets`: of all kTile slots, those past the last token repeated, with weights of 0.
inline void add_tile(const Shape& shape, const float* weights, const char* values, const char* scales,
                     const int64_t* offsets, int count, float* accumulators) {
    alignas(64) float tile_scales[kTile];
    for (int t = 0; t < kTile; ++t) tile_scales[t] = scale_at(scales + offsets[t]);
    int left = shape.group;
    for (; left >= 4; left -= 4) {
        add_heads<4>(shape, weights, tile_scales, values, offsets, count, accumulators);
        weights += 4 * kTile;
        accumulators += size_t(4) * shape.padded_dim();
    }
    switch (left) {
        case 3: return add_heads<3>(shape, weights, tile_scales, values, offsets, count, accumulators);
        case 2: return add_heads<2>(shape, weights, tile_scales, values, offsets, count, accumulators);
        case 1: return add_heads<1>(shape, weights, tile_scales, values, offsets, count, accumulators);
        default: return;
    }
}

// One query head against the keys of WIDTH tokens, all products in registers; not yet scaled by the query.
template <int kUnits>
inline Floats score_words(const float* query, const char* keys, const char* scales, const int64_t* offsets) {
    __m512i own[kUnits];
    for (int u = 0; u < kUnits; ++u) own[u] = loaded(query + WIDTH * u);
    Floats dots[WIDTH];
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; ++t) {
        const char* key = keys + offsets[t];
        __m512i sum = _mm512_setzero_si512();
        for (int u = 0; u < kUnits; ++u) sum = _mm512_dpwssd_epi32(sum, widened_words(key + 32 * u, 32), own[u]);
        dots[t] = (Floats)_mm512_cvtepi32_ps(sum) * scale_at(scales + offsets[t]);
    }
    return sums(dots);
}
