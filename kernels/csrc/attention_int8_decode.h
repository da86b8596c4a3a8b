// Decoding over a cache of int8 by products of words, see attention_int8_words.h. All heads of a tile of tokens take each
// step together: their scales lie side by side in a slot, and what is one number per head is computed for WIDTH of them.
// To be included inside a level's own namespace, by attention_tiles.h.

// What is known of each head while a tile is read, in scratch.dots.
struct TileHeads {
    float *key_scales, *value_factors;  // [kv_heads, kKeys]: see ValueWords
    float* value_scales;                // [kv_heads]
    float *most, *before, *now;         // [num_heads]: highest score of the tile; Shares

    TileHeads(const Shape& shape, const Scratch& scratch) {
        const int kv_lanes = (shape.kv_heads + WIDTH - 1) / WIDTH * WIDTH, lanes = (shape.num_heads() + WIDTH - 1) / WIDTH * WIDTH;
        key_scales = scratch.dots;
        value_factors = key_scales + shape.kv_heads * kKeys;
        value_scales = value_factors + shape.kv_heads * kKeys;
        most = value_scales + kv_lanes;
        before = most + lanes;
        now = before + lanes;
    }
};

inline Floats some_floats(const char* from, __mmask16 which) { return (Floats)_mm512_maskz_loadu_ps(which, from); }

// Scales of WIDTH heads, of the slots at scales + offsets[t], times factors -> to[head, kKeys], for `which` heads.
inline void turn_scales(const char* scales, const int64_t* offsets, Floats factors, __mmask16 which, float* to) {
    for (int first = 0; first < kKeys; first += WIDTH) {
        Floats square[WIDTH];
#pragma GCC unroll 16
        for (int t = 0; t < WIDTH; ++t) square[t] = some_floats(scales + offsets[first + t], which) * factors;
        transpose(square);
        for (int h = 0; h < WIDTH && (which >> h & 1); ++h) store(to + h * kKeys + first, square[h]);
    }
}

inline void read_key_scales(const Shape& shape, const char* slots, const int64_t* offsets, const TileHeads& tile) {
    for (int h = 0; h < shape.kv_heads; h += WIDTH)
        turn_scales(slots + shape.scale_offset(h), offsets, same(1.0f), lanes(0, shape.kv_heads, h),
                    tile.key_scales + h * kKeys);
}

inline void read_value_scales(const Shape& shape, const char* slots, const int64_t* offsets, const TileHeads& tile) {
    for (int h = 0; h < shape.kv_heads; h += WIDTH) {
        const char* scales = slots + shape.scale_offset(h);
        const __mmask16 which = lanes(0, shape.kv_heads, h);
        Floats largest{}, remainders{};
        for (int t = 0; t < kKeys; ++t) {
            const Floats x = some_floats(scales + offsets[t], which);
            largest = larger(largest, x);
            remainders += x - x;
        }
        const Floats factors = largest > 1e-30f ? kLargestWord / largest : Floats{};
        store(tile.value_scales + h, largest / kLargestWord + remainders);
        turn_scales(scales, offsets, factors, which, tile.value_factors + h * kKeys);
    }
}

// One query head against the keys of WIDTH tokens, all sums in registers.
template <int kUnits>
inline Ints score_words(const Shape& shape, const float* query, const char* keys, const int64_t* offsets) {
    const int units = kUnits ? kUnits : (shape.head_dim + 31) / 32;
    Ints dots[WIDTH];
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; ++t) {
        const char* key = keys + offsets[t];
        __m512i sum = _mm512_setzero_si512();
        for (int u = 0; u < units; ++u)
            sum = _mm512_dpwssd_epi32(sum, widened_words(key + 32 * u, kUnits ? 32 : shape.head_dim - 32 * u),
                                      loaded(query + WIDTH * u));
        dots[t] = (Ints)sum;
    }
    return sums(dots);
}

