// Recurrent states as Python sees them: the heads of all sequences of a pass, divided over cores.
//
// Addresses are checked by the caller (kernels/cpu/state_scans.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../levels.h"
#include "../work.h"
#include "states.h"

namespace nb = nanobind;

namespace states {

extern const Level avx512_level [[gnu::weak]], avx2_level [[gnu::weak]], plain_level;

namespace {

const std::vector<Level>& all_levels() {
    static const auto all = levels::compiled({&avx512_level, &avx2_level, &plain_level});
    return all;
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Addresses of firsts, sources, first parts, ends and targets; their number of sequences.
typedef std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t> SequenceAddresses;
// Address of block 0's state, bytes from block to block, floats from head to head.
typedef std::tuple<uintptr_t, int64_t, int64_t> MemoryNumbers;

Sequences sequences_of(const SequenceAddresses& given) {
    const auto [firsts, sources, first_parts, ends, targets] = given;
    return {at<const int64_t>(firsts), at<const int64_t>(sources), at<const int64_t>(first_parts),
            at<const int64_t>(ends), at<const int64_t>(targets)};
}

Memory memory_of(const MemoryNumbers& given) {
    const auto [first, block_bytes, head_floats] = given;
    return {at<char>(first), block_bytes, head_floats};
}

// work(i) of i in [0, count), each thread its own run of them where none is late.
template <typename Work>
void for_each(int64_t count, int num_threads, const Work& work) {
    nb::gil_scoped_release released;
    const int threads = int(std::min<int64_t>(count, num_threads));
    products::Shares shares(count, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int thread = 0; thread < threads; ++thread)
        for (int64_t i = shares.take(thread); i >= 0; i = shares.take(thread)) work(i);
}

// The state that a thread is likely to take next is fetched from memory, which is the limit where tokens are few.
void fetch(const Sequences& all, int64_t num_sequences, const Memory& memory, int64_t heads, int64_t i) {
    if (i >= num_sequences * heads || all.sources[i / heads] < 0) return;
    const int64_t bytes = memory.head_floats * sizeof(float);
    const char* state = memory.first + all.sources[i / heads] * memory.block_bytes + i % heads * bytes;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(state + line, 0, 2);
}

typedef std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t> RowAddresses;  // x, b, c or q, k, v; and their stride
typedef std::tuple<int64_t, int64_t, int64_t, int64_t> Sizes;  // heads, width, groups or key heads, rows of a state

void scan_space(const std::string& level, RowAddresses rows, uintptr_t dt, uintptr_t decay, uintptr_t skip,
                uintptr_t out, Sizes sizes, SequenceAddresses sequences, int64_t num_sequences, MemoryNumbers memory,
                int num_threads) {
    const auto [x, b, c, stride] = rows;
    const auto [heads, head_dim, groups, state_size] = sizes;
    const SpaceScan scan = {at<const float>(x),     at<const float>(b),    at<const float>(c), stride,
                            at<const float>(dt),    at<const float>(decay), at<const float>(skip),
                            at<float>(out),         heads,                 head_dim,           groups,
                            state_size};
    const Level& own = levels::named(all_levels(), level);
    const Sequences all = sequences_of(sequences);
    const Memory states = memory_of(memory);
    for_each(num_sequences * heads, num_threads, [&](int64_t i) {
        fetch(all, num_sequences, states, scan.heads, i + 1);
        own.scan_space(scan, all, states, i / scan.heads, i % scan.heads);
    });
}

void scan_delta(const std::string& level, RowAddresses rows, uintptr_t beta, uintptr_t decay, uintptr_t out,
                Sizes sizes, SequenceAddresses sequences, int64_t num_sequences, MemoryNumbers memory,
                int num_threads) {
    const auto [q, k, v, stride] = rows;
    const auto [heads, value_dim, key_heads, key_dim] = sizes;
    const DeltaScan scan = {at<const float>(q),    at<const float>(k),     at<const float>(v), stride,
                            at<const float>(beta), at<const float>(decay), at<float>(out),     heads,
                            value_dim,             key_heads,              key_dim};
    const Level& own = levels::named(all_levels(), level);
    const Sequences all = sequences_of(sequences);
    const Memory states = memory_of(memory);
    for_each(num_sequences * heads, num_threads, [&](int64_t i) {
        fetch(all, num_sequences, states, scan.heads, i + 1);
        own.scan_delta(scan, all, states, i / scan.heads, i % scan.heads);
    });
}

// With fewer elements than this, waking another thread takes longer than the work.
constexpr int64_t kSerialElements = 1 << 14;
// Channels that a thread takes at a time.
constexpr int64_t kChannels = 256;

typedef std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t> GatedAddresses;  // x, gate, gate behind; bytes of a row
typedef std::tuple<uintptr_t, uintptr_t, int64_t> TapNumbers;  // addresses of taps and biases; number of taps

void convolve(const std::string& level, GatedAddresses rows, TapNumbers weights, uintptr_t tails, int64_t tail_bytes,
              uintptr_t out, int64_t channels, bool is_bfloat16, SequenceAddresses sequences, int64_t num_sequences,
              int num_threads) {
    const auto [x, gate, gate_behind, row_bytes] = rows;
    const auto [weight, bias, taps] = weights;
    if (taps < kLeastTaps || taps > kMostTaps) throw std::invalid_argument("no convolution of so many tokens");
    const Convolution own = {at<const char>(x),      at<const char>(gate),  at<const char>(gate_behind), row_bytes,
                             at<const float>(weight), at<const float>(bias), at<char>(tails),             tail_bytes,
                             at<char>(out),          channels,              taps,                        is_bfloat16};
    const Level& used = levels::named(all_levels(), level);
    const Sequences all = sequences_of(sequences);
    const int64_t num_chunks = (channels + kChannels - 1) / kChannels;
    for_each(num_sequences * num_chunks, num_threads, [&](int64_t i) {
        const int64_t first = i % num_chunks * kChannels;
        used.convolve(own, all, i / num_chunks, first, std::min(first + kChannels, channels));
    });
}

typedef std::tuple<int64_t, int64_t, int64_t> GroupSizes;  // rows, groups, width of a group

void gate_rows(const std::string& level, uintptr_t x, uintptr_t gates, int64_t gate_row_bytes, uintptr_t weight,
               uintptr_t out, GroupSizes sizes, float eps, bool gates_first, bool is_bfloat16, int num_threads) {
    const auto [num_rows, groups, width] = sizes;
    const GatedRows own = {at<float>(x), at<const char>(gates), gate_row_bytes, at<const float>(weight), at<char>(out),
                           groups,       width,                 eps,            gates_first,             is_bfloat16};
    const Level& used = levels::named(all_levels(), level);
    const int64_t count = num_rows * groups;
    const int64_t num_parts = count * width < kSerialElements ? 1 : std::min<int64_t>(count, 4 * num_threads);
    for_each(num_parts, num_threads, [&](int64_t i) { used.gate(own, count * i / num_parts, count * (i + 1) / num_parts); });
}

void silu(const std::string& level, uintptr_t x, int64_t count, int num_threads) {
    const Level& own = levels::named(all_levels(), level);
    nb::gil_scoped_release released;
    if (count < kSerialElements || num_threads < 2) return own.silu(at<float>(x), 0, count);
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int part = 0; part < num_threads; ++part)
        own.silu(at<float>(x), count * part / num_threads, count * (part + 1) / num_threads);
}

}  // namespace

void bind(nb::module_& module) {
    module.def("scan_space", &scan_space);
    module.def("scan_delta", &scan_delta);
    module.def("convolve", &convolve);
    module.def("gate_rows", &gate_rows);
    module.def("silu_in_place", &silu);
    module.attr("most_state_keys") = kMostKeys;
    module.attr("most_taps") = kMostTaps;
}

}  // namespace states
