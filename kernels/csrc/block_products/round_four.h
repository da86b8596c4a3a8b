// Rounds four blocks of a row together, to the same numbers as `round_block`: what is found once per block (its largest
// input, its scale, its sums) is found for all four by the same instructions. To be included inside a level's own
// namespace, where vectors are of 16.

// The largest of each of four vectors.
inline __m128i four_largest(const __m512i (&x)[4]) {
    const __m512i first = _mm512_max_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i last = _mm512_max_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last));
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// The sum of each of four vectors.
inline __m128i four_sums(const __m512i (&x)[4]) {
    const __m512i first = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i last = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// What is known of four blocks behind their values, block after block.
inline void put_four(const BlockRounding& call, __m128 scales, __m128i first, __m128i last, InputBlock* const (&out)[4]) {
    static_assert(sizeof(InputBlock) == kBlock + 16, "four numbers follow the values");
    const __m128i offset = _mm_set1_epi32(-quant_offset(call.format)), sums = _mm_add_epi32(first, last);
    const __m128i starts = _mm_mullo_epi32(scales_per_block(call.format) == 2 ? first : sums, offset);
    const __m128i last_starts = _mm_mullo_epi32(last, offset);
    const __m128i scaled_sums = _mm_castps_si128(_mm_mul_ps(_mm_cvtepi32_ps(sums), scales));
    const __m128i whole = _mm_castps_si128(scales);
    const __m128i low = _mm_unpacklo_epi32(whole, scaled_sums), high = _mm_unpackhi_epi32(whole, scaled_sums);
    const __m128i low_ends = _mm_unpacklo_epi32(starts, last_starts), high_ends = _mm_unpackhi_epi32(starts, last_starts);
    _mm_storeu_si128((__m128i*)&out[0]->scale, _mm_unpacklo_epi64(low, low_ends));
    _mm_storeu_si128((__m128i*)&out[1]->scale, _mm_unpackhi_epi64(low, low_ends));
    _mm_storeu_si128((__m128i*)&out[2]->scale, _mm_unpacklo_epi64(high, high_ends));
    _mm_storeu_si128((__m128i*)&out[3]->scale, _mm_unpackhi_epi64(high, high_ends));
}

// Blocks [index, index + 4) of a row.
template <bool kIsBfloat16>
inline __attribute__((always_inline)) void round_four(const BlockRounding& call, const char* row, int64_t index,
                                                      InputBlock* block) {
    const int64_t next = call.num_rows;
    block += index * next;
    InputBlock* const out[] = {block, block + next, block + 2 * next, block + 3 * next};
    Floats inputs[4][2];
    __m512i sizes[4], halves[2][4];
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        inputs[i][0] = inputs_at(row, (index + i) * kBlock, kIsBfloat16);
        inputs[i][1] = inputs_at(row, (index + i) * kBlock + WIDTH, kIsBfloat16);
        sizes[i] = _mm512_max_epi32(_mm512_and_si512((__m512i)inputs[i][0], magnitude),
                                    _mm512_and_si512((__m512i)inputs[i][1], magnitude));
    }
    const __m128i largest = four_largest(sizes);
    if (_mm_cmpgt_epi32_mask(largest, _mm_set1_epi32(0x7f7fffff))) {  // one is not a finite number
        for (int i = 0; i < 4; ++i) round_one(call, row, index + i, block - index * next);
        return;
    }
    const __m128 scales = _mm_max_ps(_mm_div_ps(_mm_castsi128_ps(largest), _mm_set1_ps(127.0f)), _mm_set1_ps(1e-12f));
    const Floats inverses = (Floats)_mm512_castps128_ps512(_mm_div_ps(_mm_set1_ps(1.0f), scales));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Floats inverse = (Floats)_mm512_permutexvar_ps(_mm512_set1_epi32(i), (__m512)inverses);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            halves[j][i] = (__m512i)nearest(inputs[i][j] * inverse);
            store_bytes(out[i]->values + j * WIDTH, (Ints)halves[j][i]);
        }
    }
    put_four(call, scales, four_sums(halves[0]), four_sums(halves[1]), out);
}

template <bool kIsBfloat16>
void round_row(const BlockRounding& call, const char* row, InputBlock* out) {
    for (int64_t index = 0; index + 4 <= call.num_blocks; index += 4) round_four<kIsBfloat16>(call, row, index, out);
    if (call.num_blocks % 4)  // the last four; some of them again, to the same numbers
        round_four<kIsBfloat16>(call, row, call.num_blocks - 4, out);
}
