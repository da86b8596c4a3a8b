// Rows of queries times packed keys, rows of weights times packed values. To be included inside a level's own namespace, by
// attention_tiles.h.

// Vectors beside one another in registers: kRows * kColumns sums, one row of factors.
constexpr int kColumns = WIDTH == 16 ? 4 : 2;

// sums[r][c] = the product of N rows of words, `stride` apart, with kBeside vectors of each of `steps` packed lines.
template <Product kKind, int N, int kBeside>
inline __attribute__((always_inline)) void outer_products(Floats (&sums)[N][kBeside], const float* rows, size_t stride,
                                                          const float* packed, size_t line, int steps) {
    for (int s = 0; s < steps; ++s) {
        Floats factors[kBeside];
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) factors[c] = load(packed + s * line + c * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) {
            const Floats word = everywhere(rows + r * stride + s);
#pragma GCC unroll 4
            for (int c = 0; c < kBeside; ++c) sums[r][c] = multiply_add<kKind>(sums[r][c], word, factors[c]);
        }
    }
}

// The same -> products[N, kKeys]. A function of its own, in which all sums stay in registers.
template <Product kKind, int N, int kBeside>
__attribute__((noinline)) void multiply_columns(const float* rows, size_t stride, const float* packed, size_t line,
                                                int steps, float* products) {
    Floats sums[N][kBeside] = {};
    outer_products<kKind>(sums, rows, stride, packed, line, steps);
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) store(products + r * kKeys + c * WIDTH, sums[r][c]);
}

// products[N, kKeys] of the first `count` keys at least, where the order of a sum does not matter.
template <Product kKind, int N>
inline void multiply_keys(const float* queries, size_t stride, const float* keys, int words, int count, float* products) {
    int t = 0;
    for (; t + (kColumns - 1) * WIDTH < count; t += kColumns * WIDTH)
        multiply_columns<kKind, N, kColumns>(queries, stride, keys + t, kKeys, words, products + t);
    for (; t + WIDTH < count; t += 2 * WIDTH)
        multiply_columns<kKind, N, 2>(queries, stride, keys + t, kKeys, words, products + t);
    if (t < count) multiply_columns<kKind, N, 1>(queries, stride, keys + t, kKeys, words, products + t);
}

// The part of a score that four lanes sum, see attention_order.h: lanes first, first + 1, ... of each row of queries with
// those of kBeside vectors of keys. `kUnits`: words of a lane; 0: as many as there are.
template <Product kKind, int N, int kBeside, int kUnits>
inline __attribute__((always_inline)) void score_four(Floats (&sums)[N][kBeside], const float* rows, size_t stride,
                                                      const float* packed, int words, int first) {
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane) {
        Floats own[N][kBeside] = {};
        const int begin = first + lane, end = kUnits ? begin + kUnits * WIDTH : words;
#pragma GCC unroll 4
        for (int w = begin; w < end; w += WIDTH) {
            Floats keys[kBeside];
#pragma GCC unroll 4
            for (int c = 0; c < kBeside; ++c) keys[c] = load(packed + size_t(w) * kKeys + c * WIDTH);
#pragma GCC unroll 6
            for (int r = 0; r < N; ++r) {
                const Floats word = everywhere(rows + r * stride + w);
#pragma GCC unroll 4
                for (int c = 0; c < kBeside; ++c) own[r][c] = multiply_add<kKind>(own[r][c], word, keys[c]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kBeside; ++c) sums[r][c] = lane ? sums[r][c] + own[r][c] : own[r][c];
    }
}

// Where the sums of fours wait for others.
template <int N, int kBeside>
struct Fours {
    Floats sums[N][kBeside];

    inline __attribute__((always_inline)) void add_to(Floats (&others)[N][kBeside]) const {
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kBeside; ++c) others[r][c] = sums[r][c] + others[r][c];
    }
};

// Scores of N rows and kBeside vectors of keys, in the order of attention_order.h -> scores[N, kKeys].
template <Product kKind, int N, int kBeside, int kUnits>
__attribute__((noinline)) void score_columns(const float* rows, size_t stride, const float* packed, int words,
                                             float* scores) {
    Fours<N, kBeside> waiting[2];
    Floats sums[N][kBeside];
#pragma GCC unroll 1
    for (int first = 0; first < WIDTH; first += 4) {
        score_four<kKind, N, kBeside, kUnits>(sums, rows, stride, packed, words, first);
        if (first == 4 || first == 12) waiting[first / 8].add_to(sums);
        if (first == 12) waiting[0].add_to(sums);
        if (first + 4 < WIDTH) std::memcpy(waiting[first / 8].sums, sums, sizeof sums);
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) store(scores + r * kKeys + c * WIDTH, sums[r][c]);
}

template <Product kKind, int N, int kUnits>
inline void score_all(const float* queries, size_t stride, const float* keys, int words, int count, float* scores) {
    int t = 0;
#if WIDTH == 16
    for (; t + WIDTH < count; t += 2 * WIDTH)
        score_columns<kKind, N, 2, kUnits>(queries, stride, keys + t, words, scores + t);
#endif
    for (; t < count; t += WIDTH) score_columns<kKind, N, 1, kUnits>(queries, stride, keys + t, words, scores + t);
}

// scores[N, kKeys], not yet scaled, of the first `count` keys at least.
template <Product kKind, int N>
inline void score_rows(const float* queries, size_t stride, const float* keys, int words, int count, float* scores) {
    switch (words % WIDTH ? 0 : words / WIDTH) {
        case 2: return score_all<kKind, N, 2>(queries, stride, keys, words, count, scores);
        case 4: return score_all<kKind, N, 4>(queries, stride, keys, words, count, scores);
        default: return score_all<kKind, N, 0>(queries, stride, keys, words, count, scores);
    }
}

template <Product kKind, int N, int kBeside>
__attribute__((noinline)) void add_columns(const float* weights, const float* values, size_t line, int steps,
                                           float* accumulators, size_t stride) {
    Floats sums[N][kBeside];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) sums[r][c] = load(accumulators + r * stride + c * WIDTH);
    outer_products<kKind>(sums, weights, kKeys, values, line, steps);
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kBeside; ++c) store(accumulators + r * stride + c * WIDTH, sums[r][c]);
}

// accumulators[N, dim] += weights[N, keys] * values
template <Product kKind, int N>
void add_rows(const float* weights, const float* values, int dim, int steps, float* accumulators, size_t stride) {
    const int columns = dim / WIDTH;
    int c = 0;
    for (; c + kColumns <= columns; c += kColumns)
        add_columns<kKind, N, kColumns>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
    for (; c + 2 <= columns; c += 2)
        add_columns<kKind, N, 2>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
    if (c < columns)
        add_columns<kKind, N, 1>(weights, values + c * WIDTH, dim, steps, accumulators + c * WIDTH, stride);
}