// Scores of all heads, but for the factors of the queries, and the highest of each, with them.
template <int kUnits, bool kIsFromMemory>
void score_heads(const Shape& shape, const Scratch& scratch, const char* keys, const int64_t* offsets, int lead, int count,
                 Ahead<kIsFromMemory>& ahead, const TileHeads& tile) {
    const int num_heads = shape.num_heads(), padded = shape.padded_dim();
    for (int h = 0; h < num_heads; ++h) {
        const int kv_head = h / shape.group;
        const float* query = scratch.queries + size_t(h) * padded;
        Floats high = same(kLowest);
        for (int t = lead / WIDTH * WIDTH; t < count; t += WIDTH) {
            ahead.fetch(WIDTH);
            const Ints dots = score_words<kUnits>(shape, query, keys + kv_head * shape.head_bytes(), offsets + t);
            const Floats scores = (Floats)_mm512_cvtepi32_ps((__m512i)dots) * load(tile.key_scales + kv_head * kKeys + t);
            store(scratch.scores + size_t(h) * kKeys + t, scores);
            high = larger(high, (Floats)_mm512_mask_mov_ps((__m512)same(kLowest), lanes(lead, count, t), (__m512)scores));
        }
        tile.most[h] = highest(high) * query[padded / 2];
    }
}

// Corrections of what was summed before, and weights of this tile, as in attend_rows.
inline void update_maxima(const Shape& shape, const Scratch& scratch, const TileHeads& tile) {
    const int num_heads = shape.num_heads();
    for (int h = 0; h < num_heads; h += WIDTH) {
        const __mmask16 which = lanes(0, num_heads, h);
        const Floats old = some_floats((const char*)(scratch.maxima + h), which), most = load(tile.most + h);
        const Floats maxima = larger(old, most);
        store(tile.before + h, exact_power_of_two(old - maxima));
        store(tile.now + h, exact_power_of_two(most - maxima));
        _mm512_mask_storeu_ps(scratch.maxima + h, which, (__m512)maxima);
    }
}

// accumulators[kHeads, 32 * kUnits] = accumulators * before + scale * sum over `count` tokens of word * value; of heads that
// share the values. `words`: [kHeads, 2 * kKeys].
template <int kUnits, int kHeads>
inline void add_words(const float* words, const float* before, const float* scales, const char* values, int64_t valid,
                      const int64_t* offsets, int count, float* accumulators, size_t padded) {
    __m512i low[kHeads][kUnits], high[kHeads][kUnits];
    for (int h = 0; h < kHeads; ++h)
        for (int u = 0; u < kUnits; ++u) low[h][u] = high[h][u] = _mm512_setzero_si512();
    for (int t = 0; t < count; t += 2)
        for (int u = 0; u < kUnits; ++u) {
            const int64_t left = u + 1 < kUnits ? 32 : valid - 32 * u;
            const __m512i a = widened_words(values + offsets[t] + 32 * u, left);
            const __m512i b = widened_words(values + offsets[t + 1] + 32 * u, left);
            const __m512i first = _mm512_unpacklo_epi16(a, b), last = _mm512_unpackhi_epi16(a, b);
            for (int h = 0; h < kHeads; ++h) {
                int32_t pair;
                std::memcpy(&pair, words + h * kKeys + t / 2, sizeof pair);
                low[h][u] = _mm512_dpwssd_epi32(low[h][u], first, _mm512_set1_epi32(pair));
                high[h][u] = _mm512_dpwssd_epi32(high[h][u], last, _mm512_set1_epi32(pair));
            }
        }
    for (int h = 0; h < kHeads; ++h)
        for (int u = 0; u < kUnits; ++u) {
            const Floats a = (Floats)_mm512_cvtepi32_ps(low[h][u]), b = (Floats)_mm512_cvtepi32_ps(high[h][u]);
            const Floats first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const Floats last =
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            float* own = accumulators + h * padded + 2 * WIDTH * u;
            store(own, fused(load(own), same(before[h]), first * scales[h]));
            store(own + WIDTH, fused(load(own + WIDTH), same(before[h]), last * scales[h]));
        }
}

template <int kHeads>
inline void add_heads(const Shape& shape, const float* words, const float* before, const float* scales,
                      const char* values, const int64_t* offsets, int count, float* accumulators) {
    const size_t padded = shape.padded_dim();
    int d = 0;
    for (; d + 32 < shape.head_dim; d += 64)
        add_words<2, kHeads>(words, before, scales, values + d, shape.head_dim - d, offsets, count, accumulators + d, padded);
    if (d < shape.head_dim)
        add_words<1, kHeads>(words, before, scales, values + d, shape.head_dim - d, offsets, count, accumulators + d, padded);
}

