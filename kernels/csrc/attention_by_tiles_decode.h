// Decodes in bfloat16 by tiles (AMX): see attention_by_tiles.h, behind which this is to be included.

// Query heads that share keys, as many as a tile has columns.
struct HeadRun {
    int kv_head, first, count;  // `first` within the group

    int head(const Shape& shape) const { return kv_head * shape.group + first; }
};

inline void shape_decode(int num_heads) {
    TileShapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, num_heads);
    for (int tile = 2; tile < 4; ++tile) shapes.set(tile, kTileRows, num_heads * int(sizeof(float)));
    for (int tile = 5; tile < 8; ++tile) shapes.set(tile, kTileRows);
    finish_writing();
    _tile_loadconfig(&shapes);
}

// Queries -> scratch.dots, [key heads, words, group]. Of a group of one that is what they are.
inline void turn_queries(const Shape& shape, const Scratch& scratch) {
    const int padded = shape.padded_dim(), words = padded / 2;
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        float* to = scratch.dots + size_t(kv_head) * shape.group * words;
        for (int i = 0; i < shape.group; ++i) {
            const float* query = scratch.queries + size_t(kv_head * shape.group + i) * padded;
            for (int w = 0; w < words; ++w) std::memcpy(to + w * shape.group + i, query + w, sizeof(float));
        }
    }
}

// The keys of some tokens as they lie in the cache, or where they do not lie in lines that tiles can be read from, a copy.
struct KeyLines {
    const char* first;
    int64_t stride;

    KeyLines(const Shape& shape, const Scratch& scratch, const Piece& piece, const char* keys, const int64_t* offsets,
             bool is_whole) {
        const int units = num_key_tiles(shape);
        if (is_whole && shape.block_size % kTileRows == 0 && shape.head_dim % BFloat16::kElements == 0) {
            first = keys + offsets[0];
            stride = piece.is_reversed ? -shape.slot_bytes() : shape.slot_bytes();
            return;
        }
        for (int t = 0; t < kTileRows; ++t)
            for (int u = 0; u < units; ++u) {
                const Words own = BFloat16::raw(keys + offsets[t] + u * kTileBytes, shape.head_dim - u * BFloat16::kElements);
                std::memcpy(scratch.keys + (t * units + u) * kWordsOfTile, &own, sizeof own);
            }
        first = (const char*)scratch.keys;
        stride = units * kTileBytes;
    }
};

// Scores of 16 keys: scores[heads of the run, kKeys].
inline void score_lines(const Shape& shape, const Scratch& scratch, const HeadRun& run, const KeyLines& keys, float* scores) {
    const int64_t line = shape.group * int64_t(sizeof(float));
    const float* queries = shape.group == 1 ? scratch.queries + size_t(run.kv_head) * shape.padded_dim()
                                            : scratch.dots + size_t(run.kv_head) * shape.group * (shape.padded_dim() / 2);
    queries += run.first;
    finish_writing();
    _tile_zero(2);
    for (int i = 0; i < num_key_tiles(shape); ++i) {
        _tile_loadd(7, keys.first + i * kTileBytes, keys.stride);
        _tile_loadd(3, queries + size_t(i) * kWordsOfTile * shape.group, line);
        _tile_dpbf16ps(2, 7, 3);
    }
    if (run.count == 1) {
        _tile_stored(2, scores, sizeof(float));
        return;
    }
    Floats square[WIDTH] = {};
    _tile_stored(2, square, kTileBytes);
    transpose(square);
    for (int i = 0; i < run.count; ++i) store(scores + i * kKeys, square[i]);
}

// Tokens [lead, count) of a tile of a context.
struct DecodeTile {
    const int64_t* offsets;
    int lead, count;
};

inline void score_head_run(const Shape& shape, const Call& call, const Piece& piece, const Scratch& scratch, const HeadRun& run,
                      const DecodeTile& tile, int t) {
    const char* keys = call.keys + run.kv_head * shape.head_bytes();
    const bool is_whole = t >= tile.lead && t + kTileRows <= tile.count;
    score_lines(shape, scratch, run, KeyLines(shape, scratch, piece, keys, tile.offsets + t, is_whole),
                scratch.scores + size_t(run.head(shape)) * kKeys + t);
}

inline void soften_heads(const Shape& shape, const Scratch& scratch, const DecodeTile& tile) {
    if (tile.lead == 0 && tile.count == kKeys) return soften_whole(shape, scratch, 0, shape.num_heads());
    for (int h = 0; h < shape.num_heads(); ++h) {
        float* own = scratch.scores + size_t(h) * kKeys;
        cap_scores(shape, own, kKeys);
        soften<2>(own, tile.lead, tile.count, kKeys, shape.exponent_scale(), own, sums_of(shape, scratch, h),
                  value_dim<BFloat16>(shape));
    }
}

// The values of kValues keys, t and on.
constexpr int kValues = 2 * kWordsOfTile;

inline void add_head_run(const Shape& shape, const Scratch& scratch, const HeadRun& run, int t) {
    const int dim = value_dim<BFloat16>(shape);
    const size_t padded = shape.padded_dim(), head = run.head(shape);
    finish_writing();
    for (int d = 0; d < dim; d += 2 * WIDTH)
        add_value_columns<2, kWordsOfTile>(scratch.scores + head * kKeys + t / 2, scratch.values + d, dim,
                                           scratch.accumulators + head * padded + d, padded * sizeof(float));
}

