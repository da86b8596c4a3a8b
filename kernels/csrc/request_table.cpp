// What a scheduler works out in every decision for the requests of its table (alignedserve/scheduling/table.py).
// Plain forms stand with their callers. These give the same to the last bit: they are numpy's operations, in the same
// order, none of them fused. The interpreter stays locked: a call takes some microseconds.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "buffers.h"

namespace nb = nanobind;

namespace request_table {
namespace {

using buffers::Bools;
using buffers::Floats;
using buffers::Ints;

// --- the table

enum Int { kOrder, kPriority, kPromptLen, kMaxTokens, kNumGenerated, kNumCached, kNumSwapped, kNumBlocks, kNumPreemptions,
           kNumInts };
enum Float { kArrival, kTtft, kTpot, kDeadline, kPredictedLen, kWaitsSince, kFirstToken, kLastToken, kLastRun, kService,
             kNumFloats };
enum Bool { kIsRealTime, kIsHidden, kIsConstrained, kNumBools };

class Table {
  public:
    Table(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, bool is_written = false)
        : num_rows(num_rows), ints_(ints, 2, is_written), floats_(floats, 2, is_written), bools_(bools, 2, is_written) {
        const bool has_all = ints_.num_stacks() == kNumInts && floats_.num_stacks() == kNumFloats &&
                             bools_.num_stacks() == kNumBools;
        const int64_t capacity = std::min(ints_.size(), std::min(floats_.size(), bools_.size()));
        if (!has_all || num_rows < 0 || num_rows > capacity) throw std::invalid_argument("a table of other columns");
    }
    int64_t* operator[](Int column) const { return ints_.row(column); }
    double* operator[](Float column) const { return floats_.row(column); }
    bool* operator[](Bool column) const { return bools_.row(column); }

    int64_t context_len(int64_t row) const { return (*this)[kPromptLen][row] + (*this)[kNumGenerated][row]; }
    int64_t num_remaining(int64_t row) const { return context_len(row) - (*this)[kNumCached][row]; }

    const int64_t num_rows;

  private:
    Ints ints_;
    Floats floats_;
    Bools bools_;
};

void check_rows(const Ints& rows, int64_t num_rows) {
    for (int64_t i = 0; i < rows.size(); ++i)
        if (rows.data()[i] < 0 || rows.data()[i] >= num_rows) throw std::invalid_argument("a row outside the table");
}

// Sums over decodes: what IterationWork takes of them.
struct Decodes {
    int64_t num = 0, context_len = 0, longest = 0, hidden_len = 0, num_constrained = 0;

    void add(const Table& table, int64_t row) {
        const int64_t length = table.context_len(row);
        ++num;
        context_len += length;
        longest = std::max(longest, length);
        if (table[kIsHidden][row]) hidden_len += length;
        if (table[kIsConstrained][row]) ++num_constrained;
    }
};

nb::tuple decode_sums(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, nb::handle rows) {
    const Table table(ints, floats, bools, num_rows);
    const Ints chosen(rows, 1);
    check_rows(chosen, num_rows);
    Decodes decodes;
    for (int64_t i = 0; i < chosen.size(); ++i) decodes.add(table, chosen.data()[i]);
    return nb::make_tuple(decodes.context_len, decodes.longest, decodes.hidden_len,
                          decodes.num_constrained);
}

// --- blocks

// DeviceMemory.blocks_for_each.
struct BlockSizes {
    int64_t block_size;
    double hidden_ratio;  // 0: there is no hidden cache