// Scores of the heads of one key head -> weights; their sum over values to the accumulators.
inline void add_values_of(const Shape& shape, const Scratch& scratch, int kv_head, const char* values,
                          const int64_t* offsets, int lead, int count, const TileHeads& tile) {
    const size_t padded = shape.padded_dim();
    int h = kv_head * shape.group;
    const int last = h + shape.group;
    for (int i = h; i < last; ++i) {
        float* scores = scratch.scores + size_t(i) * kKeys;  // and then the words
        const float weights = round_weights(scores, count, lead, count, scratch.queries[i * padded + padded / 2],
                                            tile.most[i], tile.value_factors + kv_head * kKeys, scores);
        scratch.sums[i] = fused(scratch.sums[i], tile.before[i], weights * tile.now[i]);
        tile.now[i] *= tile.value_scales[kv_head];
    }
    while (h < last) {
        const int heads = last - h < 4 ? last - h : 4;
        const auto add = heads == 4 ? add_heads<4> : heads == 3 ? add_heads<3> : heads == 2 ? add_heads<2> : add_heads<1>;
        add(shape, scratch.scores + size_t(h) * kKeys, tile.before + h, tile.now + h, values, offsets, count,
            scratch.accumulators + h * padded);
        h += heads;
    }
}

template <typename RowType, bool kIsFromMemory, int kUnits>
void decode_words(const Shape& shape, const Call& call, const Piece& piece, const Piece* next, const Scratch& scratch,
                  float* partials) {
    const int num_heads = shape.num_heads();
    begin_rows<RowType>(shape, scratch, 0, num_heads, call.queries + piece.row * call.query_row_bytes);
    IntegerTiles::begin(shape, scratch, num_heads);
    const TileHeads tile(shape, scratch);
    int64_t tiles[2][kKeys];
    int64_t *offsets = tiles[0], *following = tiles[1];
    int64_t first = piece.first / kKeys * kKeys;
    int count = slot_offsets(shape, call, piece.blocks, piece.is_reversed, first, piece.first, piece.last, offsets);
    for (; count; first += kKeys) {
        const int lead = piece.first > first ? int(piece.first - first) : 0;
        Ahead<kIsFromMemory> values(shape, kKeys, {call.keys, offsets, count}, {call.values, offsets, count});
        read_key_scales(shape, call.keys, offsets, tile);
        score_heads<kUnits, kIsFromMemory>(shape, scratch, call.keys, offsets, lead, count, values, tile);
        update_maxima(shape, scratch, tile);
        read_value_scales(shape, call.values, offsets, tile);
        const int following_count =
            slot_offsets(shape, call, piece.blocks, piece.is_reversed, first + kKeys, piece.first, piece.last, following);
        const int to_come = following_count ? following_count : next_offsets(shape, call, next, following);
        Ahead<kIsFromMemory> keys(shape, kKeys, {call.values, offsets, count}, {call.keys, following, to_come});
        for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
            keys.fetch(kKeys * shape.group);
            add_values_of(shape, scratch, kv_head, call.values + kv_head * shape.head_bytes(), offsets, lead, count, tile);
        }
        int64_t* done = offsets;
        offsets = following;
        following = done;
        count = following_count;
    }
    finish_piece<RowType>(shape, call, piece, scratch, partials);
}

template <typename RowType, bool kIsFromMemory>
inline void decode_units(const Shape& shape, const Call& call, const Piece& piece, const Piece* next,
                         const Scratch& scratch, float* partials) {
    const auto decode = shape.head_dim == 64    ? decode_words<RowType, kIsFromMemory, 2>
                        : shape.head_dim == 128 ? decode_words<RowType, kIsFromMemory, 4>
                                                : decode_words<RowType, kIsFromMemory, 0>;
    decode(shape, call, piece, next, scratch, partials);
}

template <typename RowType>
inline void decode_int8(const Shape& shape, const Call& call, const Piece& piece, const Piece* next,
                        const Scratch& scratch, float* partials) {
    if (!has_integer_scores(shape)) return decode_any<Int8<RowType>>(shape, call, piece, next, scratch, partials);
    const auto decode = shape.group == 1 ? decode_units<RowType, true> : decode_units<RowType, false>;
    decode(shape, call, piece, next, scratch, partials);
}
