// A mask of 32 tokens over their logits: of most, all are allowed or none is. The others are masked by bytes, without a
// branch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace token_masks {

// For each byte of a mask, ones in the elements of its eight tokens that are allowed.
template <typename T>
struct Kept {
    T of[256][8];
    Kept() {
        for (int byte = 0; byte < 256; ++byte)
            for (int i = 0; i < 8; ++i) of[byte][i] = (byte >> i) & 1 ? T(-1) : T(0);
    }
};

// `lowest`: minus infinity in the elements' own format.
template <typename T>
inline void mask_word(T* logits, uint32_t word, T lowest) {
    static const Kept<T> kept;
    if (word == UINT32_MAX) return;
    if (word == 0) {
        std::fill_n(logits, 32, lowest);
        return;
    }
    for (int byte = 0; byte < 4; ++byte) {
        const T* keep = kept.of[word >> (8 * byte) & 255];
        for (int i = 0; i < 8; ++i)
            logits[byte * 8 + i] = T((logits[byte * 8 + i] & keep[i]) | (lowest & ~keep[i]));
    }
}

}  // namespace token_masks
