// Slots fetched from memory before they are read. To be included inside a level's own namespace.

inline void prefetch(const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// Slots that are read one after another are fetched so many bytes before: far enough for memory, near enough for the lines
// that the processor fetches by itself to be the same.
constexpr int64_t kAheadBytes = 16384;

// Some of a tile's slots, as they will be read.
struct Slots {
    const char* base;
    const int64_t* offsets;
    int count;
};

// Tokens of a tile that are kAheadBytes long.
inline int tokens_ahead(const Shape& shape) {
    const int64_t tokens = kAheadBytes / shape.read_bytes();
    return tokens < 1 ? 1 : tokens > kKeys ? kKeys : int(tokens);
}

// Slots that will be read, fetched in the order in which they lie in memory, a little with each token of each head that is
// computed meanwhile: those of the tile being read, but for the first `ahead`, then so many of the next. Where memory is the
// limit they go to the second cache, which waits for more lines at once than the first.
template <bool kIsFromMemory>
class Ahead {
   public:
    Ahead(const Shape& shape, int ahead, const Slots& own, const Slots& next) : slot_bytes_(shape.read_bytes()), next_(next) {
        share_ = (slot_bytes_ + shape.num_heads() - 1) / shape.num_heads();
        next_.count = next.count < ahead ? next.count : ahead;
        now_ = {own.base, own.offsets + ahead, own.count - ahead};
        if (now_.count <= 0) turn();
    }

    // What is due with `steps` tokens of one head.
    inline void fetch(int64_t steps = 1) {
        for (due_ += steps * share_; now_.count; next_slot()) {
            const char* slot = now_.base + *now_.offsets;
            const int64_t end = due_ < slot_bytes_ ? due_ : slot_bytes_;
            for (; at_ < end; at_ += 64) __builtin_prefetch(slot + at_, 0, kIsFromMemory ? 2 : 3);
            if (at_ < slot_bytes_) return;
        }
    }

   private:
    inline void next_slot() {
        at_ = 0;
        due_ -= slot_bytes_;
        ++now_.offsets;
        if (--now_.count == 0) turn();
    }
    inline void turn() {
        now_ = next_;
        next_.count = 0;
    }

    int64_t slot_bytes_, share_;
    int64_t at_ = 0, due_ = 0;
    Slots now_, next_;
};
