// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL the namespace
//   WIDTH floats per vector
//   MAX_ROWS rows whose sums fit in the registers twice, of a block and of all: 2 * kVectors * MAX_ROWS, and operands
//   HAS_BF16_DOT whether there are products of bfloat16, HAS_INT8_DOT of int8
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace products {
namespace LEVEL {
namespace {

#include "vectors.h"
#include "results_level.h"

constexpr int kColumns = kVectors * WIDTH;
// Up to MAX_ROWS rows are multiplied straight from the packed weights, their sums in registers from first to last; of
// more, so many at a time. Few: registers stay free, so that the processor begins with the next tile while the sums of
// the last one are being scaled.
constexpr int kTileRows = MAX_ROWS < 5 ? MAX_ROWS : 5;
constexpr int64_t kBytesAhead = 8192;  // of the weights, fetched from memory meanwhile

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int8_t SignedBytes __attribute__((vector_size(WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

// MXFP4's quants: 12 plus twice 0, 0.5, 1, 1.5, 2, 3, 4, 6, and minus that.
alignas(16) constexpr uint8_t kFloatsOf4Bits[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <typename T>
inline T read(const void* from) {
    T x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats numbers(Ints x) { return __builtin_convertvector(x, Floats); }

// What differs between the instruction sets.
#if WIDTH == 16
inline Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Floats broadcast(float x) { return (Floats)_mm512_set1_ps(x); }
inline Ints broadcast(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
inline Floats from_halves(const char* from) { return (Floats)_mm512_cvtph_ps(read<__m256i>(from)); }
inline Floats from_bytes(const char* from) { return numbers((Ints)_mm512_cvtepu8_epi32(read<__m128i>(from))); }
inline Floats from_signed_bytes(const char* from) { return numbers((Ints)_mm512_cvtepi8_epi32(read<__m128i>(from))); }
inline Ints whole_bytes(const char* from) { return (Ints)_mm512_cvtepu8_epi32(read<__m128i>(from)); }
inline Words looked_up(Words numbers) {
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(read<__m128i>(kFloatsOf4Bits)), (__m512i)numbers);
}
inline Ints nearest(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
inline void store_bytes(int8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }

// sums + the products of 4 quants and 4 inputs per column.
template <Format kFormat>
inline Ints added(Ints sums, Words quants, const int8_t* inputs) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)quants, _mm512_set1_epi32(read<int32_t>(inputs)));
}
#elif WIDTH == 8
inline Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline Floats broadcast(float x) { return (Floats)_mm256_set1_ps(x); }
inline Ints broadcast(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
inline Floats from_halves(const char* from) { return (Floats)_mm256_cvtph_ps(read<__m128i>(from)); }
inline Floats from_bytes(const char* from) {
    return numbers((Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read<int64_t>(from))));
}
inline Floats from_signed_bytes(const char* from) {
    return numbers((Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(from))));
}
inline Ints whole_bytes(const char* from) {
    return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read<int64_t>(from)));
}
inline Words looked_up(Words numbers) {
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(read<__m128i>(kFloatsOf4Bits)), (__m256i)numbers);
}
inline Ints nearest(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
inline void store_bytes(int8_t* to, Ints x) {
    const __m256i words = (__m256i)x;
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(pairs, pairs));
}

#if HAS_INT8_DOT
template <Format kFormat>
inline Ints added(Ints sums, Words quants, const int8_t* inputs) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)quants, _mm256_set1_epi32(read<int32_t>(inputs)));
}
#else
// Sums of two products must fit in 16 bits: 2 * 63 * 127 do. With 8 bits |quant| * |input|, of signed quants, do.
template <Format kFormat>
inline Ints added(Ints sums, Words quants, const int8_t* inputs) {
    const __m256i four = _mm256_set1_epi32(read<int32_t>(inputs)), ones = _mm256_set1_epi16(1);
    if (quant_bits(kFormat) < 8)
        return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)quants, four), ones);
    const __m256i weights = _mm256_xor_si256((__m256i)quants, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four, weights));
    return sums + (Ints)_mm256_madd_epi16(pairs, ones);
}
#endif
#else
inline Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats broadcast(float x) { return Floats{x, x, x, x}; }
inline Ints broadcast(int32_t x) { return Ints{x, x, x, x}; }
inline Floats from_bytes(const char* from) { return numbers(__builtin_convertvector(read<Bytes>(from), Ints)); }
inline Floats from_signed_bytes(const char* from) {
    return numbers(__builtin_convertvector(read<SignedBytes>(from), Ints));
}
inline Ints whole_bytes(const char* from) { return __builtin_convertvector(read<Bytes>(from), Ints); }
inline Words looked_up(Words numbers) {
    uint8_t bytes[sizeof numbers];
    std::memcpy(bytes, &numbers, sizeof numbers);
    for (uint8_t& byte : bytes) byte = kFloatsOf4Bits[byte];
    return read<Words>(bytes);
}
inline Ints nearest(Floats x) {
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
    return (Ints)(x + magic) - (Ints)magic;
}
inline void store_bytes(int8_t* to, Ints x) {
    const SignedBytes bytes = __builtin_convertvector(x, SignedBytes);
    std::memcpy(to, &bytes, sizeof bytes);
}

