// What products of packed weights have in common, whatever the weights: their memory, and how the work is divided.
#pragma once

#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "products.h"

namespace products {

inline Activation activation_named(const std::string& name) {
    if (name == "none") return Activation::none;
    if (name == "relu") return Activation::relu;
    if (name == "relu2") return Activation::relu2;
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "clamped_silu") return Activation::clamped_silu;
    throw std::invalid_argument("no activation " + name);
}

// Address of the values, their stride, the column of the first up, address of each row's own; zeros: no row has any.
typedef std::tuple<uintptr_t, int64_t, int64_t, uintptr_t> AddendNumbers;

inline Addends addends_of(const AddendNumbers& numbers) {
    const auto [values, stride, up_column, of_row] = numbers;
    return {reinterpret_cast<const float*>(values), stride, up_column, reinterpret_cast<const int64_t*>(of_row)};
}

constexpr size_t kHugePage = 2 << 20;

// Memory on huge pages where they fill: reading a weight from its first to its last byte then needs few of them.
class Memory {
   public:
    explicit Memory(size_t bytes) : bytes_(bytes) {
        const bool is_large = bytes >= kHugePage;
        if (posix_memalign(&at_, is_large ? kHugePage : 64, std::max<size_t>(bytes, 64))) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (is_large) madvise(at_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a wish: without it, it is slower
#endif
    }
    ~Memory() { std::free(at_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* data() const { return static_cast<char*>(at_); }
    size_t bytes() const { return bytes_; }

   private:
    void* at_ = nullptr;
    size_t bytes_;
};

// The memory of a packed weight. Weights that are packed one after another lie one after another, on the same huge
// pages: most weights do not fill theirs, and would have their ends on small ones. What is never written takes none.
class WeightMemory {
   public:
    explicit WeightMemory(size_t bytes) : bytes_(bytes) {
        static std::weak_ptr<Run> latest;  // it lives as long as a weight in it
        const size_t taken = (bytes + kPage - 1) / kPage * kPage;
        const std::lock_guard<std::mutex> lock(mutex());
        run_ = latest.lock();
        if (!run_ || run_->memory.bytes() - run_->num_taken < taken) {
            run_ = std::make_shared<Run>(std::max(taken, kRunBytes));
            latest = run_;
        }
        at_ = run_->memory.data() + run_->num_taken;
        run_->num_taken += taken;
        living()[at_] = taken;
#ifdef __SANITIZE_ADDRESS__
        __asan_poison_memory_region(at_ + bytes, taken - bytes);
#endif
    }
    ~WeightMemory() {
        {
            const std::lock_guard<std::mutex> lock(mutex());
            living().erase(at_);
        }
#ifdef MADV_DONTNEED
        madvise(at_, bytes_ / kPage * kPage, MADV_DONTNEED);  // others in the run may live on
#endif
    }
    WeightMemory(const WeightMemory&) = delete;
    WeightMemory& operator=(const WeightMemory&) = delete;

    char* data() const { return at_; }
    size_t bytes() const { return bytes_; }

    // Address and bytes, both whole pages, of the memory of every weight that there is.
    static std::vector<std::pair<uintptr_t, size_t>> all() {
        const std::lock_guard<std::mutex> lock(mutex());
        std::vector<std::pair<uintptr_t, size_t>> found;
        for (const auto& [at, bytes] : living()) found.emplace_back(reinterpret_cast<uintptr_t>(at), bytes);
        return found;
    }

   private:
    static constexpr size_t kPage = 4096;
    static constexpr size_t kRunBytes = size_t(64) << 20;

    static std::mutex& mutex() {
        static std::mutex own;
        return own;
    }
    static std::map<char*, size_t>& living() {
        static std::map<char*, size_t> own;
        return own;
    }

    struct Run {
        explicit Run(size_t bytes) : memory(bytes) {}

        Memory memory;
        size_t num_taken = 0;
    };

    std::shared_ptr<Run> run_;
    char* at_;
    size_t bytes_;
};

// Parts of a product, handed out to threads. Each begins with a run of its own, so that it reads panels one after
// another; a thread that is done takes from the end of what others have left, so that a core that is held up holds up
// no other.
class Shares {
   public:
    Shares(int64_t num_parts, int num_threads) : shares_(num_threads) {
        for (int i = 0; i < num_threads; ++i)
            shares_[i].left.store(joined(num_parts * i / num_threads, num_parts * (i + 1) / num_threads));
    }

    // The next part for this thread; -1: there is none.
    int64_t take(int thread) {
        int64_t part = take_first(shares_[thread]);
        for (size_t i = 1; part < 0 && i < shares_.size(); ++i) part = take_last(shares_[(thread + i) % shares_.size()]);
        return part;
    }

   private:
    struct alignas(64) Share {
        std::atomic<uint64_t> left;
    };

    static uint64_t joined(int64_t first, int64_t last) { return uint64_t(first) << 32 | uint64_t(last); }

    static int64_t take_first(Share& share) {
        uint64_t left = share.left.load(std::memory_order_relaxed);
        while (int64_t(left >> 32) < int64_t(left & 0xffffffffu))
            if (share.left.compare_exchange_weak(left, left + (uint64_t(1) << 32), std::memory_order_relaxed))
                return int64_t(left >> 32);
        return -1;
    }

    static int64_t take_last(Share& share) {
        uint64_t left = share.left.load(std::memory_order_relaxed);
        while (int64_t(left >> 32) < int64_t(left & 0xffffffffu))
            if (share.left.compare_exchange_weak(left, left - 1, std::memory_order_relaxed))
                return int64_t(left & 0xffffffffu) - 1;
        return -1;
    }

    std::vector<Share> shares_;
};

}  // namespace products
