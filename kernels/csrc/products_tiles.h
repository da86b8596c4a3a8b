// Products by tiles. Included behind products_level.h, by the file of the level that has them (AMX).
//
// A tile is 16 rows of 64 bytes. One of inputs has 16 rows by 16 words, one of weights 16 steps of a vector of columns,
// as a panel has them, and their product is added to a tile of sums. What a row gives depends neither on the rows beside
// it nor on how many there are: of 16 words, the products of the first numbers are added up in order, beginning with
// nothing, those of the second ones likewise, then both, and that is added to the row's sums. The level without tiles adds
// bfloat16 in another order, so few rows are multiplied by tiles too, and a row is the same in every batch.

namespace products {
namespace LEVEL {
namespace {

#include "amx_tiles.h"

constexpr int kTileSteps = 16;                            // of a panel, or words of a row
constexpr int kMostRows = 2 * kTileRows;                  // that are multiplied at a time
constexpr int64_t kBlockBytes = kTileSteps * kStepBytes;  // of 16 steps of a panel
constexpr int64_t kChunkBlocks = 12;                      // that stay in the first cache while rows pass
constexpr int64_t kChunkedRows = 512;                     // of a part with more blocks, at most

// Tiles 0 and 1 have the sums of the first rows by both vectors, 2 and 3 those of the second ones; 4 and 5 are inputs of
// the first and second rows, 6 and 7 weights of both vectors.
void shape_tiles(int num_first, int num_second) {
    constexpr int kFirst[] = {0, 1, 4}, kSecond[] = {2, 3, 5}, kWeights[] = {6, 7};
    TileShapes shapes;
    for (const int tile : kFirst) shapes.set(tile, num_first);
    for (const int tile : kSecond)
        if (num_second) shapes.set(tile, num_second);
    for (const int tile : kWeights) shapes.set(tile, kTileSteps);
    finish_writing();
    _tile_loadconfig(&shapes);
}

struct BFloat16Tiles {
    typedef Floats Sums;

    template <bool kHasSecond>
    static inline void begin(const Weights& weights, int64_t at) {
        const float* bias = weights.bias + at;
        _tile_loadd(0, bias, 0);  // the same in every row
        _tile_loadd(1, bias + WIDTH, 0);
        if (!kHasSecond) return;
        _tile_loadd(2, bias, 0);
        _tile_loadd(3, bias + WIDTH, 0);
    }

    template <bool kHasSecond>
    static inline void add() {
        _tile_dpbf16ps(0, 4, 6);
        if (kHasSecond) _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (kHasSecond) _tile_dpbf16ps(3, 5, 7);
    }
};

struct Int8Tiles {
    typedef Ints Sums;

    template <bool kHasSecond>
    static inline void begin(const Weights&, int64_t) {
        _tile_zero(0);
        _tile_zero(1);
        if (!kHasSecond) return;
        _tile_zero(2);
        _tile_zero(3);
    }

    template <bool kHasSecond>
    static inline void add() {  // inputs are unsigned, weights are not
        _tile_dpbusd(0, 4, 6);
        if (kHasSecond) _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(1, 4, 7);
        if (kHasSecond) _tile_dpbusd(3, 5, 7);
    }
};

// Rows that are multiplied together: those of the first tile, then those of the second, which may have none.
struct TileRows {
    int64_t row;
    int num_first, num_second;