inline Floats from_halves(const char* from) {
    const Words bits = __builtin_convertvector(read<Halves>(from), Words);
    const Floats size = (Floats)((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponent's bias
    return (Floats)((Words)size | (bits & 0x8000u) << 16);
}

template <Format>
inline Ints added(Ints sums, Words quants, const int8_t* inputs) {
    for (int i = 0; i < 4; ++i) sums += (Ints)(quants >> (8 * i) & 0xffu) * int32_t(inputs[i]);
    return sums;
}
#endif

// Without products of int8, AVX2 multiplies signed quants of 8 bits.
template <Format kFormat>
constexpr bool has_offset() {
    return quant_offset(kFormat) != 0 && !(WIDTH == 8 && !HAS_INT8_DOT && quant_bits(kFormat) == 8);
}

inline Floats powers_of_two(const char* from) { return (Floats)(whole_bytes(from) << 23); }

// Four quants of 4 bits per word, by their numbers where the format numbers them.
template <Format kFormat>
inline Words numbered(Words quants) {
    return kFormat == Format::mxfp4 ? looked_up(quants) : quants;
}

// A block of a panel: a byte per quant, and the scales as numbers.
template <Format kFormat>
struct Block {
    static constexpr int kScales = scales_per_block(kFormat);
    Words quants[kSteps][kVectors];
    Floats scales[kScales][kVectors];
    Floats minima[kVectors];
};

struct Heads {
    Floats scales[kVectors], minima[kVectors];
};

template <Format kFormat>
inline void read_heads(const char* from, Heads& heads) {
    for (int j = 0; j < kVectors; ++j) {
        const char* second = from + (kVectors + j) * WIDTH * scale_bytes(kFormat);
        if (has_groups(kFormat)) {
            heads.scales[j] = load((const float*)(from + j * WIDTH * 4));
            heads.minima[j] = load((const float*)second);
        } else if (kFormat == Format::mxfp4) {
            heads.scales[j] = powers_of_two(from + j * WIDTH) * 0.5f;  // quants are twice the values
        } else {
            heads.scales[j] = from_halves(from + j * WIDTH * 2);
            if (has_minima(kFormat)) heads.minima[j] = from_halves(second);
        }
    }
}

// The integers times a float16 are exact.
template <Format kFormat>
inline void read_scales(const char* from, const Heads& heads, Block<kFormat>& block) {
    for (int j = 0; j < kVectors; ++j) {
        const char* second = from + (kVectors + j) * WIDTH;
        if (kFormat == Format::q6_k) {
            block.scales[0][j] = heads.scales[j] * from_signed_bytes(from + j * WIDTH);
            block.scales[Block<kFormat>::kScales - 1][j] =
                heads.scales[j] * from_signed_bytes(second);
        } else if (kFormat == Format::q4_k) {
            block.scales[0][j] = heads.scales[j] * from_bytes(from + j * WIDTH);
            block.minima[j] = heads.minima[j] * from_bytes(second);
        } else {
            block.scales[0][j] = heads.scales[j];
            if (has_minima(kFormat)) block.minima[j] = heads.minima[j];
        }
    }
}

template <Format kFormat>
inline void read_quants(const char* from, Block<kFormat>& block) {
    constexpr int kWord = WIDTH * 4;
    if (quant_bits(kFormat) == 8) {
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; ++step)
            for (int j = 0; j < kVectors; ++j) block.quants[step][j] = read<Words>(from + (step * kVectors + j) * kWord);
        return;
    }
#pragma GCC unroll 4
    for (int pair = 0; pair < kSteps / 2; ++pair)
        for (int j = 0; j < kVectors; ++j) {
            const Words both = read<Words>(from + (pair * kVectors + j) * kWord);
            block.quants[2 * pair][j] = numbered<kFormat>(both & 0x0f0f0f0fu);
            block.quants[2 * pair + 1][j] = numbered<kFormat>(both >> 4 & 0x0f0f0f0fu);
        }
    if (quant_bits(kFormat) == 4) return;
    const char* high = from + kSteps / 2 * kVectors * kWord;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
        for (int j = 0; j < kVectors; ++j) {
            const Words four = read<Words>(high + (half * kVectors + j) * kWord);
            block.quants[4 * half][j] |= four << 4 & 0x30303030u;
            block.quants[4 * half + 1][j] |= four << 2 & 0x30303030u;
            block.quants[4 * half + 2][j] |= four & 0x30303030u;
            block.quants[4 * half + 3][j] |= four >> 2 & 0x30303030u;
        }
}

// One block of kRows rows, added to their sums. The one place where numbers are rounded, so rows are alike in any batch.
template <Format kFormat, int kRows>
inline __attribute__((always_inline)) void add_block(const Block<kFormat>& block, const InputBlock* inputs,
                                                     Floats (*__restrict sums)[kVectors]) {
    constexpr int kScales = Block<kFormat>::kScales, kPartSteps = kSteps / kScales;
#pragma GCC unroll 2
    for (int part = 0; part < kScales; ++part) {
        asm volatile("" ::: "memory");  // the sums of two parts at once do not fit in the registers
        Ints exact[kRows][kVectors];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < kVectors; ++j)
                exact[r][j] = has_offset<kFormat>() ? broadcast(inputs[r].starts[part]) : Ints{};
#pragma GCC unroll 8
        for (int step = part * kPartSteps; step < (part + 1) * kPartSteps; ++step)
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
                for (int j = 0; j < kVectors; ++j)
                    exact[r][j] = added<kFormat>(exact[r][j], block.quants[step][j], inputs[r].values + step * 4);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const Floats scale = broadcast(inputs[r].scale), sum = broadcast(inputs[r].scaled_sum);
#pragma GCC unroll 2
            for (int j = 0; j < kVectors; ++j) {
                sums[r][j] = fused(numbers(exact[r][j]), block.scales[part][j] * scale, sums[r][j]);
                if (has_minima(kFormat)) sums[r][j] = fused(block.minima[j], sum, sums[r][j]);
            }
        }
    }
}

