// Masks of tokens over rows of logits.
//
// Addresses are checked by the caller (kernels/cpu/token_masks.py), which holds the tensors.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "token_masks.h"

namespace nb = nanobind;

namespace token_masks {

namespace {

// `lowest`: minus infinity in the elements' own format.
template <typename T>
void mask_row(T* logits, const uint32_t* bits, int64_t vocab_size, T lowest) {
    const int64_t num_whole = vocab_size / 32;
    for (int64_t at = 0; at < num_whole; ++at) mask_word(logits + at * 32, bits[at], lowest);
    for (int64_t i = num_whole * 32; i < vocab_size; ++i)
        if (!(bits[num_whole] >> (i % 32) & 1)) logits[i] = lowest;
}

template <typename T>
void mask_rows(uintptr_t logits, int64_t stride, uintptr_t rows, uintptr_t bits, int64_t num_masked, int64_t vocab_size,
               T lowest, int num_threads) {
    nb::gil_scoped_release released;
    const int64_t num_words = (vocab_size + 31) / 32;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_masked > 8)
    for (int64_t i = 0; i < num_masked; ++i)
        mask_row(reinterpret_cast<T*>(logits) + reinterpret_cast<const int64_t*>(rows)[i] * stride,
                 reinterpret_cast<const uint32_t*>(bits) + i * num_words, vocab_size, lowest);
}

// Rows and bits as in kernels/sampling.py; stride in elements of the logits, which have 2 or 4 bytes.
void mask_tokens(uintptr_t logits, int64_t stride, uintptr_t rows, uintptr_t bits, int64_t num_masked,
                 int64_t vocab_size, uint32_t lowest, int element_bytes, int num_threads) {
    if (element_bytes == 2)
        mask_rows<uint16_t>(logits, stride, rows, bits, num_masked, vocab_size, uint16_t(lowest), num_threads);
    else
        mask_rows<uint32_t>(logits, stride, rows, bits, num_masked, vocab_size, lowest, num_threads);
}

}  // namespace

void bind(nb::module_& module) { module.def("mask_tokens", mask_tokens); }

}  // namespace token_masks
