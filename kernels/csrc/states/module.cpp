// Recurrent states as Python sees them: the heads of all sequences of a pass, divided over cores.
//
// Addresses are checked by the caller (kernels/cpu/state_scans.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../levels.h"
#include "states.h"

namespace nb = nanobind;

namespace states {

extern const Level plain_level;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
extern const Level avx2_level, avx512_level;
#endif

namespace {

const std::vector<Level>& all_levels() {
    static const std::vector<Level> all = {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
        avx512_level, avx2_level,
#endif
        plain_level,
    };
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

template <typename Work>
void for_heads(int64_t num_sequences, int64_t heads, int num_threads, const Work& work) {
    nb::gil_scoped_release released;
    const int64_t count = num_sequences * heads;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_threads > 1)
    for (int64_t i = 0; i < count; ++i) work(i / heads, i % heads);
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
    for_heads(num_sequences, heads, num_threads,
              [&](int64_t sequence, int64_t head) { own.scan_space(scan, all, states, sequence, head); });
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
    for_heads(num_sequences, heads, num_threads,
              [&](int64_t sequence, int64_t head) { own.scan_delta(scan, all, states, sequence, head); });
}

// With fewer elements than this, waking another thread takes longer than the work.
constexpr int64_t kSerialElements = 1 << 14;

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
    module.def("silu_in_place", &silu);
    module.attr("most_state_keys") = kMostKeys;
}

}  // namespace states
