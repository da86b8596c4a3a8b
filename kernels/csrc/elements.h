// Elements of rows, float32 or bfloat16, as vectors of floats. To be included inside a level's own namespace, behind
// vectors.h.

typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

struct Float32 {
    static constexpr int64_t kBytes = 4;
    typedef Floats Stored;

    static inline Floats widened(Stored x) { return x; }
    static inline Stored narrowed(Floats x) { return x; }
};

struct BFloat16 {
    static constexpr int64_t kBytes = 2;
    typedef Halves Stored;

    static inline Floats widened(Stored x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

    // To the nearest, to even between two; NaN stays NaN.
    static inline Stored narrowed(Floats x) {
#if HAS_BF16_DOT
        return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
        return __builtin_convertvector(rounded(x) >> 16, Halves);
#endif
    }
};

// `valid` elements, WIDTH at most; the others are 0.
template <typename Type>
inline typename Type::Stored get(const char* from, int64_t valid) {
    typename Type::Stored x{};
    if (valid >= WIDTH)
        std::memcpy(&x, from, sizeof x);
    else
        std::memcpy(&x, from, valid * Type::kBytes);
    return x;
}

template <typename Type>
inline void put(char* to, typename Type::Stored x, int64_t valid) {
    if (valid >= WIDTH)
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, valid * Type::kBytes);
}
