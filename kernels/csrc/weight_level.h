// How a level packs weights. Included behind products_level.h, by the same files.

namespace products {
namespace LEVEL {
namespace {

// Of two rows of a square, `distance` apart: what each keeps, and the half that it takes from the other.
#if WIDTH == 16
#define EXCHANGED(a, b, of) __builtin_shufflevector(a, b, of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), \
                                                    of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15))
#else
#define EXCHANGED(a, b, of) __builtin_shufflevector(a, b, of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7))
#endif
#define UPPER(i) ((i) & kDistance ? WIDTH + (i) - kDistance : (i))
#define LOWER(i) ((i) & kDistance ? WIDTH + (i) : (i) + kDistance)

template <int kDistance>
inline void exchange(Words* square) {
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
        if (i & kDistance) continue;
        const Words a = square[i], b = square[i + kDistance];
        square[i] = EXCHANGED(a, b, UPPER);
        square[i + kDistance] = EXCHANGED(a, b, LOWER);
    }
}

#undef EXCHANGED
#undef UPPER
#undef LOWER

// Past the caches: a packed weight is written once, and its old memory need not be read for that.
inline void put_words(char* to, Words x) {
#if WIDTH == 16
    _mm512_stream_si512((__m512i*)to, (__m512i)x);
#else
    _mm256_stream_si256((__m256i*)to, (__m256i)x);
#endif
}

void interleave(const char* const* rows, int64_t num_steps, char* words) {
    int64_t step = 0;
    for (; step + WIDTH <= num_steps; step += WIDTH) {
        Words square[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) std::memcpy(&square[i], rows[i] + step * 4, sizeof square[i]);
#if WIDTH == 16
        exchange<8>(square);
#endif
        exchange<4>(square);
        exchange<2>(square);
        exchange<1>(square);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) put_words(words + (step + i) * kStepBytes, square[i]);
    }
    for (; step < num_steps; ++step)
        for (int i = 0; i < WIDTH; ++i) std::memcpy(words + step * kStepBytes + i * 4, rows[i] + step * 4, 4);
    _mm_sfence();
}

inline float widened(uint16_t x, bool is_float16) {
    // The exponent of a float16 is 112 less; multiplying puts that right also of numbers below the smallest normal one.
    uint32_t bits = is_float16 ? uint32_t(x & 0x7fffu) << 13 : uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (!is_float16) return value;
    value *= 0x1p112f;
    std::memcpy(&bits, &value, sizeof bits);
    bits |= (x & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    bits |= uint32_t(x & 0x8000u) << 16;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <bool kIsFloat16>
void widen(const uint16_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = widened(from[i], kIsFloat16);
}

void narrow(const float* from, int64_t count, uint16_t* to) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, from + i, sizeof bits);
        const bool is_number = from[i] == from[i];
        to[i] = uint16_t((is_number ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u) >> 16);
    }
}

constexpr int64_t kConverted = 512;  // at a time

void convert(const char* from, Numbers numbers, int64_t count, Numbers wanted, char* to) {
    const auto halves = (const uint16_t*)from;
    if (wanted == Numbers::float32)
        return numbers == Numbers::float16 ? widen<true>(halves, count, (float*)to) : widen<false>(halves, count, (float*)to);
    if (numbers == Numbers::float32) return narrow((const float*)from, count, (uint16_t*)to);
    float wide[kConverted];
    for (int64_t i = 0; i < count; i += kConverted) {
        const int64_t here = count - i < kConverted ? count - i : kConverted;
        widen<true>(halves + i, here, wide);
        narrow(wide, here, (uint16_t*)to + i);
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace products
