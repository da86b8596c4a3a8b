// A cache of int8 where dot products of 16-bit words exist (AVX-512 VNNI): queries and weights are rounded to 16 bits, sums
// over a head or a tile are exact integers. Rounding the cache costs some hundred times as much. Decoding is in
// attention_int8_decode.h, chunks in attention_int8_chunks.h. To be included inside a level's own namespace, after
// attention_ahead.h.

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

// The factor by which numbers up to `largest` become words.
inline float word_factor(float largest) { return largest > 1e-30f ? kLargestWord / largest : 0.0f; }

// The largest magnitude / 32767, NaN where `remainders` are, and in `factor` its inverse (0 of zeros).
inline float word_scale(Floats largest, Floats remainders, float* factor) {
    const float most = highest(largest);
    *factor = word_factor(most);
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

// 2^x, NaN of NaN. Relative error under 3e-6: less than what rounding to 16 bits adds.
inline Floats exact_power_of_two(Floats x) {
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
    Floats y = same(0.0135341675f);
    y = fused(y, r, same(0.0520114639f));
    y = fused(y, r, same(0.241442753f));
    y = fused(y, r, same(0.693003836f));
    y = fused(y, r, same(1.0f));
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
}

// Bits [first, last) of the 16 from `base` on.
inline __mmask16 lanes(int first, int last, int base) {
    const int low = first - base < 0 ? 0 : first - base > 16 ? 16 : first - base;
    const int high = last - base < 0 ? 0 : last - base > 16 ? 16 : last - base;
    return __mmask16(((1u << high) - 1) & ~((1u << low) - 1));
}

// Scores of one row -> rounded weights, 0 outside [first, last); returns their sum before. `factor` makes scores powers of two,
// `most` is the highest of these. A score that is not a number makes the sum none.
__attribute__((noinline)) float round_weights(const float* scores, int count, int first, int last, float factor, float most,
                                              const float* value_factors, float* words) {
    Floats sums{};
    const bool is_whole = first == 0 && last == count;
    for (int t = 0; t < count; t += WIDTH) {
        Floats weights = exact_power_of_two(fused(load(scores + t), same(factor), same(-most)));
        if (!is_whole || t + WIDTH > count)
            weights = (Floats)_mm512_maskz_mov_ps(lanes(first, last, t), (__m512)weights);
        const __m512i rounded = _mm512_cvtps_epi32((__m512)(weights * load(value_factors + t)));
        _mm256_storeu_si256((__m256i*)(words + t / 2), _mm512_cvtsepi32_epi16(rounded));
        sums += weights;
    }
    return total(sums);
}

// How weights of a tile's values are rounded: times these factors they are words, whose sums times `scale` are sums of values.
struct ValueWords {
    alignas(64) float factors[kKeys];
    float scale;  // NaN where a scale of the values is

    // Of values [first, last) alone, whose scales these are.
    ValueWords(const float* value_scales, int first, int last) {
        Floats largest{}, remainders{};
        for (int t = 0; t < kKeys; t += WIDTH) {
            const Floats x = (Floats)_mm512_maskz_loadu_ps(lanes(first, last, t), value_scales + t);
            largest = larger(largest, x);
            remainders += x - x;
        }
        float factor;
        scale = word_scale(largest, remainders, &factor);
        for (int t = 0; t < kKeys; t += WIDTH) store(factors + t, load(value_scales + t) * factor);
    }
};
