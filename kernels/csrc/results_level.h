// From sums to results: nonlinearities and gates. To be included inside a level's own namespace, behind vectors.h.

// (1 + erf(x / sqrt(2))) / 2, to 1e-7. Abramowitz and Stegun 7.1.26.
inline Floats normal_share(Floats x) {
    const Floats z = (x < 0.0f ? -x : x) * 0.70710678f;
    const Floats t = same(1.0f) / (z * 0.3275911f + 1.0f);
    const Floats tail =
        ((((t * 1.061405429f - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const Floats outside = tail * exponential(-z * z) * 0.5f;
    return x < 0.0f ? outside : 1.0f - outside;
}

inline Floats activated(Floats x, Activation activation) {
    switch (activation) {
        case Activation::none: return x;
        case Activation::relu: return x < 0.0f ? Floats{} : x;  // NaN stays NaN
        case Activation::relu2: return x < 0.0f ? Floats{} : x * x;
        case Activation::silu: return x * sigmoid(x);
        case Activation::gelu: return x * normal_share(x);
        // (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        case Activation::gelu_tanh: return x * sigmoid((x + x * x * x * 0.044715f) * 1.5957691216f);
        case Activation::clamped_silu: return x * sigmoid(x * 1.702f);
    }
    return x;
}

inline Floats gated(Floats gate, Floats up, Activation activation) {
    if (activation != Activation::clamped_silu) return activated(gate, activation) * up;
    const Floats limit = same(7.0f);  // comparisons leave NaN
    up = up > limit ? limit : up < -limit ? -limit : up;
    return activated(gate > limit ? limit : gate, activation) * (up + 1.0f);
}

// `valid` results, WIDTH at most.
inline void put(char* to, Floats x, int64_t valid, bool is_bfloat16) {
#if HAS_BF16_DOT
    const __mmask16 mask = valid >= WIDTH ? 0xffff : __mmask16((1u << valid) - 1);
    if (is_bfloat16) return _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)x));
    _mm512_mask_storeu_ps(to, mask, (__m512)x);
#else
    if (!is_bfloat16) {
        if (valid >= WIDTH) return store((float*)to, x);
        std::memcpy(to, &x, valid * sizeof(float));
        return;
    }
    const Words words = rounded(x);
    for (int64_t i = 0; i < WIDTH && i < valid; ++i) {
        const uint16_t half = uint16_t(words[i] >> 16);
        std::memcpy(to + i * 2, &half, sizeof half);
    }
#endif
}

// `valid` numbers, WIDTH at most; the others are 0.
inline Floats some_addends(const float* from, int64_t valid) {
    if (valid >= WIDTH) return load(from);
    Floats x{};
    std::memcpy(&x, from, valid * sizeof(float));
    return x;
}

// The sums of one row by one panel, with its addends.
template <typename AnyWeights>
inline void add_addends(const AnyWeights& weights, const Addends& addends, int64_t row, int64_t panel, Floats* sums) {
    if (!addends.of_row || addends.of_row[row] < 0) return;
    const float* own = addends.values + addends.of_row[row] * addends.stride;
    for (int j = 0; j < kVectors; ++j) {
        const int64_t column = weights.is_gated ? panel * WIDTH : (panel * kVectors + j) * WIDTH;
        if (column >= weights.out_width) continue;
        const float* from = own + column + (weights.is_gated ? j * addends.up_column : 0);
        sums[j] += some_addends(from, weights.out_width - column);
    }
}

// One row by one panel, whatever is to be done with it: `weights` has out_width, activation, is_gated.
template <typename AnyWeights>
inline void finish(const AnyWeights& weights, bool is_out_bfloat16, char* out, int64_t panel, const Floats* sums) {
    const int64_t element_bytes = is_out_bfloat16 ? 2 : 4;
    if (weights.is_gated) {
        const int64_t column = panel * WIDTH;
        return put(out + column * element_bytes, gated(sums[0], sums[1], weights.activation),
                   weights.out_width - column, is_out_bfloat16);
    }
    for (int j = 0; j < kVectors; ++j) {
        const int64_t column = (panel * kVectors + j) * WIDTH;
        if (column < weights.out_width)
            put(out + column * element_bytes, activated(sums[j], weights.activation), weights.out_width - column,
                is_out_bfloat16);
    }
}
