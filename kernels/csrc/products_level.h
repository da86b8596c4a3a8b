// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL the namespace
//   WIDTH floats per vector
//   MAX_ROWS rows whose sums fit in the registers: kVectors * MAX_ROWS, and some more for the operands; 0: tiles multiply
//   HAS_BF16_DOT whether there are instructions for products of bfloat16 and int8 (AVX-512), and for bfloat16 results;
//   without them AVX2 widens what it multiplies
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace products {
namespace LEVEL {
namespace {

#include "vectors.h"
#include "results_level.h"

constexpr int64_t kStepBytes = kVectors * WIDTH * 4;
// Of a panel that rows pass once, so much further on is fetched: as far as memory takes, and less than caches hold.
constexpr int64_t kNearBytes = 8 << 10;

// How words of weights and inputs are multiplied and summed, and what the sums are.
struct Float32 {
    typedef Floats Sums;
    static constexpr Element kElement = Element::float32;

    static inline Sums added(Sums sums, const char* weights, const char* input) {
        float x;
        std::memcpy(&x, input, sizeof x);
        return sums + load((const float*)weights) * x;
    }
};

struct BFloat16 {
    typedef Floats Sums;
    static constexpr Element kElement = Element::bfloat16;

    static inline Sums added(Sums sums, const char* weights, const char* input) {
#if HAS_BF16_DOT
        int32_t pair;
        std::memcpy(&pair, input, sizeof pair);
        return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_loadu_si512(weights),
                                      (__m512bh)_mm512_set1_epi32(pair));
#else
        uint32_t pair;
        std::memcpy(&pair, input, sizeof pair);
        Words words;
        std::memcpy(&words, weights, sizeof words);
        const Words inputs = Words{} + pair;
        sums += (Floats)(words << 16) * (Floats)(inputs << 16);
        return sums + (Floats)(words & 0xffff0000u) * (Floats)(inputs & 0xffff0000u);
#endif
    }
};

struct Int8 {
    typedef Ints Sums;
    static constexpr Element kElement = Element::int8;

    static inline Sums added(Sums sums, const char* weights, const char* inputs) {
        int32_t four;
        std::memcpy(&four, inputs, sizeof four);
#if HAS_BF16_DOT
        return (Sums)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four), _mm512_loadu_si512(weights));
#else
        // Not the instruction for bytes: it holds sums of two products in 16 bits, which some do not fit.
        const __m256i words = _mm256_loadu_si256((const __m256i*)weights), own = _mm256_set1_epi32(four);
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8), odd = _mm256_srai_epi16(words, 8);
        sums += (Ints)_mm256_madd_epi16(even, _mm256_and_si256(own, _mm256_set1_epi16(0xff)));
        return sums + (Ints)_mm256_madd_epi16(odd, _mm256_srli_epi16(own, 8));
#endif
    }
};

// Vector `j` of a panel's results.
inline void put_all(char* to, int j, Floats x, bool is_bfloat16) {
#if HAS_BF16_DOT
    if (is_bfloat16) return _mm256_storeu_si256((__m256i*)to + j, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    if (is_bfloat16) {
        const __m256i words = _mm256_srli_epi32((__m256i)rounded(x), 16);
        const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        return _mm_storeu_si128((__m128i*)to + j, halves);
    }
#endif
    store((float*)to + j * WIDTH, x);
}

// What the sums of a vector of columns begin with. `at`: its first packed column.
template <typename Sums>
inline Sums first_sums(const Weights&, int64_t) {
    return Sums{};
}

template <>
inline Floats first_sums<Floats>(const Weights& weights, int64_t at) {
    return load(weights.bias + at);
}

// The sums of one row and vector as numbers, with the bias.
inline Floats completed(const Weights&, Floats sums, int64_t, const float*) { return sums; }

inline Floats completed(const Weights& weights, Ints sums, int64_t at, const float* row_scale) {
    Ints offsets;
    std::memcpy(&offsets, weights.column_sums + at, sizeof offsets);
    const Floats exact = __builtin_convertvector(sums - offsets * 128, Floats);
    return exact * load(weights.column_scales + at) * *row_scale + load(weights.bias + at);
}

template <int kRows, typename Sums>
inline void finish(const Weights& weights, const Call& call, int64_t row, int64_t panel, const Sums (&sums)[kRows][kVectors]) {
    const int64_t at = panel * kVectors * WIDTH;
    const float* scales = call.row_scales ? call.row_scales + row : nullptr;  // of int8 alone
    char* out = call.out + row * call.out_row_bytes;
    const bool is_relu = weights.activation == Activation::relu;
    const bool is_plain = !weights.is_gated && (is_relu || weights.activation == Activation::none);
    if (!is_plain || at + kVectors * WIDTH > weights.out_width || call.addends.of_row) {
        Floats numbers[kRows][kVectors];
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < kVectors; ++j) numbers[r][j] = completed(weights, sums[r][j], at + j * WIDTH, scales + r);
        for (int r = 0; r < kRows; ++r) add_addends(weights, call.addends, row + r, panel, numbers[r]);
        for (int r = 0; r < kRows; ++r)
            finish(weights, call.is_out_bfloat16, out + r * call.out_row_bytes, panel, numbers[r]);
        return;
    }
    // Most columns of most products: nothing leaves the registers before it is done.
    const Floats lowest = same(is_relu ? 0.0f : -__builtin_inff());
    char* to = out + at * (call.is_out_bfloat16 ? 2 : 4);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
            const Floats x = larger(lowest, completed(weights, sums[r][j], at + j * WIDTH, scales + r));
            put_all(to + r * call.out_row_bytes, j, x, call.is_out_bfloat16);
        }
}

