// The order in which a row's attention is reduced, the same for decodes and for chunks, so that both give the same bits: it
// depends on positions alone. Docs: docs/decisions/0021-one-order-of-reduction.md. To be included inside a level's own
// namespace, after attention_types.h.
//
//   score      a lane's products from the head's first words to its last; lanes in fours one after another; fours as a tree
//   tile       keys kKeys * i and on: weights relative to the highest score so far, values added key by key
//   section    kSection keys from kSection * i on: tiles one after another
//   context    sections one after another

// How words are multiplied: as floats, as pairs of bfloat16 summed in a float, or as pairs of 16-bit integers summed in one
// of 32 bits.
enum class Product { floats, bfloat16, integers };

template <typename Type>
constexpr Product kProduct = HAS_BF16_DOT && Type::kVectors == 2 ? Product::bfloat16 : Product::floats;

// Elements of a word.
template <typename Type>
constexpr int kDepth = kProduct<Type> == Product::bfloat16 ? 2 : 1;

constexpr float kLowest = -3.0e38f;
// The highest score may rise so far (as a power of two) before what was summed is scaled again.
constexpr float kSlack = 8.0f;

// a * b + c, rounded once where the level has such an instruction. Written out: whether a compiler fuses depends on what
// stands around.
inline Floats fused(Floats a, Floats b, Floats c) {
#if WIDTH == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDTH == 8
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < WIDTH; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

inline float fused(float a, float b, float c) { return fused(same(a), same(b), same(c))[0]; }

inline Floats everywhere(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return (Floats)(Words{} | bits);
}

template <Product kKind>
inline Floats multiply_add(Floats sum, Floats a, Floats b) {
#if HAS_BF16_DOT
    if constexpr (kKind == Product::bfloat16) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    if constexpr (kKind == Product::integers) return (Floats)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#endif
    return fused(a, b, sum);
}

// Four vectors -> four, of which the first holds element 0 of every group of four of each, and so on.
#define TURNED(LOW, HIGH, EVEN, ODD)                                                                    \
    const Vector ab = __builtin_shufflevector(x[0], x[1], LOW), ab2 = __builtin_shufflevector(x[0], x[1], HIGH); \
    const Vector cd = __builtin_shufflevector(x[2], x[3], LOW), cd2 = __builtin_shufflevector(x[2], x[3], HIGH); \
    const Vector first = __builtin_shufflevector(ab, cd, EVEN), second = __builtin_shufflevector(ab, cd, ODD);   \
    const Vector third = __builtin_shufflevector(ab2, cd2, EVEN), fourth = __builtin_shufflevector(ab2, cd2, ODD)
#define ORDER(...) __VA_ARGS__

// The sums of fours of each of x[0] to x[3]: [four][vector].
template <typename Vector>
inline Vector sums_of_fours(const Vector* x) {
#if WIDTH == 16
    TURNED(ORDER(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
           ORDER(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31),
           ORDER(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           ORDER(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
#elif WIDTH == 8
    TURNED(ORDER(0, 8, 1, 9, 4, 12, 5, 13), ORDER(2, 10, 3, 11, 6, 14, 7, 15), ORDER(0, 1, 8, 9, 4, 5, 12, 13),
           ORDER(2, 3, 10, 11, 6, 7, 14, 15));
#else
    TURNED(ORDER(0, 4, 1, 5), ORDER(2, 6, 3, 7), ORDER(0, 1, 4, 5), ORDER(2, 3, 6, 7));
#endif
    return ((first + second) + third) + fourth;
}

// The sum of each of WIDTH vectors.
template <typename Vector>
inline Vector sums(const Vector* x) {
    const Vector a = sums_of_fours(x);
#if WIDTH == 16
    const Vector b = sums_of_fours(x + 4), c = sums_of_fours(x + 8), d = sums_of_fours(x + 12);
    const Vector ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                      __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const Vector cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                      __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif WIDTH == 8
    const Vector b = sums_of_fours(x + 4);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return a;
#endif
}

// 2^x for x up to about 2^7; 0 far below. Relative error under 2e-7, or, to be rounded to bfloat16, 1e-4.
template <bool kIsRounded>
inline Floats power_of_two(Floats x) {
#if WIDTH == 16
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
    Floats y;
    if constexpr (kIsRounded) {
        y = fused(same(0.0770675838f), r, same(0.227644399f));
        y = fused(y, r, same(0.695116937f));
    } else {
        y = fused(same(0.00186714449f), r, same(0.00901699997f));
        y = fused(y, r, same(0.055799935f));
        y = fused(y, r, same(0.240164444f));
        y = fused(y, r, same(0.693151295f));
    }
    y = fused(y, r, same(1.0f));
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
    const Ints is_normal = x > -126.0f;
    x = larger(x, same(-126.0f));
    const Floats magic = same(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    Floats y = same(0.00132647355f);
    y = fused(y, r, same(0.00967151765f));
    y = fused(y, r, same(0.0555073395f));
    y = fused(y, r, same(0.240222424f));
    y = fused(y, r, same(0.693147004f));
    y = fused(y, r, same(1.0f));
    return (Floats)(((Ints)y + (((Ints)shifted) << 23)) & is_normal);
#endif
}

inline float power_of_two(float x) { return power_of_two<false>(same(x))[0]; }

// Scores of keys outside [first, last) of a tile become the lowest.
inline void hide(float* scores, int first, int last, int count) {
    Ints key;
    for (int i = 0; i < WIDTH; ++i) key[i] = i;
    for (int t = 0; t < count; t += WIDTH, key += WIDTH) {
        const Ints is_read = (key >= first) & (key < last);
        store(scores + t, (Floats)(((Words)load(scores + t) & (Words)is_read) | ((Words)same(kLowest) & ~(Words)is_read)));
    }
}

// tanh(x), to 2e-7 of itself; NaN of what is not finite.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats square = x * x;
    Floats small = fused(square, same(0.0218694885f), same(-0.0539682540f));
    small = fused(small, square, same(0.133333333f));
    small = fused(small, square, same(-0.333333333f));
    small = fused(small * square, x, x);
    const Floats large = sigmoid(x * 2.0f) * 2.0f - 1.0f;
    return ((square < 0.0625f) ? small : large) + (x - x);
}

// Scores become cap * tanh(score / cap), in the units that they have.
inline void cap_scores(const Shape& shape, float* scores, int count) {
    if (!shape.cap) return;
    const float of_cap = shape.scale / shape.cap, back = shape.cap / shape.scale;
    for (int t = 0; t < count; t += WIDTH) store(scores + t, hyperbolic_tangent(load(scores + t) * of_cap) * back);
}

// What a row has summed so far. Weights are 2^(score * factor - maximum).
struct Sums {
    float* accumulator;
    float* maximum;
    float* sum;
};

// What was summed under the old maximum is scaled to `most`.
inline void raise_maximum(const Sums& row, float most, int dim) {
    const float correction = power_of_two(*row.maximum - most);
    *row.maximum = most;
    *row.sum *= correction;
    for (int d = 0; d < dim; d += WIDTH) store(row.accumulator + d, load(row.accumulator + d) * correction);
}

// What was seen of scores, and what it adds to a sum: NaN if one of them was not finite. Where weights of infinity and of
// what is no number are not finite either, only the lowest score matters.
#if WIDTH == 16
inline Floats seen(Floats before, Floats x) { return (Floats)_mm512_min_ps((__m512)before, (__m512)x); }
inline Floats remainder_of(Floats lowest) { return lowest - lowest; }
#else
inline Floats seen(Floats before, Floats x) { return before + (x - x); }
inline Floats remainder_of(Floats sum) { return sum; }
#endif

// kCount: `count`, if it is known; 0: it is not.
template <int kDepth, int kCount>
inline __attribute__((always_inline)) void soften_keys(const float* scores, int count, float factor, float* weights,
                                                       const Sums& row, int dim) {
    const int end = kCount ? kCount : count;
    Floats high = load(scores);
    Floats all = seen(Floats{}, high);
#pragma GCC unroll 4
    for (int t = WIDTH; t < end; t += WIDTH) {
        const Floats x = load(scores + t);
        high = larger(high, x);
        all = seen(all, x);
    }
    const float most = highest(high) * factor;
    if (most > *row.maximum + kSlack) raise_maximum(row, most, dim);
    const Floats factors = same(factor), shift = same(-*row.maximum);
    Floats total_weights = remainder_of(all);
#pragma GCC unroll 2
    for (int t = 0; t < end; t += 2 * WIDTH) {
        const Floats a = power_of_two<kDepth == 2>(fused(load(scores + t), factors, shift));
        const Floats b = power_of_two<kDepth == 2>(fused(load(scores + t + WIDTH), factors, shift));
        total_weights += a + b;
#if HAS_BF16_DOT
        if constexpr (kDepth == 2) {
            const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
            std::memcpy(weights + t / 2, &pairs, sizeof pairs);
            continue;
        }
#endif
        store(weights + t, a);
        store(weights + t + WIDTH, b);
    }
    *row.sum += total(total_weights);
}

// One row over one tile: scores -> weights of keys [first, last), 0 of the others of `count` (a multiple of 2 * WIDTH). A
// score that is not finite makes the sum NaN, and so fails its request. kDepth: 2 rounds the weights to bfloat16.
// `weights` may be `scores`.
template <int kDepth>
__attribute__((noinline)) void soften(float* scores, int first, int last, int count, float factor, float* weights,
                                      const Sums& row, int dim) {
    if (first > 0 || last < count) hide(scores, first, last, count);
    if (WIDTH == 16 && count == kKeys) return soften_keys<kDepth, kKeys>(scores, count, factor, weights, row, dim);
    soften_keys<kDepth, 0>(scores, count, factor, weights, row, dim);
}

// Add what was summed of a later section to `row`.
__attribute__((noinline)) void add_section(const Sums& row, const float* accumulator, float maximum, float sum, int dim) {
    const float most = maximum > *row.maximum ? maximum : *row.maximum;
    const float before = power_of_two(*row.maximum - most), now = power_of_two(maximum - most);
    *row.maximum = most;
    *row.sum = fused(*row.sum, before, sum * now);
    for (int d = 0; d < dim; d += WIDTH)
        store(row.accumulator + d, fused(load(row.accumulator + d), same(before), load(accumulator + d) * now));
}
