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

// accumulator[32 * kUnits] += scale * sum over `count` tokens of word * value.
template <int kUnits>
inline void add_words(const int16_t* words, float scale, const char* values, int64_t valid, const int64_t* offsets,
                      int count, float* accumulator) {
    __m512i low[kUnits], high[kUnits];
    for (int u = 0; u < kUnits; ++u) low[u] = high[u] = _mm512_setzero_si512();
    for (int t = 0; t < count; t += 2) {
        int32_t pair;
        std::memcpy(&pair, words + t, sizeof pair);
        const __m512i both = _mm512_set1_epi32(pair);
        for (int u = 0; u < kUnits; ++u) {
            const int64_t left = u + 1 < kUnits ? 32 : valid - 32 * u;
            const __m512i a = widened_words(values + offsets[t] + 32 * u, left);
            const __m512i b = widened_words(values + offsets[t + 1] + 32 * u, left);
            low[u] = _mm512_dpwssd_epi32(low[u], _mm512_unpacklo_epi16(a, b), both);
            high[u] = _mm512_dpwssd_epi32(high[u], _mm512_unpackhi_epi16(a, b), both);
        }
    }
    for (int u = 0; u < kUnits; ++u) {
        const Floats a = (Floats)_mm512_cvtepi32_ps(low[u]), b = (Floats)_mm512_cvtepi32_ps(high[u]);
        const Floats first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const Floats last = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        float* own = accumulator + 2 * WIDTH * u;
        store(own, load(own) + first * scale);
        store(own + WIDTH, load(own + WIDTH) + last * scale);
    }
}

// accumulator[head_dim] += sum over the tile's tokens of weight * scale * value. `offsets`: of all kTile slots, those past
// the last token repeated, with weights of 0.
inline void add_tile(const Shape& shape, const float* weights, const char* values, const char* scales,
                     const int64_t* offsets, int count, float* accumulator) {
    alignas(64) float scaled[kTile];
    alignas(64) int16_t words[kTile];
    for (int t = 0; t < kTile; ++t) scaled[t] = weights[t] * scale_at(scales + offsets[t]);
    const Floats low = load(scaled), high = load(scaled + WIDTH);
    float factor;
    const float scale = word_scale(larger(low, high), (low - low) + (high - high), &factor);
    store_words(low, high, factor, words);
    int d = 0;
    for (; d + 32 < shape.head_dim; d += 64)
        add_words<2>(words, scale, values + d, shape.head_dim - d, offsets, count, accumulator + d);
    if (d < shape.head_dim) add_words<1>(words, scale, values + d, shape.head_dim - d, offsets, count, accumulator + d);
}
