// The highest logit of each row, found while logits are computed: they need not be kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../rows.h"
#include "../token_masks.h"

namespace decode_pass {

// Tokens that rows may choose, a bit for each, the lowest of a word first. The highest of a row is that of them.
struct TokenBits {
    const int64_t* places = nullptr;  // [rows] of each row's words; negative: it may choose any. Null: all rows may
    const uint32_t* words = nullptr;  // [places, num_words]
    int64_t num_words = 0;

    // Bits of `count` columns, at most 32, from `first` on, of a row that has some.
    uint32_t of(int64_t row, int64_t first, int64_t count) const {
        const uint32_t* own = words + places[row] * num_words;
        const int64_t at = first / 32, shift = first % 32;
        uint64_t both = own[at];
        if (shift + count > 32) both |= uint64_t(own[at + 1]) << 32;
        return uint32_t(both >> shift);
    }
};

// What threads have seen of some rows' logits: by lanes, so that noting a chunk of columns compares vectors.
class HighestLogits {
   public:
    HighestLogits(const rows::Level& level, int64_t num_rows, bool is_bfloat16, int num_threads, TokenBits allowed)
        : level_(level), num_rows_(num_rows), is_bfloat16_(is_bfloat16), allowed_(allowed), threads_(num_threads) {}

    // `count` columns, at most kChunkColumns, from `first_column` on of rows [first_row, first_row + num_rows), rows
    // `row_bytes` apart. Those of tokens that a row may not choose become minus infinity.
    void note(int thread, char* x, int64_t row_bytes, int64_t first_row, int64_t num_rows, int64_t first_column,
              int64_t count) {
        for (int64_t i = 0; allowed_.places && i < num_rows; ++i)
            if (allowed_.places[first_row + i] >= 0)
                mask(x + i * row_bytes, allowed_.of(first_row + i, first_column, count), count);
        Seen& seen = threads_[thread];
        if (seen.values.empty()) {
            seen.values.assign(num_rows_ * rows::kChunkColumns, -std::numeric_limits<float>::infinity());
            seen.columns.assign(num_rows_ * rows::kChunkColumns, std::numeric_limits<int32_t>::max());
        }
        const int64_t at = first_row * rows::kChunkColumns;
        level_.note_highest({x, row_bytes, num_rows, count, int32_t(first_column), is_bfloat16_, &seen.values[at],
                             &seen.columns[at]});
    }

    // The first of each row's highest columns, and its logit; 0 and NaN where the row holds one.
    void finish(int64_t* columns, float* values) const {
        for (int64_t row = 0; row < num_rows_; ++row) {
            columns[row] = std::numeric_limits<int64_t>::max();
            values[row] = -std::numeric_limits<float>::infinity();
            for (const Seen& seen : threads_)
                if (!seen.values.empty()) join(seen, row, columns[row], values[row]);
        }
    }

   private:
    struct Seen {
        std::vector<float> values;     // [rows, lanes]
        std::vector<int32_t> columns;  // likewise: the first column of the chunk
    };

    void mask(char* x, uint32_t bits, int64_t count) const {
        if (is_bfloat16_)
            mask_typed(reinterpret_cast<uint16_t*>(x), uint16_t(0xFF80), bits, count);
        else
            mask_typed(reinterpret_cast<uint32_t*>(x), uint32_t(0xFF800000), bits, count);
    }

    // `lowest`: minus infinity in the elements' own format.
    template <typename T>
    static void mask_typed(T* x, T lowest, uint32_t bits, int64_t count) {
        if (count == 32) return token_masks::mask_word(x, bits, lowest);
        for (int64_t i = 0; i < count; ++i) x[i] = bits >> i & 1 ? x[i] : lowest;
    }

    static void join(const Seen& seen, int64_t row, int64_t& column, float& value) {
        for (int64_t lane = 0; lane < rows::kChunkColumns && !std::isnan(value); ++lane) {
            const int64_t at = row * rows::kChunkColumns + lane;
            const float own = seen.values[at];
            const int64_t own_column = seen.columns[at] + lane;
            if (std::isnan(own)) {
                value = own;
                column = 0;
            } else if (own > value || (own == value && own_column < column)) {
                value = own;
                column = own_column;
            }
        }
    }

    const rows::Level& level_;
    const int64_t num_rows_;
    const bool is_bfloat16_;
    const TokenBits allowed_;
    std::vector<Seen> threads_;
};

}  // namespace decode_pass
