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
#include <iterator>
#include <limits>
#include <stdexcept>
#include <vector>

#include "buffers.h"

namespace nb = nanobind;

namespace request_table {
namespace {

using buffers::Bools;
using buffers::Floats;
using buffers::Ints;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kPressingTimes = 4.0, kPacedTimes = 2.0, kLongestWait = 10.0;  // as in forecast.py

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
    bool is_decoding(int64_t row) const { return (*this)[kNumGenerated][row] > 0 && num_remaining(row) == 1; }
    // It decodes, its whole cache on the device.
    bool is_ready(int64_t row) const { return is_decoding(row) && (*this)[kNumSwapped][row] == 0; }

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

// The real-time decodes on the device, and the least first-token objective of all real-time requests.
nb::tuple real_time_decodes(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows) {
    const Table table(ints, floats, bools, num_rows);
    Decodes decodes;
    double least_ttft_s = kInfinity;
    for (int64_t row = 0; row < num_rows; ++row) {
        if (!table[kIsRealTime][row]) continue;
        least_ttft_s = std::min(least_ttft_s, table[kTtft][row]);
        if (table.is_ready(row)) decodes.add(table, row);
    }
    return nb::make_tuple(decodes.num, decodes.context_len, decodes.longest, decodes.hidden_len,
                          decodes.num_constrained, least_ttft_s);
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

// --- forecasts of aligned_slo

enum Rank { kStarving, kUrgent, kOnTime, kLate, kPressing, kBestEffort, kNumRanks };

// numpy's maximum and minimum: nan if one is.
double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }
double smaller(double a, double b) { return a < b || std::isnan(a) ? a : b; }

// numpy's interp, as PrefillTimes has it: beyond the last place in proportion to it.
struct Curve {
    std::vector<double> places, values;

    Curve(nb::sequence given_places, nb::sequence given_values) {
        for (const nb::handle place : given_places) places.push_back(nb::cast<double>(place));
        for (const nb::handle value : given_values) values.push_back(nb::cast<double>(value));
        if (places.size() < 2 || places.size() != values.size()) throw std::invalid_argument("a curve of no two points");
    }
    double at(double place) const {
        return between(place) * larger(place / places.back(), 1.0);
    }

  private:
    double between(double place) const {
        if (place < places.front()) return values.front();
        if (place >= places.back()) return values.back();
        const size_t next = std::upper_bound(places.begin(), places.end(), place) - places.begin(), last = next - 1;
        if (places[last] == place) return values[last];
        const double slope = (values[next] - values[last]) / (places[next] - places[last]);
        return slope * (place - places[last]) + values[last];
    }
};

// What a forecast depends on beside the table; seconds.
struct Situation {
    double now, horizon_s, prefill_token_s, decode_context_s, decode_s, starvation_s, patience, given_back, usual_gap_s,
        pause_s, return_s, loan_s, overdue_s, pace_s;

    explicit Situation(nb::sequence values) {
        double* const fields[] = {&now,      &horizon_s,  &prefill_token_s, &decode_context_s, &decode_s, &starvation_s,
                                  &patience, &given_back, &usual_gap_s,     &pause_s,          &return_s,
                                  &loan_s,   &overdue_s,  &pace_s};
        if (nb::len(values) != std::size(fields)) throw std::invalid_argument("a situation of other values");
        for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = nb::cast<double>(values[i]);
    }
};

// One row's columns of SloForecast, in the order of the arithmetic of `forecast.plain_forecast`.
struct RowForecast {
    double left_s, slack_s, eviction_slack_s, allowed_s, banked_s, stretched_s;
    Rank rank, claim;
    bool is_ready, is_free, has_waited, is_on_time, has_begun;