#if MAX_ROWS
// Up to so many rows there is time to fetch both lines of a step of the next panel.
constexpr int64_t kRowsAlone = (MAX_ROWS + 2) / 2;
// Steps that stay in the first cache, and tiles that pass them together, at most.
constexpr int64_t kChunkSteps = 256, kChunkedTiles = 16;

// Steps [first, last) of a panel, and what is fetched from memory meanwhile: `ahead_bytes` per step, or, while rows pass
// the panel only once, what lies a little further in it.
struct Steps {
    int64_t first, last;
    const char* ahead;
    int64_t ahead_bytes;
};

// kRows rows from `row` by some steps of one panel, the sums in registers all along; between, they lie in `kept`.
template <typename Type, int kRows, bool kIsAlone>
__attribute__((noinline)) void tile(const Weights& weights, const Call& call, int64_t row, int64_t panel,
                                    const Steps& steps, void* kept) {
    typedef typename Type::Sums Sums;
    Sums sums[kRows][kVectors];
    if (steps.first)
        std::memcpy(sums, kept, sizeof sums);
    else
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < kVectors; ++j) sums[r][j] = first_sums<Sums>(weights, (panel * kVectors + j) * WIDTH);
    const char* inputs[kRows];
    for (int r = 0; r < kRows; ++r) inputs[r] = call.x + (row + r) * call.x_row_bytes;
    const char* words = weights.panels + panel * weights.num_steps * kStepBytes;
    const char* ahead = steps.ahead;
    const int64_t ahead_bytes = steps.ahead_bytes, last = steps.last;
    for (int64_t step = steps.first; step < last; ++step) {
        const char* fetched = kIsAlone ? words + step * kStepBytes + kNearBytes : ahead;
        __builtin_prefetch(fetched, 0, 2);
        if (kRows <= kRowsAlone) __builtin_prefetch(fetched + 64, 0, 2);
        ahead += ahead_bytes;
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
            for (int j = 0; j < kVectors; ++j)
                sums[r][j] = Type::added(sums[r][j], words + step * kStepBytes + j * WIDTH * 4, inputs[r] + step * 4);
    }
    if (last == weights.num_steps)
        finish<kRows>(weights, call, row, panel, sums);
    else
        std::memcpy(kept, sums, sizeof sums);
}

typedef void (*Tile)(const Weights&, const Call&, int64_t, int64_t, const Steps&, void*);

template <typename Type, bool kIsAlone>
inline Tile tile_of(int64_t num_rows) {
#define TILE(ROWS) tile<Type, ROWS, kIsAlone && ROWS <= kRowsAlone>
    static const Tile tiles[] = {
        nullptr, TILE(1), TILE(2), TILE(3), TILE(4), TILE(5), TILE(6),
#if MAX_ROWS == 14
        TILE(7), TILE(8), TILE(9), TILE(10), TILE(11), TILE(12), TILE(13), TILE(14),
#endif
    };
#undef TILE
    static_assert(sizeof tiles / sizeof *tiles == MAX_ROWS + 1, "a tile for every number of rows");
    return tiles[num_rows];
}

