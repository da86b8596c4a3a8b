// A step of decodes through all layers in one call, in one parallel region.
//
// Each row runs through the same kernels as it does part by part, so results are the same bit by bit. What this saves is
// a call from Python and a waking of threads for each of some hundred parts, as much as a small model computes in a row.
//
// A layer of queries, keys and values side by side, norms before its two halves, and a feed-forward part of two products:
//   normed = norm(residual += pending)          pending: what the layer before adds to the residual; the first has none
//   attended = attention(place(qkv(normed)))    place: each head normalised, in some models, then rotated and cached
//   pending = down(gate_up(norm(residual += output(attended))))
// and, where they are asked for, logits = head(norm(residual += pending)) of the last.
//
// The step is a line of stages of some parts each (panels of a product, pieces of attention, rows of the rest). Threads
// take parts of the current stage; who completes its last part goes on to the next one: it does a stage of a single part
// by itself, as most are in a step of one row, and hands out the others. So nobody waits for a thread without work.
//
// Addresses are checked by the caller (kernels/cpu/decode_pass.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../work.h"
#include "parts.h"

namespace nb = nanobind;

namespace decode_pass {

namespace {

using products::Memory;

constexpr size_t kAlignment = 64;
// Up to so many rows are one part of a stage: they take less than waking another thread's attention.
constexpr int64_t kRowsTogether = 2;
constexpr int kProducts = 4;  // of a layer
// A thread that waits for a stage looks so often, some ten microseconds, before it offers its core to others.
constexpr int kSpins = 1000;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Products of the same inputs, whose results lie side by side.
struct JoinedProduct {
    std::vector<const Product*> parts;

    int64_t in_width() const { return parts.front()->in_width(); }

    int64_t out_width() const {
        int64_t width = 0;
        for (const Product* part : parts) width += part->out_width();
        return width;
    }

    size_t rounded_bytes(int64_t num_rows) const {
        size_t bytes = 0;
        for (const Product* part : parts) bytes += aligned(part->rounded_bytes(num_rows));
        return bytes;
    }

    int64_t num_parts(int64_t num_rows) const {
        int64_t count = 0;
        for (const Product* part : parts) count += part->num_parts(num_rows);
        return count;
    }
};

struct Layer {
    const RowNorm* attention_norm;
    JoinedProduct qkv;
    JoinedProduct output;
    const RowNorm* mlp_norm;
    JoinedProduct gate_up;
    JoinedProduct down;
    std::vector<const RowNorm*> head_norms;  // of each query head and of each key head; or none
    int rope;                                // index of its angles; -1: nothing is rotated
    bool is_windowed;

    const JoinedProduct& product(int index) const {
        const JoinedProduct* products[kProducts] = {&qkv, &output, &gate_up, &down};
        return *products[index];
    }
};

struct Angles {
    const float *cos, *sin;
    int64_t half;
};

// The slots of layer 0; those of the next layer lie `layer_bytes` further.
struct CacheSlots {
    char *keys, *values;
    int64_t layer_bytes;
    bool is_int8;
    const int64_t* slots;  // [rows]
};

// Rows between the stages of a layer, and the rounded inputs of a product.
struct Buffers {
    char *normed, *fused, *attended, *added, *inner, *rounded;
};

struct Step {
    char* residual;  // [rows, hidden_size], one run of memory, as are pending and logits
    char* pending;
    char* logits;  // or null
    int64_t num_rows;
    CacheSlots cache;
    std::vector<Angles> angles;
    Attention* attention;
    Buffers buffers;
};

// The parts of a stage that are left, in a run for each thread; who is done takes from the end of another's. A thread that
// comes late, with the number of an earlier stage, gets nothing.
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
    static constexpr int kBits = 24;  // of a part's number
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
            if (run.left.compare_exchange_weak(left, rest, std::memory_order_relaxed)) return is_first ? first : last - 1;
        }
    }

    std::vector<Run> runs_;
};

// Seconds of attention and of products, from the beginning of their stages to the end.
struct Times {
    using Clock = std::chrono::steady_clock;

    double attention_s = 0.0, products_s = 0.0;
    Clock::time_point since = Clock::now();