    RowForecast(const Table& table, int64_t row, const Curve& prompts, const Situation& at) {
        const int64_t num_generated = table[kNumGenerated][row], remaining = table.num_remaining(row);
        const double ttft_s = table[kTtft][row], tpot_s = table[kTpot][row], arrival_s = table[kArrival][row];
        const double context_len = double(table.context_len(row)), generated = double(num_generated);
        const bool is_decoding = table.is_decoding(row), is_real_time = table[kIsRealTime][row];
        has_begun = num_generated > 0;
        is_ready = table.is_ready(row);

        const double num_left = output_left(table, row);
        const double prefill_s = (is_decoding ? 0.0 : double(remaining)) * at.prefill_token_s;
        left_s = prefill_s + num_left * (at.decode_context_s * context_len + at.decode_s);
        const double alone_s = is_decoding ? at.decode_s : larger(prompts.at(double(remaining)), at.decode_s);

        const double first_s = arrival_s + ttft_s, gap_s = table[kLastToken][row] + tpot_s;
        const double schedule_s = has_begun ? table[kFirstToken][row] + generated * tpot_s : first_s;
        const double back_by_s = larger(gap_s, table[kLastToken][row] + at.loan_s);
        const double lent_s = has_begun ? smaller(schedule_s, back_by_s) : schedule_s;
        const double later_s = table[kNumBlocks][row] > 0 ? gap_s : larger(gap_s, lent_s);
        const double next_s = has_begun ? later_s : first_s;
        slack_s = next_s - at.now;

        const double until_s = arrival_s + table[kDeadline][row] - at.now, deadline_slack_s = until_s - left_s;
        const bool has_missed = has_begun ? table[kFirstToken][row] > first_s : next_s - alone_s < at.now;
        const bool is_late = has_missed || deadline_slack_s < 0;
        const bool has_no_slo = std::isinf(ttft_s) && std::isinf(tpot_s);
        const double pressing_s = larger(kPressingTimes * left_s, kPacedTimes * (num_left * at.pace_s));
        const bool is_pressing = until_s < pressing_s && !is_late;
        is_on_time = is_real_time && (is_pressing || (!has_no_slo && !is_late));
        const bool is_urgent = is_on_time && smaller(slack_s - alone_s, deadline_slack_s) < at.horizon_s;
        if (is_real_time)
            claim = is_urgent ? kUrgent : is_on_time ? kOnTime : kLate;
        else
            claim = is_pressing ? kPressing : kBestEffort;

        const double waited_s = at.now - arrival_s - table[kService][row];
        has_waited = waited_s > std::min(at.starvation_s + at.patience * left_s, kLongestWait * at.starvation_s);
        const bool is_late_chat = is_real_time && !has_no_slo && is_late;
        const double paused_s = at.now - table[kLastToken][row];
        const bool must_return = has_begun && !is_ready && paused_s > at.return_s;
        const bool must_begin = !has_begun && first_s + at.overdue_s < at.now;
        const bool must_go_on = has_begun && is_ready && paused_s > at.pause_s;
        const bool is_starving = is_late_chat ? must_return || must_begin : has_waited && (!is_on_time || std::isinf(slack_s));
        rank = is_starving ? kStarving : is_late_chat && must_go_on ? kOnTime : claim;
        is_free = has_no_slo && std::isinf(table[kDeadline][row]);
        if (is_on_time && !has_begun && !std::isinf(first_s)) left_s = alone_s;
        if (rank == kPressing) left_s = until_s;

        allowed_s = slack_s > 0 ? slack_s : tpot_s;
        banked_s = larger(next_s, schedule_s);
        const double later_gaps_s = larger((1.0 - at.given_back) * tpot_s - at.usual_gap_s, 0.0);
        stretched_s = banked_s + num_left * smaller(at.given_back * tpot_s, later_gaps_s);
        const double again_s = context_len * at.prefill_token_s;
        eviction_slack_s = smaller(lent_s - at.now, deadline_slack_s) - again_s - 2 * at.horizon_s;
    }