template <Format kFormat>
inline __attribute__((always_inline)) void unpack(const char* from, const Heads& heads, Block<kFormat>& block) {
    read_scales<kFormat>(from, heads, block);
    read_quants<kFormat>(from + small_scale_bytes(kFormat) * kColumns, block);
}

// Every block of a panel, one after another. `use` takes where it is, its superblock's heads, and its index.
template <Format kFormat, typename Use>
inline __attribute__((always_inline)) void for_blocks(const BlockWeights& weights, int64_t panel, const Use& use) {
    const char* at = weights.panels + panel * weights.panel_bytes;
    Heads heads;
    for (int64_t index = 0; index < weights.num_blocks;) {
        read_heads<kFormat>(at, heads);
        at += head_bytes(kFormat) * kColumns;
        for (int i = 0; i < blocks_together(kFormat); ++i, ++index) {
            constexpr int kLines = (superblock_bytes(kFormat) * kColumns / blocks_together(kFormat) + 63) / 64;
#pragma GCC unroll 20
            for (int line = 0; line < kLines; ++line) __builtin_prefetch(at + kBytesAhead + line * 64, 0, 3);
            use(at, heads, index);
            at += block_bytes(kFormat) * kColumns;
        }
    }
}

inline void begin(const BlockWeights& weights, int64_t panel, int64_t num_rows, Floats (*sums)[kVectors]) {
    for (int64_t r = 0; r < num_rows; ++r)
        for (int j = 0; j < kVectors; ++j) sums[r][j] = load(weights.bias + (panel * kVectors + j) * WIDTH);
}

