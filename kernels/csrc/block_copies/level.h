// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL the namespace
//   VECTOR_BYTES of its vectors: 16, 32 or 64
//   PRODUCTS(x), STREAM(to, x) where the level has instructions for them: the products of the two halves of every word;
//   a store past the caches. STREAM comes with FENCE()
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace block_copies {
namespace LEVEL {
namespace {

typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));

constexpr int kStripe = 64;             // bytes that eight sums take at a time
constexpr int kParts = kStripe / VECTOR_BYTES;
constexpr int64_t kRound = 1024;        // bytes after which the sums are mixed
constexpr int64_t kFetchedAhead = 2048; // bytes

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

// Where in the secret the keys of the last stripe, of mixing and of merging begin.
constexpr int kLastKey = 121, kMixKey = 128, kMergeKey = 11;

// XXH3's default secret, in words.
alignas(64) constexpr uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu,
    0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u,
    0x4ef90da297486471u, 0xd8acdea946ef1938u, 0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au,
    0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu,
};

inline const char* secret_from(int at) { return reinterpret_cast<const char*>(kSecret) + at; }

inline Words load(const void* from) {
    Words x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

inline uint64_t word(const char* from) {
    uint64_t x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

inline Words products_of_halves(Words x) {
#ifdef PRODUCTS
    return PRODUCTS(x);
#else
    return (x & 0xffffffffu) * (x >> 32);
#endif
}

// Every word in the place of its neighbour.
inline Words swapped(Words x) {
#if VECTOR_BYTES == 64
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#elif VECTOR_BYTES == 32
    return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#else
    return __builtin_shufflevector(x, x, 1, 0);
#endif
}

template <Stores how>
inline void store(char* to, Words x) {
    if (how == Stores::none) return;
#ifdef STREAM
    if (how == Stores::streamed) return STREAM(to, x);
#endif
    __builtin_memcpy(to, &x, sizeof x);
}

struct Sums {
    Words parts[kParts];
};

inline Sums first_sums() {
    alignas(64) const uint64_t words[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                           kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    Sums sums;
    __builtin_memcpy(&sums, words, sizeof sums);
    return sums;
}

// Reads one stripe, writes it, and adds it to the sums.
template <Stores how, bool is_summed>
inline void take(const char* source, char* target, int key, Sums& sums) {
    for (int part = 0; part < kParts; ++part) {
        const Words x = load(source + part * VECTOR_BYTES);
        store<how>(target + part * VECTOR_BYTES, x);
        if (!is_summed) continue;
        const Words mixed = x ^ load(secret_from(key + part * VECTOR_BYTES));
        sums.parts[part] += products_of_halves(mixed) + swapped(x);
    }
}

template <Stores how, bool is_summed>
inline void take_stripes(const char* source, char* target, int64_t count, Sums& sums) {
    for (int64_t stripe = 0; stripe < count; ++stripe)
        take<how, is_summed>(source + stripe * kStripe, target + stripe * kStripe, int(stripe) * 8, sums);
}

inline void mix(Sums& sums) {
    for (int part = 0; part < kParts; ++part) {
        Words& sum = sums.parts[part];
        sum = (sum ^ (sum >> 47) ^ load(secret_from(kMixKey + part * VECTOR_BYTES))) * kPrime32_1;
    }
}

inline uint64_t merged(const Sums& sums, int64_t num_bytes) {
    uint64_t words[8];
    __builtin_memcpy(words, &sums, sizeof words);
    uint64_t result = uint64_t(num_bytes) * kPrime64_1;
    for (int pair = 0; pair < 4; ++pair) {
        const uint64_t left = words[2 * pair] ^ word(secret_from(kMergeKey + 16 * pair));
        const uint64_t right = words[2 * pair + 1] ^ word(secret_from(kMergeKey + 16 * pair + 8));
        const unsigned __int128 product = (unsigned __int128)left * right;
        result += uint64_t(product) ^ uint64_t(product >> 64);
    }
    result = (result ^ result >> 37) * 0x165667919E3779F9u;
    return result ^ result >> 32;
}

inline void fetch(const char* from) {
    for (int64_t at = 0; at < kRound; at += kStripe) __builtin_prefetch(from + at);
}

// Takes rounds straight from the source. All of a block's but the last: after that the sums are not mixed.
template <Stores how, bool is_summed>
inline void take_rounds(const Block& block, int64_t end, Sums& sums) {
    for (int64_t at = 0; at < end; at += kRound) {
        const int64_t ahead = at + kFetchedAhead;
        fetch(ahead < block.bytes ? block.source + ahead : block.next + (ahead - block.bytes));
        take_stripes<how, is_summed>(block.source + at, block.target + at, kRound / kStripe, sums);
        if (is_summed) mix(sums);
    }
}

// Takes the rest of a block from a copy: its last stripe is padded, or has bytes in common with the one before, and
// would have to be read twice.
template <Stores how>
inline void take_copied(const Block& block, int64_t from, int64_t last, Sums& sums) {
    alignas(64) char copied[2 * kRound] = {};
    const int64_t count = block.bytes - from, padded = count < kLeastBytes ? kLeastBytes : count;
    __builtin_memcpy(copied, block.source + from, count);
    if (how != Stores::none) __builtin_memcpy(block.target + from, copied, count);
    const int64_t mixed = last - from;
    for (int64_t at = 0; at < mixed; at += kRound) {
        take_stripes<Stores::none, true>(copied + at, nullptr, kRound / kStripe, sums);
        mix(sums);
    }
    take_stripes<Stores::none, true>(copied + mixed, nullptr, (padded - mixed - 1) / kStripe, sums);
    take<Stores::none, true>(copied + padded - kStripe, nullptr, kLastKey, sums);
}

template <Stores how, bool is_summed>
uint64_t pass(const Block& block) {
    Sums sums = first_sums();
    const int64_t last = (block.bytes - 1) / kRound * kRound;  // where the last round begins
    if (is_summed && (block.bytes % kStripe || block.bytes < kLeastBytes)) {
        const int64_t from = last < kRound ? 0 : last - kRound;
        take_rounds<how, true>(block, from, sums);
        take_copied<how>(block, from, last, sums);
        return merged(sums, block.bytes < kLeastBytes ? kLeastBytes : block.bytes);
    }
    take_rounds<how, is_summed>(block, last, sums);
    const char* const source = block.source + last;
    char* const target = block.target + last;
    const int64_t stripes = (block.bytes - last - 1) / kStripe;
    take_stripes<how, is_summed>(source, target, stripes, sums);
    take<how, is_summed>(source + stripes * kStripe, target + stripes * kStripe, kLastKey, sums);
    return is_summed ? merged(sums, block.bytes) : 0;
}

uint64_t part_copied_and_summed(const Block& part, Stores how) {
    switch (how) {
        case Stores::none: return pass<Stores::none, true>(part);
        case Stores::cached: return pass<Stores::cached, true>(part);
        default: return pass<Stores::streamed, true>(part);
    }
}

inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 32) * 0xFF51AFD7ED558CCDu;
    x = (x ^ x >> 29) * 0xC4CEB9FE1A85EC53u;
    return x ^ x >> 32;
}

uint64_t copy_and_sum(const Block& block, Stores how) {
    uint64_t sum = 0, place = 0;
    for (int64_t at = 0; at < block.bytes; at += kPartBytes) {
        const int64_t left = block.bytes - at, bytes = left < kPartBytes ? left : kPartBytes;
        const char* const next = left > kPartBytes ? block.source + at + kPartBytes : block.next;
        place += 0x9E3779B97F4A7C15u;
        sum += mixed(part_copied_and_summed({block.source + at, block.target + at, bytes, next}, how) ^ mixed(place));
    }
    return sum;
}

void copy(const Block& block, Stores how) {
    if (how == Stores::streamed)
        pass<Stores::streamed, false>(block);
    else
        __builtin_memcpy(block.target, block.source, block.bytes);
}

void finish() {
#ifdef STREAM
    FENCE();
#endif
}

}  // namespace
}  // namespace LEVEL
}  // namespace block_copies
