// Vectors of WIDTH floats, for the kernels of one level. To be included inside the level's own namespace, after all other
// headers: what it defines is compiled for that level's instructions and must not be taken for another's.

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline Floats same(float x) { return Floats{} + x; }

#if HAS_BF16_DOT
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
#endif

#if WIDTH == 16
#define HALVES(x) __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define QUARTERS(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define PAIRS(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define ONES(x) __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#elif WIDTH == 8
#define HALVES(x) (x)
#define QUARTERS(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define PAIRS(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
#define ONES(x) __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define HALVES(x) (x)
#define QUARTERS(x) (x)
#define PAIRS(x) __builtin_shufflevector(x, x, 2, 3, 0, 1)
#define ONES(x) __builtin_shufflevector(x, x, 1, 0, 3, 2)
#endif

inline float total(Floats x) {
    if (WIDTH > 8) x += HALVES(x);
    if (WIDTH > 4) x += QUARTERS(x);
    x += PAIRS(x);
    return (x + ONES(x))[0];
}

inline float highest(Floats x) {
    if (WIDTH > 8) x = larger(x, HALVES(x));
    if (WIDTH > 4) x = larger(x, QUARTERS(x));
    x = larger(x, PAIRS(x));
    return larger(x, ONES(x))[0];
}

// e^x for x <= 0; 0 below -87 and of NaN. Relative error under 2e-7.
inline Floats exponential(Floats x) {
    const Ints is_normal = x > -87.0f;
    x = larger(x, same(-87.0f));
    const Floats magic = same(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    Floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Floats y = same(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Ints power = ((Ints)shifted) << 23;
    return (Floats)(((Ints)y + power) & is_normal);
}

inline Floats sigmoid(Floats x) {
    const Floats e = exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : same(1.0f)) / (e + 1.0f);
}

// Nearest bfloat16 (to even), in the upper half of each word. NaN stays NaN.
inline Words rounded(Floats x) {
    const Words bits = (Words)x;
    const Words nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Ints is_number = x == x;
    return ((nearest & (Words)is_number) | ((bits | 0x400000u) & ~(Words)is_number)) & 0xffff0000u;
}