inline void finish_rows(const BlockWeights& weights, const BlockCall& call, const BlockPart& part,
                        Floats (*sums)[kVectors]) {
    for (int64_t row = part.first; row < part.last; ++row) {
        add_addends(weights, call.addends, row, part.panel, sums[row - part.first]);
        finish(weights, call.is_out_bfloat16, call.out + row * call.out_row_bytes, part.panel, sums[row - part.first]);
    }
}

template <Format kFormat, int kRows>
__attribute__((noinline)) void multiply_few(const BlockWeights& weights, const BlockCall& call, const BlockPart& part) {
    Floats sums[kRows][kVectors];
    begin(weights, part.panel, kRows, sums);
    const InputBlock* inputs = call.inputs + part.first;
    for_blocks<kFormat>(weights, part.panel, [&](const char* at, const Heads& heads, int64_t index) {
        Block<kFormat> block;
        unpack(at, heads, block);
        add_block<kFormat, kRows>(block, inputs + index * call.num_rows, sums);
    });
    finish_rows(weights, call, part, sums);
}

// One block of `num_tiles` times kRows rows.
template <Format kFormat, int kRows>
__attribute__((noinline)) void add_tiles(const Block<kFormat>& block, const InputBlock* inputs,
                                         Floats (*__restrict sums)[kVectors], int64_t num_tiles) {
    for (int64_t i = 0; i < num_tiles; ++i) add_block<kFormat, kRows>(block, inputs + i * kRows, sums + i * kRows);
}

template <Format kFormat>
struct Tiles {
    typedef void (*Tile)(const Block<kFormat>&, const InputBlock*, Floats (*)[kVectors], int64_t);

    static Tile of(int64_t num_rows) {
        static constexpr Tile tiles[] = {
            nullptr, add_tiles<kFormat, 1>, add_tiles<kFormat, 2>,
#if MAX_ROWS >= 4
            add_tiles<kFormat, 3>, add_tiles<kFormat, 4>,
#endif
#if MAX_ROWS >= 5
            add_tiles<kFormat, 5>,
#endif
        };
        static_assert(sizeof tiles / sizeof *tiles == kTileRows + 1, "a tile for every number of rows");
        return tiles[num_rows];
    }
};

// Each block is unpacked once, into the first cache, for all rows: tiles of as many rows, or of one row more. The next
// block is unpacked before this one is multiplied, on units that products leave free.
template <Format kFormat>
void multiply_many(const BlockWeights& weights, const BlockCall& call, const BlockPart& part) {
    Floats sums[kMaxBlockRows][kVectors];
    Block<kFormat> blocks[2];
    const int64_t num_rows = part.last - part.first, num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    const int64_t smaller = num_rows / num_tiles, num_larger = num_rows % num_tiles, num_smaller = num_tiles - num_larger;
    const auto tile = Tiles<kFormat>::of(smaller), larger_tile = num_larger ? Tiles<kFormat>::of(smaller + 1) : nullptr;
    const auto add = [&](int64_t index) {
        const InputBlock* inputs = call.inputs + index * call.num_rows + part.first;
        tile(blocks[index % 2], inputs, sums, num_smaller);
        if (num_larger)
            larger_tile(blocks[index % 2], inputs + smaller * num_smaller, sums + smaller * num_smaller, num_larger);
    };
    begin(weights, part.panel, num_rows, sums);
    for_blocks<kFormat>(weights, part.panel, [&](const char* at, const Heads& heads, int64_t index) {
        unpack(at, heads, blocks[index % 2]);
        if (index) add(index - 1);
    });
    add(weights.num_blocks - 1);
    finish_rows(weights, call, part, sums);
}

template <Format kFormat>
void multiply_format(const BlockWeights& weights, const BlockCall& call, const BlockPart& part) {
    switch (part.last - part.first) {
        case 1: return multiply_few<kFormat, 1>(weights, call, part);
        case 2: return multiply_few<kFormat, 2>(weights, call, part);
#if MAX_ROWS >= 4
        case 3: return multiply_few<kFormat, 3>(weights, call, part);
        case 4: return multiply_few<kFormat, 4>(weights, call, part);
#endif
#if MAX_ROWS >= 6
        case 5: return multiply_few<kFormat, 5>(weights, call, part);
        case 6: return multiply_few<kFormat, 6>(weights, call, part);
#endif
        default: return multiply_many<kFormat>(weights, call, part);
    }
}

