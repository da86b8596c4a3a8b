// Caches of 8 bits: how heads of int8 elements and their scales are read. To be included inside a level's own namespace,
// after attention_types.h.

typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

inline float scale_at(const char* from) {
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    return scale;
}

// `valid` elements, WIDTH at most, as floats; the others are 0.
inline Floats widened_bytes(const char* from, int64_t valid) {
#if WIDTH == 16
    const __m128i bytes = valid >= WIDTH ? _mm_loadu_si128((const __m128i*)from)
                                         : _mm_maskz_loadu_epi8(__mmask16((1u << valid) - 1), from);
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
    Bytes bytes{};
    if (valid >= WIDTH)
        std::memcpy(&bytes, from, sizeof bytes);
    else if (valid > 0)
        std::memcpy(&bytes, from, valid);
#if WIDTH == 8
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)bytes)));
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
#endif
}

// Rows of bfloat16 in their natural order, as heads of int8 are read.
struct NaturalBFloat16 {
    static constexpr int kElements = WIDTH, kVectors = 1, kBytes = 2;
    typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

    static inline void unit(const char* from, int64_t valid, Floats* out) {
        Halves halves{};
        std::memcpy(&halves, from, valid >= kElements ? sizeof halves : valid * kBytes);
        *out = (Floats)(__builtin_convertvector(halves, Words) << 16);
    }
    static inline void put(char* to, int64_t valid, const Floats* in) {
        const Halves halves = __builtin_convertvector(rounded(*in) >> 16, Halves);
        std::memcpy(to, &halves, valid >= kElements ? sizeof halves : valid * kBytes);
    }
};

// A cache of int8, read by queries of another type: elements are widened to floats, and scales multiply scores and weights.
template <typename RowType>
struct Int8 {
    typedef RowType Rows;
    static constexpr int kElements = WIDTH, kVectors = 1, kBytes = 1;
    static constexpr bool kHasScales = true;

    static inline void unit(const char* from, int64_t valid, Floats* out) { *out = widened_bytes(from, valid); }
};