// The same for one head, by vectors, straight from the cache: the sums of even keys are one chain, those of odd keys another.
// `count` keys, kValues at most; kUnits of 2 * WIDTH dimensions.
template <int kUnits>
inline void add_lines(const float* weights, const char* values, const int64_t* offsets, int count, int64_t valid,
                      float* accumulator) {
    Floats even[2 * kUnits] = {}, odd[2 * kUnits] = {};
    for (int t = 0; t < count; t += 2) {
        const Words pair = (Words)everywhere(weights + t / 2);
        const Floats first = (Floats)(pair << 16), second = (Floats)(pair & 0xffff0000u);
#pragma GCC unroll 4
        for (int u = 0; u < kUnits; ++u) {
            const int64_t left = u + 1 < kUnits ? int64_t(BFloat16::kElements) : valid - u * BFloat16::kElements;
            Floats a[2], b[2];
            BFloat16::unit(values + offsets[t] + u * kTileBytes, left, a);
            BFloat16::unit(values + offsets[t + 1] + u * kTileBytes, left, b);
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                even[2 * u + v] = fused(first, a[v], even[2 * u + v]);
                odd[2 * u + v] = fused(second, b[v], odd[2 * u + v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kUnits; ++v) store(accumulator + v * WIDTH, load(accumulator + v * WIDTH) + (even[v] + odd[v]));
}

inline void add_head(const Shape& shape, const Scratch& scratch, int head, const char* values, const DecodeTile& tile, int t) {
    const float* weights = scratch.scores + size_t(head) * kKeys + t / 2;
    float* accumulator = scratch.accumulators + size_t(head) * shape.padded_dim();
    const int count = tile.count - t < kValues ? tile.count - t : kValues;
    int d = 0;
    for (; d + 2 * BFloat16::kElements <= shape.head_dim; d += 2 * BFloat16::kElements, values += 2 * kTileBytes)
        add_lines<2>(weights, values, tile.offsets + t, count, 2 * BFloat16::kElements, accumulator + d);
    for (; d < shape.head_dim; d += BFloat16::kElements, values += kTileBytes)
        add_lines<1>(weights, values, tile.offsets + t, count, shape.head_dim - d, accumulator + d);
}

// Slots that are fetched ahead: values are read so many tokens at a time, head by head.
inline int slots_ahead(const Shape& shape) { return tokens_ahead(shape) > kValues ? tokens_ahead(shape) : kValues; }

// The runs of all key heads, with tiles shaped to each.
class HeadRuns {
   public:
    explicit HeadRuns(const Shape& shape) : group_(shape.group), runs_((shape.group + kTileRows - 1) / kTileRows) {}

    int count() const { return runs_; }
    HeadRun run(int kv_head, int i) {
        const int first = group_ * i / runs_, count = group_ * (i + 1) / runs_ - first;
        if (count != shaped_) shape_decode(count);
        shaped_ = count;
        return {kv_head, first, count};
    }

   private:
    int group_, runs_, shaped_ = 0;
};

// The same for all heads that share keys, by tiles.
inline void add_heads_of_key(const Shape& shape, const Scratch& scratch, HeadRuns& runs, int kv_head, const char* values,
                             const DecodeTile& tile, int t) {
    const int count = tile.count - t < kValues ? tile.count - t : kValues;
    pack_whole_values(shape, values, tile.offsets + t, count, kValues, scratch.values);
    for (int i = 0; i < runs.count(); ++i) add_head_run(shape, scratch, runs.run(kv_head, i), t);
}

void decode_by_tiles(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                     float* partials) {
    const TinyIsZero rounding;
    begin_rows<BFloat16>(shape, scratch, 0, shape.num_heads(), call.queries + piece.row * call.query_row_bytes);
    if (shape.group > 1) turn_queries(shape, scratch);
    HeadRuns runs(shape);
    int64_t tiles[2][kKeys];
    int64_t *offsets = tiles[0], *following = tiles[1];
    int64_t first = piece.first / kKeys * kKeys;
    int count = slot_offsets(shape, call, piece.blocks, piece.is_reversed, first, piece.first, piece.last, offsets);
    for (; count; first += kKeys) {
        const DecodeTile tile{offsets, piece.first > first ? int(piece.first - first) : 0, count};
        Ahead<true> values(shape, slots_ahead(shape), {call.keys, offsets, count}, {call.values, offsets, count});
        for (int t = tile.lead / kTileRows * kTileRows; t < count; t += kTileRows)
            for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
                values.fetch(kTileRows * shape.group);
                for (int i = 0; i < runs.count(); ++i) score_head_run(shape, call, piece, scratch, runs.run(kv_head, i), tile, t);
            }
        soften_heads(shape, scratch, tile);
        const int following_count =
            slot_offsets(shape, call, piece.blocks, piece.is_reversed, first + kKeys, piece.first, piece.last, following);
        const int to_come = following_count ? following_count : next_offsets(shape, call, next, following);
        Ahead<true> keys(shape, slots_ahead(shape), {call.values, offsets, count}, {call.keys, following, to_come});
        for (int t = 0; t < count; t += kValues)
            for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
                keys.fetch(kValues * shape.group);
                const char* own = call.values + kv_head * shape.head_bytes();
                if (shape.group == 1)
                    add_head(shape, scratch, kv_head, own, tile, t);
                else
                    add_heads_of_key(shape, scratch, runs, kv_head, own, tile, t);
            }
        int64_t* done = offsets;
        offsets = following;
        following = done;
        count = following_count;
    }
    _tile_release();  // else a change of threads would have 8 KB more to save
    finish_piece<BFloat16>(shape, call, piece, scratch, partials);
}
