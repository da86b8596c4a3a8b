// Tiles of keys and values packed for many query rows. To be included inside a level's own namespace, after
// attention_level.h.
//
// Products run over words of 32 bits: a float, or a pair of bfloat16 or of 16-bit integers where these have dot products.
// Keys are packed as [word of the head][key], values as [key, or pair of keys][dimension], so that both products are sums
// of outer products: a vector of keys or dimensions times one word of each of kRows query rows, all sums in registers.

// Words of one head as queries and keys are multiplied.
template <typename Type>
inline int words_of(const Shape& shape) {
    if (kDepth<Type> == 2) return (shape.head_dim + 1) / 2;
    return Type::kVectors == 1 ? shape.head_dim : (shape.head_dim + Type::kElements - 1) / Type::kElements * Type::kElements;
}

// Dimensions of one head as values are summed: whole units.
template <typename Type>
inline int value_dim(const Shape& shape) {
    return (shape.head_dim + Type::kElements - 1) / Type::kElements * Type::kElements;
}

// Exchange the upper right and the lower left quarter of every square of 2 * DISTANCE words.
#define LIST(...) __VA_ARGS__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define STAGE(x, DISTANCE, UPPER, LOWER)                          \
    _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; ++i) if (!(i & DISTANCE)) { \
        const Floats a = x[i], b = x[i + DISTANCE];               \
        x[i] = SHUFFLED(a, b, UPPER);                             \
        x[i + DISTANCE] = SHUFFLED(a, b, LOWER);                  \
    }

inline __attribute__((always_inline)) void transpose(Floats* x) {
#if WIDTH == 16
    STAGE(x, 1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    STAGE(x, 2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    STAGE(x, 4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    STAGE(x, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif WIDTH == 8
    STAGE(x, 1, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))
    STAGE(x, 2, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
    STAGE(x, 4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#else
    STAGE(x, 1, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))
    STAGE(x, 2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#endif
}

// Keys at keys + offsets[t] -> [words, kKeys], of the first `count` keys at least.
template <typename Type, typename Source>
void pack_keys(const Shape& shape, const char* keys, const int64_t* offsets, int count, float* packed) {
    constexpr int kParts = kDepth<Type> == 2 ? 1 : Type::kVectors;
    const int units = (shape.head_dim + Type::kElements - 1) / Type::kElements;
    for (int first = 0; first < count; first += WIDTH)
        for (int u = 0; u < units; ++u) {
            const int64_t skipped = int64_t(u) * Type::kElements, valid = shape.head_dim - skipped;
            Floats squares[kParts][WIDTH];
            for (int t = 0; t < WIDTH; ++t) {
                const char* from = keys + offsets[first + t] + skipped * Source::kBytes;
                if constexpr (kDepth<Type> == 2) {
                    squares[0][t] = (Floats)Source::raw(from, valid);
                } else {
                    Floats parts[kParts];
                    Source::unit(from, valid, parts);
                    for (int p = 0; p < kParts; ++p) squares[p][t] = parts[p];
                }
            }
            for (int p = 0; p < kParts; ++p) {
                transpose(squares[p]);
                float* to = packed + size_t(u * kParts + p) * WIDTH * kKeys + first;
                for (int w = 0; w < WIDTH; ++w) store(to + w * kKeys, squares[p][w]);
            }
        }
}

// Values likewise -> [keys or pairs of keys, value_dim], a unit's even dimensions before its odd ones.
template <typename Type, typename Source>
void pack_values(const Shape& shape, const char* values, const int64_t* offsets, int count, float* packed) {
    const int units = (shape.head_dim + Type::kElements - 1) / Type::kElements;
    for (int t = 0; t < count; t += kDepth<Type>)
        for (int u = 0; u < units; ++u, packed += Type::kVectors * WIDTH) {
            const int64_t skipped = int64_t(u) * Type::kElements, valid = shape.head_dim - skipped;
            const char* from = values + skipped * Source::kBytes;
            Floats parts[Type::kVectors];
#if HAS_BF16_DOT
            if constexpr (kDepth<Type> == 2)
                pair_values(Source::raw(from + offsets[t], valid), Source::raw(from + offsets[t + 1], valid), parts);
            else
#endif
                Source::unit(from + offsets[t], valid, parts);
            for (int v = 0; v < Type::kVectors; ++v) store(packed + v * WIDTH, parts[v]);
        }
}