template <typename Type>
void multiply_typed(const Weights& weights, const Call& call, const Part& part) {
    // Two tiles at least, where there are enough rows: one could fetch no more than a line per step, and of a panel that
    // few rows are multiplied by there are two to fetch.
    const int64_t num_rows = part.last - part.first, needed = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    if (num_rows <= kRowsAlone) {
        const Steps all{0, weights.num_steps, nullptr, 0};
        return tile_of<Type, true>(num_rows)(weights, call, part.first, part.panel, all, nullptr);
    }
    const int64_t num_tiles = needed == 1 ? 2 : needed;
    // Every tile passes some steps before any passes the next, which stay in the first cache meanwhile; each fetches its
    // share of the next ones.
    const int64_t chunk = num_tiles > kChunkedTiles ? weights.num_steps : kChunkSteps;
    const char* words = weights.panels + part.panel * weights.num_steps * kStepBytes;
    char kept[kChunkedTiles][kVectors * MAX_ROWS * WIDTH * 4];
    for (int64_t from = 0; from < weights.num_steps; from += chunk) {
        const int64_t to = from + chunk < weights.num_steps ? from + chunk : weights.num_steps;
        const int64_t bytes = (to - from) * kStepBytes;
        for (int64_t i = 0; i < num_tiles; ++i) {
            const int64_t first = part.first + num_rows * i / num_tiles;
            const int64_t last = part.first + num_rows * (i + 1) / num_tiles;
            const Steps steps{from, to, words + to * kStepBytes + bytes * i / num_tiles, kStepBytes / num_tiles};
            tile_of<Type, false>(last - first)(weights, call, first, part.panel, steps, kept[i % kChunkedTiles]);
        }
    }
}

void multiply(const Weights& weights, const Call& call, const Part& part) {
    switch (weights.element) {
        case Element::float32: return multiply_typed<Float32>(weights, call, part);
        case Element::bfloat16: return multiply_typed<BFloat16>(weights, call, part);
        case Element::int8: return multiply_typed<Int8>(weights, call, part);
    }
}
#endif

#if HAS_BF16_DOT
// Of elements [i, i + WIDTH) of a row, 0 behind its end.
inline Floats inputs_at(const Rounding& call, const char* row, int64_t i) {
    const int64_t valid = call.width - i;
    const __mmask16 mask = valid >= WIDTH ? 0xffff : __mmask16((1u << valid) - 1);
    if (!call.is_bfloat16) return (Floats)_mm512_maskz_loadu_ps(mask, row + i * 4);
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, row + i * 2);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

// The nearest integers plus 128, as bytes from `out`, `valid` at most.
inline void put_bytes(uint8_t* out, Floats x, int64_t valid) {
    const __m512i words = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)x), _mm512_set1_epi32(128));
    const __mmask16 mask = valid >= WIDTH ? 0xffff : __mmask16((1u << valid) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(out, mask, words);
}
#else
inline Floats inputs_at(const Rounding& call, const char* row, int64_t i) {
    const int64_t size = call.is_bfloat16 ? 2 : 4, valid = call.width - i;
    char words[WIDTH * 4] = {};
    std::memcpy(words, row + i * size, (valid >= WIDTH ? WIDTH : valid) * size);
    if (!call.is_bfloat16) return load((const float*)words);
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)words)), 16);
}

inline void put_bytes(uint8_t* out, Floats x, int64_t valid) {
    const Ints words = (Ints)_mm256_cvtps_epi32((__m256)x) + 128;
    for (int64_t i = 0; i < WIDTH && i < valid; ++i) out[i] = uint8_t(words[i]);
}
#endif

void round(const Rounding& call, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
        const char* row = call.x + index * call.x_row_bytes;
        Floats largest{};
        Ints is_right = Ints{} - 1;  // neither NaN nor an infinity can be rounded: the whole row becomes NaN
        for (int64_t i = 0; i < call.width; i += WIDTH) {
            const Floats x = inputs_at(call, row, i), size = x < 0.0f ? -x : x;
            largest = larger(largest, size);
            is_right &= size <= same(__FLT_MAX__);
        }
        bool is_wrong = false;
        for (int i = 0; i < WIDTH; ++i) is_wrong |= !is_right[i];
        const float step = highest(largest) / 127.0f;
        const float scale = is_wrong ? __builtin_nanf("") : step < 1e-12f ? 1e-12f : step;
        uint8_t* out = call.out + index * call.row_bytes;
        for (int64_t i = 0; i < call.row_bytes; i += WIDTH) {
            Floats x{};
            if (i < call.width) x = inputs_at(call, row, i) / scale;
            put_bytes(out + i, x, call.row_bytes - i);
        }
        call.row_scales[index] = scale;
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace products
