// The Python side of block copies: checks the lists, divides them over threads, runs a level.
//
// Addresses are checked by the caller (kernels/cpu/block_copies.py), which holds the arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../levels.h"
#include "block_copies.h"

namespace nb = nanobind;

namespace block_copies {

extern const Level avx512_level [[gnu::weak]], avx2_level [[gnu::weak]], plain_level;

namespace {

// Bytes that a thread takes at a time, and that make it worth waking one.
constexpr int64_t kShare = 1 << 20, kPerThread = 4 << 20;
constexpr int64_t kStreamAlignment = 64;

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const std::vector<Level>& all_levels() {
    static const auto all = levels::compiled({&avx512_level, &avx2_level, &plain_level});
    return all;
}

// Blocks of one piece of memory, in an order.
struct BlockList {
    char* base;
    const int64_t* ids;
    int64_t block_bytes;

    BlockList(uintptr_t address, int64_t num_blocks, const Ids& listed, int64_t bytes)
        : base(reinterpret_cast<char*>(address)), ids(listed.data()), block_bytes(bytes) {
        for (size_t i = 0; i < listed.shape(0); ++i)
            if (ids[i] < 0 || ids[i] >= num_blocks) throw std::invalid_argument("a block outside its memory");
    }

    char* at(int64_t place) const { return base + ids[place] * block_bytes; }
    bool is_aligned() const { return (uintptr_t(base) | uintptr_t(block_bytes)) % kStreamAlignment == 0; }
};

// Runs `work(first, last)` over shares of `count`, on this thread and others; on fewer where none can be started.
template <typename Work>
void divide(int64_t count, int64_t per_share, int num_threads, const Work& work) {
    std::atomic<int64_t> next{0};
    const auto take_shares = [&] {
        for (int64_t first; (first = next.fetch_add(per_share)) < count;)
            work(first, std::min(first + per_share, count));
    };
    std::vector<std::thread> others;
    others.reserve(std::max(num_threads - 1, 0));
    try {
        for (int i = 1; i < num_threads; ++i) others.emplace_back(take_shares);
    } catch (const std::system_error&) {
    }
    take_shares();
    for (std::thread& other : others) other.join();
}

int useful_threads(int64_t num_bytes, int num_threads) {
    return int(std::max<int64_t>(1, std::min<int64_t>(num_threads, num_bytes / kPerThread)));
}

// Copies block source_ids[i] onto block target_ids[i], which has to be a list without repetitions; digests[i] becomes
// its digest (digests 0: it is not summed). `is_streamed`: past the caches, where blocks are aligned for it.
void copy_blocks(const std::string& level_name, uintptr_t source_at, int64_t num_sources, const Ids& source_ids,
                 uintptr_t target_at, int64_t num_targets, const Ids& target_ids, int64_t block_bytes,
                 uintptr_t digests_at, bool is_streamed, int num_threads) {
    const Level& level = levels::named(all_levels(), level_name);
    const int64_t count = source_ids.shape(0);
    if (int64_t(target_ids.shape(0)) != count) throw std::invalid_argument("as many targets as sources");
    if (block_bytes < 1) throw std::invalid_argument("blocks have bytes");
    const BlockList sources(source_at, num_sources, source_ids, block_bytes);
    const BlockList targets(target_at, num_targets, target_ids, block_bytes);
    const Stores how = is_streamed && targets.is_aligned() ? Stores::streamed : Stores::cached;
    uint64_t* const digests = reinterpret_cast<uint64_t*>(digests_at);
    nb::gil_scoped_release released;
    const auto work = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const Block block{sources.at(i), targets.at(i), block_bytes, sources.at(i + 1 < count ? i + 1 : i)};
            if (digests)
                digests[i] = level.copy_and_sum(block, how);
            else
                level.copy(block, how);
        }
        if (how == Stores::streamed) level.finish();
    };
    divide(count, std::max<int64_t>(1, kShare / block_bytes), useful_threads(count * block_bytes, num_threads), work);
}

// digests[i] becomes the digest of block ids[i].
void digest_blocks(const std::string& level_name, uintptr_t at, int64_t num_blocks, const Ids& ids,
                   int64_t block_bytes, uintptr_t digests_at, int num_threads) {
    const Level& level = levels::named(all_levels(), level_name);
    if (block_bytes < 1) throw std::invalid_argument("blocks have bytes");
    const int64_t count = ids.shape(0);
    const BlockList blocks(at, num_blocks, ids, block_bytes);
    uint64_t* const digests = reinterpret_cast<uint64_t*>(digests_at);
    nb::gil_scoped_release released;
    const auto work = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
            digests[i] = level.copy_and_sum({blocks.at(i), nullptr, block_bytes, blocks.at(i + 1 < count ? i + 1 : i)},
                                            Stores::none);
    };
    divide(count, std::max<int64_t>(1, kShare / block_bytes), useful_threads(count * block_bytes, num_threads), work);
}

}  // namespace

void bind(nb::module_& module) {
    module.def("block_copy_levels", [] { return levels::supported(all_levels()); });
    module.def("copy_with_digests", copy_blocks);
    module.def("digest_blocks", digest_blocks);
}

}  // namespace block_copies
