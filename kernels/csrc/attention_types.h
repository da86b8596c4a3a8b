// Caches of floats and of bfloat16: how their elements are read. To be included inside a level's own namespace, after
// vectors.h.

// How a cache type is read: in units of `kElements`, each `kVectors` vectors of floats. A unit of bfloat16 is taken
// apart into its even and its odd elements, in which order accumulators and queries are kept as well.
struct Float32 {
    typedef Float32 Rows;
    static constexpr int kElements = WIDTH, kVectors = 1, kBytes = 4;
    static constexpr bool kHasScales = false;

    static inline void unit(const char* from, int64_t valid, Floats* out) {
        if (valid >= kElements) {
            std::memcpy(out, from, sizeof *out);
        } else {
            *out = Floats{};
            std::memcpy(out, from, valid * kBytes);
        }
    }
    static inline void put(char* to, int64_t valid, const Floats* in) {
        std::memcpy(to, in, valid >= kElements ? sizeof *in : valid * kBytes);
    }
};

struct BFloat16 {
    typedef BFloat16 Rows;
    static constexpr int kElements = 2 * WIDTH, kVectors = 2, kBytes = 2;
    static constexpr bool kHasScales = false;

    static inline Words raw(const char* from, int64_t valid) {
        Words x;
        if (valid >= kElements) {
            std::memcpy(&x, from, sizeof x);
        } else {
#if HAS_BF16_DOT
            x = (Words)_mm512_maskz_loadu_epi16(__mmask32((1ull << valid) - 1), from);
#else
            x = Words{};
            std::memcpy(&x, from, valid * kBytes);
#endif
        }
        return x;
    }
    static inline void unit(const char* from, int64_t valid, Floats* out) {
        const Words x = raw(from, valid);
        out[0] = (Floats)(x << 16);
        out[1] = (Floats)(x & 0xffff0000u);
    }
    static inline void put(char* to, int64_t valid, const Floats* in) {
        const Words x = (rounded(in[0]) >> 16) | rounded(in[1]);
        std::memcpy(to, &x, valid >= kElements ? sizeof x : valid * kBytes);
    }
};