    BlockSizes(int64_t block_size, double hidden_ratio) : block_size(block_size), hidden_ratio(hidden_ratio) {
        if (block_size < 1) throw std::invalid_argument("blocks of no token");
    }
    int64_t of(const Table& table, int64_t row, int64_t num_tokens) const {
        int64_t slots = num_tokens;
        if (table[kIsHidden][row]) {
            if (!(hidden_ratio > 0.0)) throw std::invalid_argument("a hidden cache where there is none");
            slots = int64_t(std::ceil(double(num_tokens) * hidden_ratio));
        }
        return slots / block_size + (slots % block_size > 0);
    }
};

// Of these decodes, in order, those whose next tokens fit into the free blocks, `at_most`: their number, the blocks
// that they take, and their sums.
nb::tuple fitting_decodes(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, nb::handle rows,
                          int64_t at_most, int64_t num_free, int64_t block_size, double hidden_ratio) {
    const Table table(ints, floats, bools, num_rows);
    const BlockSizes blocks(block_size, hidden_ratio);
    const Ints chosen(rows, 1);
    check_rows(chosen, num_rows);
    Decodes decodes;
    int64_t num_taken = 0;
    for (int64_t i = 0; i < chosen.size() && decodes.num < at_most; ++i) {
        const int64_t row = chosen.data()[i];
        const int64_t wanted = blocks.of(table, row, table[kNumCached][row] + 1) - table[kNumBlocks][row];
        const int64_t grown = num_taken + std::max(wanted, int64_t(0));
        if (grown > num_free) break;
        num_taken = grown;
        decodes.add(table, row);
    }
    return nb::make_tuple(decodes.num, num_taken, decodes.context_len, decodes.longest, decodes.hidden_len,
                          decodes.num_constrained);
}

// Of rows that compute so many tokens, those that take blocks or come back from the host; None if one computes more
// than is known.
nb::object growing_rows(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, nb::handle rows,
                        nb::handle num_tokens, int64_t block_size, double hidden_ratio) {
    const Table table(ints, floats, bools, num_rows);
    const BlockSizes blocks(block_size, hidden_ratio);
    const Ints chosen(rows, 1), tokens(num_tokens, 1);
    if (tokens.size() != chosen.size()) throw std::invalid_argument("as many numbers of tokens as rows");
    check_rows(chosen, num_rows);
    nb::list grows;
    for (int64_t i = 0; i < chosen.size(); ++i) {
        const int64_t row = chosen.data()[i], count = tokens.data()[i];
        if (count > table.num_remaining(row)) return nb::none();
        const bool has_grown = blocks.of(table, row, table[kNumCached][row] + count) > table[kNumBlocks][row];
        grows.append(has_grown || table[kNumSwapped][row] > 0);
    }
    return grows;
}

// --- the end of an iteration

// SchedulerState.completed: notes what these rows computed; `sampled` becomes the rows that sampled a token.
void note_completed(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, nb::handle rows,
                    nb::handle num_tokens, double now, double duration_s, nb::handle sampled) {
    const Table table(ints, floats, bools, num_rows, true);
    const Ints chosen(rows, 1), tokens(num_tokens, 1);
    const Bools has_sampled(sampled, 1, true);
    if (tokens.size() != chosen.size() || has_sampled.size() != chosen.size())
        throw std::invalid_argument("as many numbers of tokens as rows");
    check_rows(chosen, num_rows);
    for (int64_t i = 0; i < chosen.size(); ++i) {
        const int64_t row = chosen.data()[i];
        table[kNumCached][row] += tokens.data()[i];
        table[kService][row] += duration_s;
        table[kLastRun][row] = now;
        has_sampled.data()[i] = table.num_remaining(row) == 0;
        if (!has_sampled.data()[i]) continue;
        table[kNumGenerated][row] += 1;
        if (std::isnan(table[kFirstToken][row])) table[kFirstToken][row] = now;
        table[kLastToken][row] = table[kWaitsSince][row] = now;
    }
}

}  // namespace

void bind(nb::module_& module) {
    module.attr("REQUEST_COLUMNS") = nb::make_tuple(
        nb::make_tuple("order", "priority", "prompt_len", "max_tokens", "num_generated", "num_cached", "num_swapped",
                       "num_blocks", "num_preemptions"),
        nb::make_tuple("arrival_s", "ttft_s", "tpot_s", "deadline_s", "predicted_len", "waits_since_s",
                       "first_token_s", "last_token_s", "last_run_s", "service_s"),
        nb::make_tuple("is_real_time", "is_hidden", "is_constrained"));
    module.def("decode_sums", decode_sums);
    module.def("fitting_decodes", fitting_decodes);
    module.def("growing_rows", growing_rows);
    module.def("note_completed", note_completed);
}

}  // namespace request_table