    // Add the time since the last call to `seconds`, if given.
    void lap(double* seconds) {
        const Clock::time_point now = Clock::now();
        if (seconds) *seconds += std::chrono::duration<double>(now - since).count();
        since = now;
    }
};

class DecodePass {
   public:
    DecodePass(const Placement& placement, int64_t hidden_size)
        : placement_(placement), hidden_size_(hidden_size), size_(placement.is_bfloat16() ? 2 : 4) {}

    void add_layer(const RowNorm& attention_norm, const std::vector<const Product*>& qkv,
                   const std::vector<const Product*>& output, const RowNorm& mlp_norm,
                   const std::vector<const Product*>& gate_up, const std::vector<const Product*>& down,
                   const std::vector<const RowNorm*>& head_norms, int rope, bool is_windowed) {
        check(attention_norm);
        check(mlp_norm);
        if (!head_norms.empty() && head_norms.size() != 2) throw std::invalid_argument("norms of other heads");
        for (const RowNorm* norm : head_norms)
            if (norm->width() != placement_.head_dim() || norm->is_bfloat16() != placement_.is_bfloat16())
                throw std::invalid_argument("norms of other heads");
        layers_.push_back({&attention_norm, joined(qkv, hidden_size_, placement_.width()),
                           joined(output, placement_.query_width(), hidden_size_), &mlp_norm,
                           joined(gate_up, hidden_size_, -1), joined(down, -1, hidden_size_), head_norms, rope,
                           is_windowed});
        if (layers_.back().gate_up.out_width() != layers_.back().down.in_width())
            throw std::invalid_argument("products that do not follow one another");
    }

    void set_head(const RowNorm& norm, const std::vector<const Product*>& head) {
        check(norm);
        head_norm_ = &norm;
        head_ = joined(head, hidden_size_, -1);
    }

    // residual [num_rows, hidden_size] changes in place; pending, of the same shape, is written: the last layer's part
    // that the residual still lacks, unless logits [num_rows, columns of the head] are asked for (0: not). `angles`: cos, sin, half of each rope. Returns the seconds of attention and products.
    std::pair<double, double> run(uintptr_t residual, uintptr_t pending, uintptr_t logits, int64_t num_rows,
                                  Attention& attention, const std::vector<std::vector<uintptr_t>>& angles, uintptr_t slots, uintptr_t keys,
                                  uintptr_t values, int64_t layer_bytes, int64_t num_slots, bool is_int8,
                                  int num_threads);

   private:
    class Run;

    void check(const RowNorm& norm) const {
        if (norm.width() != hidden_size_ || norm.is_bfloat16() != placement_.is_bfloat16())
            throw std::invalid_argument("a norm of other rows");
    }

    JoinedProduct joined(const std::vector<const Product*>& parts, int64_t in_width, int64_t out_width) const {
        if (parts.empty()) throw std::invalid_argument("no product");
        const JoinedProduct product{parts};
        for (const Product* part : parts)
            if (part->in_width() != product.in_width() || !part->takes(placement_.is_bfloat16()))
                throw std::invalid_argument("a product of other inputs");
        if ((in_width >= 0 && product.in_width() != in_width) || (out_width >= 0 && product.out_width() != out_width))
            throw std::invalid_argument("a product of other widths");
        return product;
    }

    void check(const Step& step, int64_t num_slots, int num_threads) const {
        if (layers_.empty() || num_threads < 1 || step.num_rows < 1) throw std::invalid_argument("nothing to run");
        if (step.logits && !head_norm_) throw std::invalid_argument("no head");
        const Attention& attention = *step.attention;
        if (attention.num_rows() != step.num_rows || attention.num_layers() != int64_t(layers_.size()) ||
            attention.query_width() != placement_.query_width() ||
            attention.is_bfloat16() != placement_.is_bfloat16())
            throw std::invalid_argument("attention of another step");
        for (const Layer& layer : layers_)
            if (layer.rope >= int(step.angles.size())) throw std::invalid_argument("no angles of a rope");
        for (int64_t i = 0; i < step.num_rows; ++i)
            if (step.cache.slots[i] < 0 || step.cache.slots[i] >= num_slots)
                throw std::invalid_argument("a slot outside the storage");
    }

