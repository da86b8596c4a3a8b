// The shapes of tiles. To be included inside a level's own namespace, where there are tiles.

constexpr int kTileRows = 16, kTileBytes = 64;

// As the processor reads them.
struct TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes = kTileBytes) {
        row_bytes[tile] = uint16_t(num_bytes);
        rows[tile] = uint8_t(num_rows);
    }
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

// What was written is in memory before a tile is loaded: the compiler does not know what is read then.
inline void finish_writing() { __asm__ volatile("" ::: "memory"); }
