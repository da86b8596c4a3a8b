// The kernels of one level. Included by one source file per level, which sets the target and defines LEVEL, WIDTH and
// HAS_BF16_DOT (see rows_level.h) after all headers.
//
// A result is summed in one order, whatever rows are computed beside it: in A x, inputs k, k + 4, k + 8, ... first to
// last, for each k below 4, then the four sums as a tree; in B s, from the first rank to the last.

namespace lora {
namespace LEVEL {
namespace {

#include "../vectors.h"

constexpr int kPhases = 4;

inline float number_at(const char* row, int64_t k, bool is_bfloat16) {
    float x;
    if (!is_bfloat16) {
        std::memcpy(&x, row + k * 4, sizeof x);
        return x;
    }
    uint16_t half;
    std::memcpy(&half, row + k * 2, sizeof half);
    const uint32_t bits = uint32_t(half) << 16;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <int kCount, bool kIsBFloat16>
void shrink_rows(const Shrink& call) {
    Floats sums[kCount][kPhases] = {};
    const int64_t num_whole = call.in_width / kPhases * kPhases;
    for (int64_t k = 0; k < num_whole; k += kPhases)
#pragma GCC unroll 4
        for (int phase = 0; phase < kPhases; ++phase) {
            const Floats weights = load(call.panel + (k + phase) * WIDTH);
#pragma GCC unroll 4
            for (int r = 0; r < kCount; ++r)
                sums[r][phase] = sums[r][phase] + weights * number_at(call.x[r], k + phase, kIsBFloat16);
        }
    for (int64_t k = num_whole; k < call.in_width; ++k) {
        const Floats weights = load(call.panel + k * WIDTH);
        for (int r = 0; r < kCount; ++r) {
            const int phase = int(k - num_whole);
            sums[r][phase] = sums[r][phase] + weights * number_at(call.x[r], k, kIsBFloat16);
        }
    }
    for (int r = 0; r < kCount; ++r)
        store(call.out[r], (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
}

template <bool kIsBFloat16>
void shrink_typed(const Shrink& call, int num_rows) {
    switch (num_rows) {
        case 1: return shrink_rows<1, kIsBFloat16>(call);
        case 2: return shrink_rows<2, kIsBFloat16>(call);
        case 3: return shrink_rows<3, kIsBFloat16>(call);
        case 4: return shrink_rows<4, kIsBFloat16>(call);
    }
}

void shrink(const Shrink& call, int num_rows) {
    return call.is_bfloat16 ? shrink_typed<true>(call, num_rows) : shrink_typed<false>(call, num_rows);
}

template <int kCount, int kWide>
inline void expand_vectors(const Expand& call, int64_t first) {
    const float* panels = call.panels + first / WIDTH * call.rank * WIDTH;
    Floats sums[kCount][kWide] = {};
    for (int64_t k = 0; k < call.rank; ++k)
#pragma GCC unroll 4
        for (int j = 0; j < kWide; ++j) {
            const Floats weights = load(panels + (j * call.rank + k) * WIDTH);
#pragma GCC unroll 4
            for (int r = 0; r < kCount; ++r) sums[r][j] = sums[r][j] + weights * call.x[r][k];
        }
    for (int r = 0; r < kCount; ++r)
        for (int j = 0; j < kWide; ++j) {
            const int64_t column = first + j * WIDTH, valid = call.num_columns - column;
            if (valid >= WIDTH)
                store(call.out[r] + column, sums[r][j]);
            else
                std::memcpy(call.out[r] + column, &sums[r][j], valid * sizeof(float));
        }
}

template <int kCount>
void expand_rows(const Expand& call) {
    int64_t column = 0;
    for (; column + (kVectors - 1) * WIDTH < call.num_columns; column += kVectors * WIDTH)
        expand_vectors<kCount, kVectors>(call, column);
    for (; column < call.num_columns; column += WIDTH) expand_vectors<kCount, 1>(call, column);
}

void expand(const Expand& call, int num_rows) {
    switch (num_rows) {
        case 1: return expand_rows<1>(call);
        case 2: return expand_rows<2>(call);
        case 3: return expand_rows<3>(call);
        case 4: return expand_rows<4>(call);
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace lora