    int count() const { return num_first + num_second; }
};

// Tiles of sums from or to memory, one row after another.
template <bool kHasSecond>
inline void load_sums(const void* sums, int num_first) {
    const char* at = (const char*)sums;
    _tile_loadd(0, at, kStepBytes);
    _tile_loadd(1, at + kTileBytes, kStepBytes);
    if (!kHasSecond) return;
    _tile_loadd(2, at + num_first * kStepBytes, kStepBytes);
    _tile_loadd(3, at + num_first * kStepBytes + kTileBytes, kStepBytes);
}

template <bool kHasSecond>
inline void store_sums(void* sums, int num_first) {
    char* at = (char*)sums;
    _tile_stored(0, at, kStepBytes);
    _tile_stored(1, at + kTileBytes, kStepBytes);
    if (!kHasSecond) return;
    _tile_stored(2, at + num_first * kStepBytes, kStepBytes);
    _tile_stored(3, at + num_first * kStepBytes + kTileBytes, kStepBytes);
}

// 16 steps: `words` of the panel by inputs `stride` bytes apart.
template <typename Type, bool kHasSecond>
inline void add_block(const char* words, const char* inputs, int64_t stride, int num_first) {
    _tile_loadd(6, words, kStepBytes);
    _tile_loadd(4, inputs, stride);
    _tile_loadd(7, words + kTileBytes, kStepBytes);
    if (kHasSecond) _tile_loadd(5, inputs + num_first * stride, stride);
    Type::template add<kHasSecond>();
}

// Blocks of a panel, and what comes next: `num_lines` per block are fetched from memory meanwhile.
struct Blocks {
    const char* words;  // of the panel
    int64_t first, last;
    const char* ahead;
    int64_t num_lines;
};

template <typename Type, bool kHasSecond>
void add_blocks(const Weights& weights, const Call& call, const TileRows& rows, const Blocks& blocks) {
    const char* inputs = call.x + rows.row * call.x_row_bytes;
    const int64_t num_whole = weights.num_words / kTileSteps, rest = weights.num_words % kTileSteps;
    for (int64_t block = blocks.first; block < blocks.last && block < num_whole; ++block) {
        const char* ahead = blocks.ahead + (block - blocks.first) * blocks.num_lines * 64;
        for (int64_t line = 0; line < blocks.num_lines; ++line) __builtin_prefetch(ahead + line * 64, 0, 2);
        add_block<Type, kHasSecond>(blocks.words + block * kBlockBytes, inputs + block * kTileBytes, call.x_row_bytes,
                                    rows.num_first);
    }
    if (blocks.last <= num_whole) return;
    // Behind a row there may be anything, or nothing.
    alignas(64) char ends[kMostRows][kTileBytes] = {};
    for (int i = 0; i < rows.count(); ++i)
        std::memcpy(ends[i], inputs + i * call.x_row_bytes + num_whole * kTileBytes, rest * 4);
    finish_writing();
    add_block<Type, kHasSecond>(blocks.words + num_whole * kBlockBytes, ends[0], kTileBytes, rows.num_first);
}

template <typename Sums>
inline void finish_rows(const Weights& weights, const Call& call, const TileRows& rows, int64_t panel,
                        const Sums (*sums)[kVectors]) {
    int at = 0;
    for (; at + 4 <= rows.count(); at += 4) {
        Sums four[4][kVectors];
        std::memcpy(four, sums + at, sizeof four);
        finish<4>(weights, call, rows.row + at, panel, four);
    }
    for (; at < rows.count(); ++at) {
        Sums one[1][kVectors];
        std::memcpy(one, sums + at, sizeof one);
        finish<1>(weights, call, rows.row + at, panel, one);
    }
}

// Adds blocks to the sums of some rows, which lie in `sums` before and behind.
template <typename Type, bool kHasSecond>
void add_to_sums(const Weights& weights, const Call& call, const TileRows& rows, int64_t panel, const Blocks& blocks,
                 typename Type::Sums (*sums)[kVectors]) {
    if (blocks.first == 0)
        Type::template begin<kHasSecond>(weights, panel * kVectors * WIDTH);
    else
        load_sums<kHasSecond>(sums, rows.num_first);
    add_blocks<Type, kHasSecond>(weights, call, rows, blocks);
    store_sums<kHasSecond>(sums, rows.num_first);
}

template <typename Type>
void multiply_tiles(const Weights& weights, const Call& call, const Part& part) {
    typedef typename Type::Sums Sums;
    const int64_t num_rows = part.last - part.first, num_turns = (num_rows + kMostRows - 1) / kMostRows;
    const int64_t num_blocks = weights.num_steps / kTileSteps;
    // Few rows pass a panel once, as it comes from memory; the more there are, the more often its chunks are read.
    const bool is_whole = num_turns <= 2 || num_blocks <= kChunkBlocks || num_rows > kChunkedRows;
    const int64_t chunk = is_whole ? num_blocks : kChunkBlocks;
    alignas(64) Sums sums[kChunkedRows][kVectors];
    int shaped_first = 0, shaped_second = 0;
    for (int64_t first = 0; first < num_blocks; first += chunk) {
        const int64_t last = first + chunk < num_blocks ? first + chunk : num_blocks;
        for (int64_t turn = 0; turn < num_turns; ++turn) {
            const int64_t begin = num_rows * turn / num_turns, end = num_rows * (turn + 1) / num_turns;
            const int count = int(end - begin), num_second = count > kTileRows ? count / 2 : 0;
            const TileRows rows{part.first + begin, count - num_second, num_second};
            if (rows.num_first != shaped_first || num_second != shaped_second) shape_tiles(rows.num_first, num_second);
            shaped_first = rows.num_first;
            shaped_second = num_second;
            Sums(*own)[kVectors] = sums + (is_whole ? 0 : begin);
            // Where there are several, each turn fetches its share of the same blocks of the next panel.
            const char* words = weights.panels + part.panel * num_blocks * kBlockBytes;
            const char* ahead = num_turns == 1 ? words + kNearBytes
                                               : part.next + (first + (last - first) * turn / num_turns) * kBlockBytes;
            const Blocks blocks{words, first, last, ahead, kBlockBytes / 64 / num_turns};
            if (num_second)
                add_to_sums<Type, true>(weights, call, rows, part.panel, blocks, own);
            else
                add_to_sums<Type, false>(weights, call, rows, part.panel, blocks, own);
            if (last == num_blocks) finish_rows(weights, call, rows, part.panel, own);
        }
    }
    _tile_release();  // else a change of threads would have 8 KB more to save
}

void multiply(const Weights& weights, const Call& call, const Part& part) {
    if (weights.element == Element::bfloat16)
        multiply_tiles<BFloat16Tiles>(weights, call, part);
    else
        multiply_tiles<Int8Tiles>(weights, call, part);
}

}  // namespace
}  // namespace LEVEL
}  // namespace products
