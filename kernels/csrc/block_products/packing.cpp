#include "packing.h"

#include <cstring>

namespace products {
namespace {

uint16_t half_at(const uint8_t* from) { return uint16_t(from[0] | from[1] << 8); }

uint32_t word_of(const uint8_t* bytes) {
    uint32_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

// 16 bytes hold 32 quants: the low halves the first 16, the high halves the last.
void split_halves(const uint8_t* from, int count, uint8_t* to) {
    for (int i = 0; i < count; ++i) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}

// 12 bytes hold 8 scales and 8 minima of 6 bits.
void split_small_scales(const uint8_t* from, SourceBlock& to) {
    for (int i = 0; i < 4; ++i) {
        to.scales[i] = from[i] & 63;
        to.minima[i] = from[i + 4] & 63;
        to.scales[i + 4] = uint8_t((from[i + 8] & 15) | from[i] >> 6 << 4);
        to.minima[i + 4] = uint8_t(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

void take_q4_k(const uint8_t* from, SourceBlock& to) {
    to.scale = half_at(from);
    to.minimum = half_at(from + 2) ^ 0x8000u;  // the file's is subtracted
    split_small_scales(from + 4, to);
    for (int part = 0; part < 4; ++part) split_halves(from + 16 + part * 32, 32, to.quants + part * 64);
}

void take_q6_k(const uint8_t* from, SourceBlock& to) {
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = from + half * 64, *high = from + 128 + half * 32;
        for (int i = 0; i < 128; ++i) {
            const int quarter = i / 32, at = i % 32;
            const int four = low[quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
            to.quants[half * 128 + i] = uint8_t(four | (high[at] >> (quarter * 2) & 3) << 4);
        }
    }
    std::memcpy(to.scales, from + 192, 16);
    to.scale = half_at(from + 208);
}

void place_quants(Format format, const uint8_t* quants, int num_columns, int column, char* to) {
    const auto put = [&](int index, uint32_t word) { std::memcpy(to + (index * num_columns + column) * 4, &word, 4); };
    const auto step = [&](int index) { return word_of(quants + index * 4); };
    if (quant_bits(format) == 8) {
        for (int i = 0; i < kSteps; ++i) put(i, step(i));
        return;
    }
    for (int pair = 0; pair < kSteps / 2; ++pair)
        put(pair, (step(2 * pair) & 0x0f0f0f0f) | (step(2 * pair + 1) & 0x0f0f0f0f) << 4);
    if (quant_bits(format) == 4) return;
    for (int half = 0; half < 2; ++half) {
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) word |= (step(half * 4 + i) >> 4 & 0x03030303) << (2 * i);
        put(kSteps / 2 + half, word);
    }
}

}  // namespace

void take_apart(Format format, const uint8_t* from, SourceBlock& to) {
    switch (format) {
        case Format::q4_k: return take_q4_k(from, to);
        case Format::q6_k: return take_q6_k(from, to);
        case Format::q8_0:
            to.scale = half_at(from);
            for (int i = 0; i < kBlock; ++i) to.quants[i] = from[2 + i] ^ 0x80;
            return;
        case Format::q4_0:
            to.scale = half_at(from);
            return split_halves(from + 2, 16, to.quants);
        case Format::q4_1:
            to.scale = half_at(from);
            to.minimum = half_at(from + 2);
            return split_halves(from + 4, 16, to.quants);
        case Format::mxfp4:
            to.scale = from[0];
            return split_halves(from + 1, 16, to.quants);
        case Format::g4_32:
        case Format::g4_64:
        case Format::g4_128:
            to.scale = word_of(from);
            to.minimum = word_of(from + 4);
            for (int i = 0; i < blocks_together(format); ++i)
                split_halves(from + 8 + 16 * i, 16, to.quants + kBlock * i);
            return;
    }
}

void place(Format format, const SourceBlock& block, int column, int num_columns, char* superblock) {
    const int size = scale_bytes(format);  // the low bytes of a word come first
    std::memcpy(superblock + column * size, &block.scale, size);
    if (has_minima(format)) std::memcpy(superblock + (num_columns + column) * size, &block.minimum, size);
    char* to = superblock + head_bytes(format) * num_columns;
    for (int i = 0; i < blocks_together(format); ++i, to += block_bytes(format) * num_columns) {
        if (format == Format::q6_k) {
            to[column] = char(block.scales[2 * i]);
            to[num_columns + column] = char(block.scales[2 * i + 1]);
        } else if (format == Format::q4_k) {
            to[column] = char(block.scales[i]);
            to[num_columns + column] = char(block.minima[i]);
        }
        place_quants(format, block.quants + i * kBlock, num_columns, column,
                     to + small_scale_bytes(format) * num_columns);
    }
}

}  // namespace products
