// The exchange between ranks as Python sees it: whole arrays, in as many calls as slots need.
//
// Addresses are checked by the caller (kernels/cpu/rank_exchange.py), which holds the tensors and the memory.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "exchange.h"

namespace nb = nanobind;

namespace rank_exchange {

namespace {

// Work on pieces [first, last) by threads; of little work one does it all.
template <typename Work>
void in_parallel(int64_t count, int num_threads, const Work& work) {
    constexpr int64_t kLeast = 1 << 15;
    const int64_t num_parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, count / kLeast));
#pragma omp parallel for num_threads(num_parts) schedule(static) if (num_parts > 1)
    for (int64_t part = 0; part < num_parts; ++part) work(count * part / num_parts, count * (part + 1) / num_parts);
}

// x [count] = the sum of all ranks' x. False: the exchange is broken.
bool all_reduce(Exchange& exchange, uintptr_t x, int64_t count, bool is_bfloat16, int num_threads) {
    nb::gil_scoped_release released;
    const int64_t element = is_bfloat16 ? 2 : 4, most = exchange.slot_bytes() / element;
    for (int64_t at = 0; at < count; at += most) {
        const int64_t here = std::min(most, count - at);
        char* values = reinterpret_cast<char*>(x) + at * element;
        in_parallel(here, num_threads, [&](int64_t first, int64_t last) {
            std::memcpy(exchange.own() + first * element, values + first * element, (last - first) * element);
        });
        if (!exchange.share()) return false;
        in_parallel(here, num_threads, [&](int64_t first, int64_t last) { exchange.sum(values, is_bfloat16, first, last); });
        exchange.advance();
    }
    return true;
}

// out [size, num_bytes] = every rank's x [num_bytes], in order; without `out` (0) they are only given. False: broken.
bool all_gather(Exchange& exchange, uintptr_t x, int64_t num_bytes, uintptr_t out) {
    nb::gil_scoped_release released;
    for (int64_t at = 0; at < num_bytes; at += exchange.slot_bytes()) {
        const int64_t here = std::min(exchange.slot_bytes(), num_bytes - at);
        std::memcpy(exchange.own(), reinterpret_cast<const char*>(x) + at, here);
        if (!exchange.share()) return false;
        for (int rank = 0; out && rank < exchange.size(); ++rank)
            std::memcpy(reinterpret_cast<char*>(out) + rank * num_bytes + at, exchange.of(rank), here);
        exchange.advance();
    }
    return true;
}

}  // namespace

void bind(nb::module_& module) {
    nb::class_<Exchange>(module, "RankExchange")
        .def(nb::init<uintptr_t, int, int, int64_t, double>())
        .def_prop_ro("is_broken", &Exchange::is_broken)
        .def("break_off", &Exchange::break_off)
        .def("all_reduce", &all_reduce)
        .def("all_gather", &all_gather);
    module.def("rank_exchange_bytes", &memory_bytes);
}

}  // namespace rank_exchange