    // Out of one run of memory that is kept from step to step.
    Buffers buffers(int64_t num_rows) {
        int64_t inner_width = 0;
        size_t rounded = head_norm_ ? head_.rounded_bytes(num_rows) : 0;
        for (const Layer& layer : layers_) {
            inner_width = std::max(inner_width, layer.down.in_width());
            for (int i = 0; i < kProducts; ++i) rounded = std::max(rounded, layer.product(i).rounded_bytes(num_rows));
        }
        const auto bytes_of = [&](int64_t width) { return aligned(size_t(num_rows * width * size_)); };
        const size_t hidden = bytes_of(hidden_size_), fused = bytes_of(placement_.width()),
                     attended = bytes_of(placement_.query_width()), inner = bytes_of(inner_width);
        const size_t bytes = 2 * hidden + fused + attended + inner + rounded;
        if (!memory_ || memory_->bytes() < bytes) {
            memory_.reset();
            memory_ = std::make_unique<Memory>(bytes);
        }
        char* at = memory_->data();
        const auto next = [&](size_t size) { return std::exchange(at, at + size); };
        return {next(hidden), next(fused), next(attended), next(hidden), next(inner), next(rounded)};
    }

    const Placement& placement_;
    const int64_t hidden_size_;
    const int64_t size_;  // bytes of an element
    std::vector<Layer> layers_;
    const RowNorm* head_norm_ = nullptr;
    JoinedProduct head_;
    std::unique_ptr<Memory> memory_;
};

// The stages of one step, for all threads of the region.
class DecodePass::Run {
   public:
    Run(const DecodePass& pass, const Step& step, int num_threads)
        : pass_(pass),
          step_(step),
          num_row_parts_(step.num_rows <= kRowsTogether ? 1 : std::min<int64_t>(step.num_rows, num_threads)),
          head_(int64_t(pass.layers_.size()) * kStages),
          end_(head_ + (step.logits ? kHeadStages : 0)),
          parts_(num_threads) {
        go_on(-1);
    }

    // By every thread.
    void work(int thread) {
        for (int64_t stage = stage_.load(std::memory_order_acquire); stage < end_;) {
            int64_t num_done = 0;
            for (int64_t part = parts_.take(stage, thread); part >= 0; part = parts_.take(stage, thread)) {
                compute(stage, part);
                ++num_done;
            }
            if (num_done && completes(num_done)) go_on(stage);
            stage = next_of(stage);
        }
    }

    const Times& times() const { return times_; }

   private:
    // Of a layer, in order.
    enum Stage {
        kNormQkv, kQkv, kPlace, kAttend, kMerge, kRoundAttended, kOutput, kNormMlp, kGateUp, kRoundInner, kDown, kStages
    };

    // Behind the last layer.
    enum HeadStage { kFinalNorm, kHead, kHeadStages };

    // Count parts of the current stage, which does not end before; true: they were the last.
    bool completes(int64_t num_done) {
        const int64_t num_parts = num_parts_;
        return num_done_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == num_parts;
    }

    // By the thread that completed the stage, alone: do stages of a single part, up to one that is handed out.
    void go_on(int64_t stage) {
        while (true) {
            times_.lap(seconds_of(stage));
            if (++stage == end_) break;
            num_parts_ = num_parts(stage);
            if (num_parts_ > 1) break;
            if (num_parts_) compute(stage, 0);
        }
        num_done_.store(0, std::memory_order_relaxed);
        if (stage < end_) parts_.restart(stage, num_parts_);
        stage_.store(stage, std::memory_order_release);
    }

