// The parts of a stage, as threads take them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace decode_pass {

// The parts of a stage that are left, in a run for each thread; one that is done takes from the end of another's run. A
// thread that comes late, with the number of an earlier stage, gets nothing.
class StageParts {
   public:
    explicit StageParts(int num_threads) : runs_(num_threads) {}

    void restart(int64_t stage, int64_t num_parts) {
        const int64_t count = runs_.size();
        for (int64_t i = 0; i < count; ++i)
            runs_[i].left.store(joined(stage, num_parts * i / count, num_parts * (i + 1) / count),
                                std::memory_order_relaxed);
    }

    // A part for this thread; -1: there is none.
    int64_t take(int64_t stage, int thread) {
        int64_t part = take_from(runs_[thread], stage, true);
        for (size_t i = 1; part < 0 && i < runs_.size(); ++i)
            part = take_from(runs_[(thread + i) % runs_.size()], stage, false);
        return part;
    }

   private:
    static constexpr int kBits = 24;  // of a part's number: of a product, 500 million columns
    static constexpr uint64_t kMask = (uint64_t(1) << kBits) - 1;

    struct alignas(64) Run {
        std::atomic<uint64_t> left{0};
    };

    static uint64_t joined(int64_t stage, int64_t first, int64_t last) {
        return uint64_t(stage) << 2 * kBits | uint64_t(first) << kBits | uint64_t(last);
    }

    static int64_t take_from(Run& run, int64_t stage, bool is_first) {
        uint64_t left = run.left.load(std::memory_order_relaxed);
        while (true) {
            const int64_t first = left >> kBits & kMask, last = left & kMask;
            if (int64_t(left >> 2 * kBits) != stage || first >= last) return -1;
            const uint64_t rest = is_first ? joined(stage, first + 1, last) : joined(stage, first, last - 1);
            if (run.left.compare_exchange_weak(left, rest, std::memory_order_relaxed))
                return is_first ? first : last - 1;
        }
    }

    std::vector<Run> runs_;
};

}  // namespace decode_pass
