// Sums and collections of what the ranks of a worker have computed, through memory that their processes share.
//
// Each rank has two slots, which its calls use in turn. A call writes to the rank's slot, counts it as written and waits
// until every rank has; then it reads all slots. When a rank writes to a slot again, the others have written theirs of
// the call in between, so they have read it. Sums are added from rank 0 to the last, so they are the same on every rank
// and do not depend on what else is in a call.
//
// A rank that waits looks for the others for longer than ranks that compute alike are apart, as a core that sleeps is not
// given back at once, least of all by the host of a virtual machine. Then it sleeps until it is woken, and never offers
// its core in between: who has slept is soon given it back, who has offered it is not.
//
// A rank that does not come breaks the exchange for all: waits end and results mean nothing from then on.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace rank_exchange {

constexpr int64_t kLine = 64;
constexpr int kSpins = 200;                 // looks between two looks at the clock, some microseconds
constexpr int64_t kLongestSpinNs = 2000000;  // before a rank sleeps
constexpr long kLongestSleepNs = 20000000;  // between two looks at the clock, and at whether the exchange is broken
constexpr int kMostRanks = 64;

// Of the shared memory: a line for the state, a line of each rank (how often it has written, who sleeps until it does),
// then the slots.
inline int64_t header_bytes(int size) { return (1 + int64_t(size)) * kLine; }
inline int64_t memory_bytes(int size, int64_t slot_bytes) { return header_bytes(size) + 2 * size * slot_bytes; }

class Exchange {
   public:
    // `memory` of memory_bytes, zero at first; `slot_bytes` a multiple of 64.
    Exchange(uintptr_t memory, int rank, int size, int64_t slot_bytes, double timeout_s)
        : memory_(reinterpret_cast<char*>(memory)), rank_(rank), size_(size), slot_bytes_(slot_bytes),
          timeout_s_(timeout_s) {
        if (size < 1 || size > kMostRanks || rank < 0 || rank >= size || slot_bytes < kLine || slot_bytes % kLine)
            throw std::invalid_argument("no such exchange");
    }

    int rank() const { return rank_; }
    int size() const { return size_; }
    int64_t slot_bytes() const { return slot_bytes_; }
    bool is_broken() const { return broken().load(std::memory_order_relaxed) != 0; }
    void break_off() {
        broken().store(1);
        for (int rank = 0; rank < size_; ++rank) wake(rank);
    }

    // Where this rank writes what the present call is about.
    char* own() { return slot(rank_); }

    // Count the slot as written and wait for the others; false: the exchange is broken. The slots are to be read before
    // `advance`.
    bool share() {
        const uint64_t number = calls_ + 1;
        written(rank_).store(number);  // before the look at who sleeps, as who sleeps says so before its last look
        if (sleepers(rank_).load()) wake(rank_);
        for (int other = 0; other < size_; ++other)
            if (!wait(other, number)) return false;
        return true;
    }

    // Go on to the next call.
    void advance() { ++calls_; }

    // out[i] = the sum of all ranks' numbers [first, last) of the present call.
    void sum(char* out, bool is_bfloat16, int64_t first, int64_t last) const {
        if (is_bfloat16)
            sum_bfloat16(reinterpret_cast<uint16_t*>(out), first, last);
        else
            sum_float(reinterpret_cast<float*>(out), first, last);
    }

    const char* of(int rank) const { return slot(rank); }

   private:
    using Clock = std::chrono::steady_clock;

    std::atomic<uint64_t>& word(int64_t line) const {
        return *reinterpret_cast<std::atomic<uint64_t>*>(memory_ + line * kLine);
    }
    std::atomic<uint64_t>& broken() const { return word(0); }
    std::atomic<uint64_t>& written(int rank) const { return word(1 + rank); }
    std::atomic<uint64_t>& sleepers(int rank) const { return *(&word(1 + rank) + 1); }  // that wait for it

    char* slot(int rank) const {
        return memory_ + header_bytes(size_) + (2 * rank + int64_t(calls_ & 1)) * slot_bytes_;
    }

    bool wait(int other, uint64_t number) {
        const Clock::time_point began = Clock::now();
        do {
            if (has_come_within_spins(other, number)) return true;
        } while (Clock::now() - began < std::chrono::nanoseconds(kLongestSpinNs));
        sleepers(other).fetch_add(1);
        const bool has_come = sleep(other, number);
        sleepers(other).fetch_sub(1);
        return has_come;
    }

    bool has_come_within_spins(int other, uint64_t number) const {
        const std::atomic<uint64_t>& counter = written(other);
        for (int spins = 0; spins < kSpins; ++spins) {
            if (counter.load(std::memory_order_acquire) >= number) return true;
            pause();
        }
        return false;
    }

    bool sleep(int other, uint64_t number) {
        const Clock::time_point began = Clock::now();
        for (;;) {
            const uint64_t seen = written(other).load();
            if (seen >= number) return true;
            if (is_broken()) return false;
            if (std::chrono::duration<double>(Clock::now() - began).count() > timeout_s_) {
                break_off();
                return false;
            }
            const timespec most = {0, kLongestSleepNs};
            syscall(SYS_futex, low_half(other), FUTEX_WAIT, uint32_t(seen), &most, nullptr, 0);
        }
    }

    void wake(int rank) { syscall(SYS_futex, low_half(rank), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

    // Of the counter, which is what the system compares.
    uint32_t* low_half(int rank) const { return reinterpret_cast<uint32_t*>(&written(rank)); }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void sum_float(float* out, int64_t first, int64_t last) const {
        const float* a = reinterpret_cast<const float*>(slot(0));
        if (size_ == 1) {
            std::copy(a + first, a + last, out + first);
            return;
        }
        const float* b = reinterpret_cast<const float*>(slot(1));
        for (int64_t i = first; i < last; ++i) out[i] = a[i] + b[i];
        for (int rank = 2; rank < size_; ++rank) {
            const float* next = reinterpret_cast<const float*>(slot(rank));
            for (int64_t i = first; i < last; ++i) out[i] += next[i];
        }
    }

    // In float32, rounded once.
    void sum_bfloat16(uint16_t* out, int64_t first, int64_t last) const {
        constexpr int64_t kTile = 256;
        float sums[kTile];
        for (int64_t start = first; start < last; start += kTile) {
            const int64_t count = std::min(kTile, last - start);
            for (int rank = 0; rank < size_; ++rank) {
                const uint16_t* next = reinterpret_cast<const uint16_t*>(slot(rank)) + start;
                for (int64_t i = 0; i < count; ++i) sums[i] = rank ? sums[i] + widened(next[i]) : widened(next[i]);
            }
            for (int64_t i = 0; i < count; ++i) out[start + i] = rounded(sums[i]);
        }
    }

    static float widened(uint16_t x) {
        const uint32_t bits = uint32_t(x) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    // To the nearest, to even; NaN stays NaN.
    static uint16_t rounded(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const uint32_t up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(bits >> 16 | 0x40) : uint16_t(up);
    }

    char* const memory_;
    const int rank_, size_;
    const int64_t slot_bytes_;
    const double timeout_s_;
    uint64_t calls_ = 0;
};

}  // namespace rank_exchange
