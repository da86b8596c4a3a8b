// The highest logit of each row, found while logits are computed: they need not be kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../rows.h"

namespace decode_pass {

// What threads have seen of some rows' logits: by lanes, so that noting a chunk of columns compares vectors.
class HighestLogits {
   public:
    HighestLogits(const rows::Level& level, int64_t num_rows, bool is_bfloat16, int num_threads)
        : level_(level), num_rows_(num_rows), is_bfloat16_(is_bfloat16), threads_(num_threads) {}

    // `count` columns from `first_column` on of rows [first_row, first_row + num_rows), rows `row_bytes` apart.
    void note(int thread, const char* x, int64_t row_bytes, int64_t first_row, int64_t num_rows, int64_t first_column,
              int64_t count) {
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
    std::vector<Seen> threads_;
};

}  // namespace decode_pass