    // Wait until the stage is another one.
    int64_t next_of(int64_t stage) const {
        for (int spins = 0;; ++spins) {
            const int64_t current = stage_.load(std::memory_order_acquire);
            if (current != stage) return current;
            if (spins < kSpins)
                pause();
            else
                sched_yield();
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    const Layer& layer_of(int64_t stage) const { return pass_.layers_[stage / kStages]; }

    double* seconds_of(int64_t stage) {
        if (stage < 0) return nullptr;
        if (stage >= head_) return stage == head_ + kHead ? &times_.products_s : nullptr;
        switch (stage % kStages) {
            case kQkv:
            case kOutput:
            case kGateUp:
            case kDown: return &times_.products_s;
            case kAttend:
            case kMerge: return &times_.attention_s;
            default: return nullptr;
        }
    }

    int64_t num_parts(int64_t stage) const {
        if (stage >= head_) return stage == head_ + kHead ? pass_.head_.num_parts(step_.num_rows) : num_row_parts_;
        const Layer& layer = layer_of(stage);
        switch (stage % kStages) {
            case kQkv: return layer.qkv.num_parts(step_.num_rows);
            case kOutput: return layer.output.num_parts(step_.num_rows);
            case kGateUp: return layer.gate_up.num_parts(step_.num_rows);
            case kDown: return layer.down.num_parts(step_.num_rows);
            case kAttend: begin_attention(stage / kStages); return step_.attention->num_pieces();
            case kMerge: return step_.attention->num_merges();
            default: return num_row_parts_;
        }
    }

    void compute(int64_t stage, int64_t part) const {
        const Buffers& rows = step_.buffers;
        if (stage == head_ + kFinalNorm) return normalise(*pass_.head_norm_, step_.pending, pass_.head_, part);
        if (stage == head_ + kHead) return multiply(pass_.head_, rows.normed, step_.logits, part);
        const Layer& layer = layer_of(stage);
        switch (stage % kStages) {
            case kNormQkv: return normalise(*layer.attention_norm, stage ? step_.pending : nullptr, layer.qkv, part);
            case kQkv: return multiply(layer.qkv, rows.normed, rows.fused, part);
            case kPlace: return place(stage / kStages, part);
            case kAttend: return step_.attention->attend(part);
            case kMerge: return step_.attention->merge(part);
            case kRoundAttended: return round(layer.output, rows.attended, part);
            case kOutput: return multiply(layer.output, rows.attended, rows.added, part);
            case kNormMlp: return normalise(*layer.mlp_norm, rows.added, layer.gate_up, part);
            case kGateUp: return multiply(layer.gate_up, rows.normed, rows.inner, part);
            case kRoundInner: return round(layer.down, rows.inner, part);
            case kDown: return multiply(layer.down, rows.inner, step_.pending, part);
        }
    }

    int64_t first_row(int64_t part) const { return step_.num_rows * part / num_row_parts_; }

    // normed = norm(residual += added), if anything is added; rounded for the product.
    void normalise(const RowNorm& norm, const char* added, const JoinedProduct& product, int64_t part) const {
        const int64_t row_bytes = pass_.hidden_size_ * pass_.size_;
        const rows::NormRows call{added ? added : step_.residual, row_bytes,           added ? step_.residual : nullptr,
                                  row_bytes,                      step_.buffers.normed, row_bytes};
        norm.normalise(call, first_row(part), first_row(part + 1));
        round(product, step_.buffers.normed, part);
    }

    void round(const JoinedProduct& product, const char* x, int64_t part) const {
        on_calls(product, x, nullptr, [&](const Product& own, const ProductCall& call) {
            own.round(call, first_row(part), first_row(part + 1));
            return true;
        });
    }

    void multiply(const JoinedProduct& product, const char* x, char* out, int64_t part) const {
        on_calls(product, x, out, [&](const Product& own, const ProductCall& call) {
            const int64_t count = own.num_parts(step_.num_rows);
            if (part < count) own.multiply(call, part);
            return (part -= count) >= 0;
        });
    }

    // work(product, call) for each of the joined ones, until it returns false.
    template <typename Work>
    void on_calls(const JoinedProduct& product, const char* x, char* out, const Work& work) const {
        const int64_t size = pass_.size_;
        ProductCall call{x,   product.in_width() * size,  step_.buffers.rounded,           out,
                         product.out_width() * size, step_.num_rows, pass_.placement_.is_bfloat16()};
        for (const Product* own : product.parts) {
            if (!work(*own, call)) return;
            call.rounded += aligned(own->rounded_bytes(step_.num_rows));
            if (out) call.out += own->out_width() * size;
        }
    }

    // Each query and key head by itself, in place.
    void normalise_heads(const std::vector<const RowNorm*>& norms, int64_t row) const {
        const int64_t head_dim = pass_.placement_.head_dim(), head_bytes = head_dim * pass_.size_;
        const int64_t num_heads = pass_.placement_.query_width() / head_dim;
        const int64_t kv_heads = (pass_.placement_.width() / head_dim - num_heads) / 2;
        char* heads = step_.buffers.fused + row * pass_.placement_.width() * pass_.size_;
        char* keys = heads + num_heads * head_bytes;
        norms[0]->normalise({heads, head_bytes, nullptr, 0, heads, head_bytes}, 0, num_heads);
        norms[1]->normalise({keys, head_bytes, nullptr, 0, keys, head_bytes}, 0, kv_heads);
    }

    void place(int64_t layer, int64_t part) const {
        const std::vector<const RowNorm*>& norms = pass_.layers_[layer].head_norms;
        for (int64_t row = first_row(part); !norms.empty() && row < first_row(part + 1); ++row)
            normalise_heads(norms, row);
        const CacheSlots& cache = step_.cache;
        const int rope = pass_.layers_[layer].rope;
        rows::HeadRows call{};
        call.heads = step_.buffers.fused;
        call.row_bytes = pass_.placement_.width() * pass_.size_;
        if (rope >= 0) {
            call.cos = step_.angles[rope].cos;
            call.sin = step_.angles[rope].sin;
            call.half = step_.angles[rope].half;
        }
        call.slots = cache.slots;
        call.keys = cache.keys + layer * cache.layer_bytes;
        call.values = cache.values + layer * cache.layer_bytes;
        call.is_int8 = cache.is_int8;
        pass_.placement_.place(call, first_row(part), first_row(part + 1));
    }

    void begin_attention(int64_t layer) const {
        step_.attention->begin(int(layer), pass_.layers_[layer].is_windowed,
                               reinterpret_cast<uintptr_t>(step_.buffers.fused), pass_.placement_.width(),
                               reinterpret_cast<uintptr_t>(step_.buffers.attended), pass_.placement_.query_width());
    }

    const DecodePass& pass_;
    const Step& step_;
    const int64_t num_row_parts_;
    const int64_t head_;  // the first stage behind the layers
    const int64_t end_;
    Times times_;  // written by the thread that goes on, as num_parts_
    int64_t num_parts_ = 0;
    StageParts parts_;
    alignas(64) std::atomic<int64_t> stage_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
};

std::pair<double, double> DecodePass::run(uintptr_t residual, uintptr_t pending, uintptr_t logits, int64_t num_rows,
                                          Attention& attention, const std::vector<std::vector<uintptr_t>>& angles, uintptr_t slots,
                                          uintptr_t keys, uintptr_t values, int64_t layer_bytes, int64_t num_slots,
                                          bool is_int8, int num_threads) {
    Step step{reinterpret_cast<char*>(residual), reinterpret_cast<char*>(pending), reinterpret_cast<char*>(logits),
              num_rows,
              {reinterpret_cast<char*>(keys), reinterpret_cast<char*>(values), layer_bytes, is_int8,
               reinterpret_cast<const int64_t*>(slots)},
              {}, &attention, {}};
    for (const std::vector<uintptr_t>& own : angles)
        step.angles.push_back({reinterpret_cast<const float*>(own.at(0)), reinterpret_cast<const float*>(own.at(1)),
                               int64_t(own.at(2))});
    check(step, num_slots, num_threads);
    step.buffers = buffers(num_rows);
    nb::gil_scoped_release released;
    Run run(*this, step, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    run.work(omp_get_thread_num());
    return {run.times().attention_s, run.times().products_s};
}

}  // namespace

void bind_parts(nb::module_& module) {
    nb::class_<RowNorm>(module, "RowNorm");
    nb::class_<Placement>(module, "Placement");
    nb::class_<Product>(module, "Product");
    nb::class_<Attention>(module, "Attention");
}

void bind(nb::module_& module) {
    nb::class_<DecodePass>(module, "DecodePass")
        .def(nb::init<const Placement&, int64_t>(), nb::keep_alive<1, 2>())
        .def("add_layer", &DecodePass::add_layer)
        .def("set_head", &DecodePass::set_head)
        .def("run", &DecodePass::run);
}

}  // namespace decode_pass