void multiply(const BlockWeights& weights, const BlockCall& call, const BlockPart& part) {
    switch (weights.format) {
        case Format::q8_0: return multiply_format<Format::q8_0>(weights, call, part);
        case Format::q4_0: return multiply_format<Format::q4_0>(weights, call, part);
        case Format::q4_1: return multiply_format<Format::q4_1>(weights, call, part);
        case Format::q4_k: return multiply_format<Format::q4_k>(weights, call, part);
        case Format::q6_k: return multiply_format<Format::q6_k>(weights, call, part);
        case Format::g4_32: return multiply_format<Format::g4_32>(weights, call, part);
        case Format::g4_64: return multiply_format<Format::g4_64>(weights, call, part);
        case Format::g4_128: return multiply_format<Format::g4_128>(weights, call, part);
        case Format::mxfp4: return multiply_format<Format::mxfp4>(weights, call, part);
    }
}

inline Floats inputs_at(const char* from, int64_t i, bool is_bfloat16) {
    if (!is_bfloat16) return read<Floats>(from + i * 4);
    return (Floats)(__builtin_convertvector(read<Halves>(from + i * 2), Words) << 16);
}

inline Ints larger_of(Ints a, Ints b) { return a > b ? a : b; }

inline int32_t highest(Ints x) {
    if (WIDTH > 8) x = larger_of(x, HALVES(x));
    if (WIDTH > 4) x = larger_of(x, QUARTERS(x));
    x = larger_of(x, PAIRS(x));
    return larger_of(x, ONES(x))[0];
}

// Neither NaN nor an infinity can be rounded: its row becomes NaN.
inline void round_block(const char* x, bool is_bfloat16, int offset, bool has_halves, InputBlock& out) {
    constexpr int kParts = kBlock / WIDTH;
    constexpr int32_t kInfinity = 0x7f800000;
    Floats inputs[kParts];
    Ints sizes{};  // without their signs the bits of floats are in the order of the numbers, those of NaN behind them
    for (int i = 0; i < kParts; ++i) {
        inputs[i] = inputs_at(x, i * WIDTH, is_bfloat16);
        sizes = larger_of(sizes, (Ints)inputs[i] & 0x7fffffff);
    }
    const int32_t bits = highest(sizes);
    const bool is_wrong = bits >= kInfinity;
    const float step = read<float>(&bits) / 127.0f, scale = step < 1e-12f || is_wrong ? 1e-12f : step;
    const Floats inverse = broadcast(1.0f / scale);
    Floats halves[2] = {};
    for (int i = 0; i < kParts; ++i) {
        const Ints whole = is_wrong ? Ints{} : nearest(inputs[i] * inverse);
        store_bytes(out.values + i * WIDTH, whole);
        halves[i * 2 / kParts] += numbers(whole);
    }
    const int32_t first = int32_t(total(halves[0])), last = int32_t(total(halves[1]));  // exact: they are small
    out.scale = is_wrong ? __builtin_nanf("") : scale;
    out.scaled_sum = float(first + last) * scale;
    out.starts[0] = -offset * (has_halves ? first : first + last);
    out.starts[1] = -offset * last;
}

inline void round_one(const BlockRounding& call, const char* row, int64_t index, InputBlock* out) {
    round_block(row + index * kBlock * (call.is_bfloat16 ? 2 : 4), call.is_bfloat16, quant_offset(call.format),
                scales_per_block(call.format) == 2, out[index * call.num_rows]);
}

#if WIDTH == 16
#include "round_four.h"
#endif

void round(const BlockRounding& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const char* x = call.x + row * call.x_row_bytes;
        InputBlock* out = call.out + row;
#if WIDTH == 16
        if (call.num_blocks >= 4) {
            call.is_bfloat16 ? round_row<true>(call, x, out) : round_row<false>(call, x, out);
            continue;
        }
#endif
        for (int64_t index = 0; index < call.num_blocks; ++index) round_one(call, x, index, out);
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace products