  private:
    // remaining_output_len
    static double output_left(const Table& table, int64_t row) {
        const double generated = double(table[kNumGenerated][row]), predicted = table[kPredictedLen][row];
        int exponent = 0;
        std::frexp(generated / predicted, &exponent);
        const double doubled = std::ldexp(predicted, std::max(exponent, 0));
        return larger(smaller(doubled, double(table[kMaxTokens][row])) - generated, 1.0);
    }
};

// Fills the columns `floats_out` [left_s, slack_s, eviction_slack_s], `ints_out` [rank, claim] and `bools_out`
// [is_ready, is_free, has_waited, is_overtakable]. Returns blocks held by requests on time, the least of what they
// allow, have banked and can stretch (absolute times, these two), the number that may be overtaken, and how many rows
// of each rank are ready and are not.
nb::tuple slo_forecast(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, nb::sequence situation,
                       nb::sequence prompt_lens, nb::sequence prompts_s, nb::handle floats_out, nb::handle ints_out,
                       nb::handle bools_out) {
    const Table table(ints, floats, bools, num_rows);
    const Situation at(situation);
    const Curve prompts(prompt_lens, prompts_s);
    const Floats out_floats(floats_out, 2, true);
    const Ints out_ints(ints_out, 2, true);
    const Bools out_bools(bools_out, 2, true);
    const bool fits = out_floats.size() == num_rows && out_ints.size() == num_rows && out_bools.size() == num_rows;
    if (!fits || out_floats.num_stacks() != 3 || out_ints.num_stacks() != 2 || out_bools.num_stacks() != 4)
        throw std::invalid_argument("as many results as rows");
    int64_t held = 0, num_overtakable = 0, num_ready[kNumRanks] = {}, num_waiting[kNumRanks] = {};
    double allowed_s = kInfinity, banked_s = kInfinity, stretched_s = kInfinity;
    for (int64_t row = 0; row < num_rows; ++row) {
        const RowForecast one(table, row, prompts, at);
        const bool is_overtakable =
            one.is_free && !one.has_waited && one.rank >= kLate && table[kNumBlocks][row] > 0;
        out_floats.row(0)[row] = one.left_s;
        out_floats.row(1)[row] = one.slack_s;
        out_floats.row(2)[row] = one.eviction_slack_s;
        out_ints.row(0)[row] = one.rank;
        out_ints.row(1)[row] = one.claim;
        out_bools.row(0)[row] = one.is_ready;
        out_bools.row(1)[row] = one.is_free;
        out_bools.row(2)[row] = one.has_waited;
        out_bools.row(3)[row] = is_overtakable;
        num_overtakable += is_overtakable;
        ++(one.is_ready ? num_ready : num_waiting)[one.rank];
        if (!one.is_on_time) continue;
        held += table[kNumBlocks][row];
        if (!std::isnan(one.allowed_s)) allowed_s = std::min(allowed_s, one.allowed_s);
        if (!one.has_begun) continue;
        banked_s = smaller(banked_s, one.banked_s);
        stretched_s = smaller(stretched_s, one.stretched_s);
    }
    const auto counts = [](const int64_t* of) { return nb::make_tuple(of[0], of[1], of[2], of[3], of[4], of[5]); };
    return nb::make_tuple(held, allowed_s, banked_s, stretched_s, num_overtakable, counts(num_ready),
                          counts(num_waiting));
}

// --- order

struct Place {
    int64_t rank, priority;
    double left_s;
    int64_t order, row;

    bool operator<(const Place& other) const {
        if (rank != other.rank) return rank < other.rank;
        if (priority != other.priority) return priority < other.priority;
        if (left_s < other.left_s || other.left_s < left_s) return left_s < other.left_s;
        if (std::isnan(left_s) != std::isnan(other.left_s)) return std::isnan(other.left_s);  // nan last, as in numpy
        return order < other.order;
    }
};

// The first rows, as many as `out` has places, of these ranks (bits) and kind: SloPacking._ordered.
void ordered_rows(nb::handle ints, nb::handle floats, nb::handle bools, int64_t num_rows, nb::handle rank_of,
                  nb::handle left_of, nb::handle ready, bool is_ready, int64_t ranks, nb::handle out) {
    const Table table(ints, floats, bools, num_rows);
    const Ints rank(rank_of, 1), rows(out, 1, true);
    const Floats left_s(left_of, 1);
    const Bools readiness(ready, 1);
    if (rank.size() != num_rows || left_s.size() != num_rows || readiness.size() != num_rows)
        throw std::invalid_argument("as many forecasts as rows");
    std::vector<Place> places;
    places.reserve(std::min(num_rows, int64_t(1024)));
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t of_row = rank.data()[row];
        if (readiness.data()[row] != is_ready || of_row < 0 || of_row >= kNumRanks || !(ranks >> of_row & 1)) continue;
        const double left = of_row == kStarving ? 0.0 : left_s.data()[row];
        places.push_back({of_row, table[kPriority][row], left, table[kOrder][row], row});
    }
    const int64_t count = rows.size();
    if (count > int64_t(places.size())) throw std::invalid_argument("fewer rows than places for them");
    if (count < int64_t(places.size())) std::nth_element(places.begin(), places.begin() + count, places.end());
    std::sort(places.begin(), places.begin() + count);
    for (int64_t i = 0; i < count; ++i) rows.data()[i] = places[i].row;
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
    module.def("real_time_decodes", real_time_decodes);
    module.def("fitting_decodes", fitting_decodes);
    module.def("growing_rows", growing_rows);
    module.def("note_completed", note_completed);
    module.def("slo_forecast", slo_forecast);
    module.def("ordered_rows", ordered_rows);
}

}  // namespace request_table
