// A step of decodes through all layers in one call: one parallel region, and barriers between the parts of a layer.
//
// Each row runs through the same kernels as it does part by part, so results are the same bit by bit. What this saves is
// a call from Python and a waking of threads for each of some hundred parts, as much as a small model computes in a row.
//
// A layer of queries, keys and values side by side, norms before its two halves, and a feed-forward part of two products:
//   normed = norm(residual += pending)          pending: what the layer before adds to the residual; the first has none
//   attended = attention(place(qkv(normed)))
//   pending = down(gate_up(norm(residual += output(attended))))
//
// Addresses are checked by the caller (kernels/cpu/decode_pass.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
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
using products::Shares;

constexpr size_t kAlignment = 64;
// Up to so many rows are normalised and rounded by every thread for itself, which takes less than waiting for another.
constexpr int64_t kOwnRows = 2;
constexpr int kProducts = 4;  // of a layer

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
    int rope;  // index of its angles; -1: nothing is rotated
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

// Rows between the parts of a layer that threads write together.
struct SharedRows {
    char *fused, *attended, *added, *inner, *pending;
};

// Rows that a thread writes for itself, or, where there are many, each thread some of: all threads then have the same.
struct OwnRows {
    char *residual, *normed, *rounded;
};

struct Step {
    int64_t num_rows;
    CacheSlots cache;
    std::vector<Angles> angles;
    Attention* attention;
    SharedRows shared;
    std::vector<OwnRows> own;  // of each thread

    bool has_own_rows() const { return num_rows <= kOwnRows; }
};

// Seconds that the first thread spent between barriers in attention and in products.
struct Times {
    using Clock = std::chrono::steady_clock;

    double attention_s = 0.0, products_s = 0.0;
    Clock::time_point since = Clock::now();

    void restart() { since = Clock::now(); }
    void add_to(double& seconds) { seconds += std::chrono::duration<double>(Clock::now() - since).count(); }
};

class DecodePass {
   public:
    DecodePass(const Placement& placement, int64_t hidden_size)
        : placement_(placement), hidden_size_(hidden_size), size_(placement.is_bfloat16() ? 2 : 4) {}

    void add_layer(const RowNorm& attention_norm, const std::vector<const Product*>& qkv,
                   const std::vector<const Product*>& output, const RowNorm& mlp_norm,
                   const std::vector<const Product*>& gate_up, const std::vector<const Product*>& down, int rope,
                   bool is_windowed) {
        for (const RowNorm* norm : {&attention_norm, &mlp_norm})
            if (norm->width() != hidden_size_ || norm->is_bfloat16() != placement_.is_bfloat16())
                throw std::invalid_argument("a norm of other rows");
        layers_.push_back({&attention_norm, joined(qkv, hidden_size_, placement_.width()),
                           joined(output, placement_.query_width(), hidden_size_), &mlp_norm,
                           joined(gate_up, hidden_size_, -1), joined(down, -1, hidden_size_), rope, is_windowed});
        if (layers_.back().gate_up.out_width() != layers_.back().down.in_width())
            throw std::invalid_argument("products that do not follow one another");
    }

    // residual [num_rows, hidden_size] changes in place; pending, of the same shape, is written: the last layer's part
    // that the residual still lacks. `angles`: cos, sin, half of each rope. Returns the seconds of attention and products.
    std::pair<double, double> run(uintptr_t residual, uintptr_t pending, int64_t num_rows, Attention& attention,
                                  const std::vector<std::vector<uintptr_t>>& angles, uintptr_t slots, uintptr_t keys,
                                  uintptr_t values, int64_t layer_bytes, int64_t num_slots, bool is_int8,
                                  int num_threads);

   private:
    // One thread among those of the region.
    class Thread;

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
    void divide_memory(Step& step, char* residual, int num_threads) {
        int64_t inner_width = 0;
        size_t rounded = 0;
        for (const Layer& layer : layers_) {
            inner_width = std::max(inner_width, layer.down.in_width());
            for (int i = 0; i < kProducts; ++i) rounded = std::max(rounded, layer.product(i).rounded_bytes(step.num_rows));
        }
        const size_t hidden = rows_bytes(step, hidden_size_), fused = rows_bytes(step, placement_.width()),
                     attended = rows_bytes(step, placement_.query_width()), inner = rows_bytes(step, inner_width);
        const size_t own = 2 * hidden + rounded, num_own = step.has_own_rows() ? num_threads : 1;
        const size_t bytes = fused + attended + hidden + inner + num_own * own;
        if (!memory_ || memory_->bytes() < bytes) {
            memory_.reset();
            memory_ = std::make_unique<Memory>(bytes);
        }
        char* at = memory_->data();
        const auto next = [&](size_t size) { return std::exchange(at, at + size); };
        step.shared = {next(fused), next(attended), next(hidden), next(inner), step.shared.pending};
        for (size_t i = 0; i < num_own; ++i) {
            step.own.push_back({next(hidden), next(hidden), next(rounded)});
            if (i) std::memcpy(step.own[i].residual, residual, size_t(step.num_rows * hidden_size_ * size_));
        }
        step.own[0].residual = residual;
    }

    size_t rows_bytes(const Step& step, int64_t width) const { return aligned(size_t(step.num_rows * width * size_)); }

    const Placement& placement_;
    const int64_t hidden_size_;
    const int64_t size_;  // bytes of an element
    std::vector<Layer> layers_;
    std::unique_ptr<Memory> memory_;
};

class DecodePass::Thread {
   public:
    // To be made by every thread of the region.
    Thread(const DecodePass& pass, const Step& step, Shares* shares, Times& times)
        : pass_(pass),
          step_(step),
          shares_(shares),
          times_(times),
          index_(omp_get_thread_num()),
          num_threads_(omp_get_num_threads()),
          own_(step.own[step.has_own_rows() ? index_ : 0]) {}

    void run() {
        const SharedRows& rows = step_.shared;
        for (int layer = 0; layer < int(pass_.layers_.size()); ++layer) {
            const Layer& parts = pass_.layers_[layer];
            normalise(*parts.attention_norm, layer ? rows.pending : nullptr);
            multiply(layer, 0, own_.normed, rows.fused);
            attend(layer);
            multiply(layer, 1, rows.attended, rows.added);
            normalise(*parts.mlp_norm, rows.added);
            multiply(layer, 2, own_.normed, rows.inner);
            multiply(layer, 3, rows.inner, rows.pending);
        }
    }

   private:
    bool is_first() const { return index_ == 0; }

    static void wait() {
#pragma omp barrier
    }

    // Behind this, rows that `on_own_rows` wrote may be read by this thread.
    void wait_for_own_rows() const {
        if (!step_.has_own_rows()) wait();
    }

    template <typename Work>
    void on_own_rows(const Work& work) const {
        step_.has_own_rows() ? work(0, step_.num_rows) : on_rows(work);
    }

    template <typename Work>
    void on_rows(const Work& work) const {
        const int64_t first = step_.num_rows * index_ / num_threads_, last = step_.num_rows * (index_ + 1) / num_threads_;
        if (first < last) work(first, last);
    }

    // normed = norm(residual += added), if anything is added.
    void normalise(const RowNorm& norm, const char* added) const {
        const int64_t row_bytes = pass_.hidden_size_ * pass_.size_;
        const rows::NormRows call{added ? added : own_.residual, row_bytes,  added ? own_.residual : nullptr,
                                  row_bytes,                     own_.normed, row_bytes};
        on_own_rows([&](int64_t first, int64_t last) { norm.normalise(call, first, last); });
    }

    // A thread rounds the same rows as it normalises, so nothing is waited for in between.
    void multiply(int layer, int index, const char* x, char* out) const {
        const JoinedProduct& product = pass_.layers_[layer].product(index);
        on_calls(product, x, out, [&](const Product& part, const ProductCall& call) {
            on_own_rows([&](int64_t first, int64_t last) { part.round(call, first, last); });
            return true;
        });
        wait_for_own_rows();
        const int64_t place = layer * kProducts + index;
        if (is_first()) {
            const int64_t next = std::min<int64_t>(place + 1, pass_.layers_.size() * kProducts - 1);
            shares_[(place + 1) % 2].restart(
                pass_.layers_[next / kProducts].product(next % kProducts).num_parts(step_.num_rows));
            times_.restart();
        }
        Shares& shares = shares_[place % 2];
        for (int64_t taken = shares.take(index_); taken >= 0; taken = shares.take(index_))
            on_calls(product, x, out, [&](const Product& part, const ProductCall& call) {
                const int64_t count = part.num_parts(step_.num_rows);
                if (taken < count) part.multiply(call, taken);
                return (taken -= count) >= 0;
            });
        wait();
        if (is_first()) times_.add_to(times_.products_s);
    }

    // work(part, call) for each of the joined products, until it returns false.
    template <typename Work>
    void on_calls(const JoinedProduct& product, const char* x, char* out, const Work& work) const {
        const int64_t size = pass_.size_;
        ProductCall call{x,    product.in_width() * size, own_.rounded, out, product.out_width() * size, step_.num_rows,
                         pass_.placement_.is_bfloat16()};
        for (const Product* part : product.parts) {
            if (!work(*part, call)) return;
            call.rounded += aligned(part->rounded_bytes(step_.num_rows));
            call.out += part->out_width() * size;
        }
    }

    // What one thread can do alone it does without waiting for others to place their rows.
    void attend(int layer) const {
        const bool is_windowed = pass_.layers_[layer].is_windowed;
        const bool is_alone = step_.num_rows == 1 && step_.attention->num_pieces(is_windowed) == 1;
        if (is_first()) times_.restart();
        if (!is_alone || is_first()) {
            place(layer, is_alone);
            if (!is_alone) wait();
            step_.attention->attend();
        }
        wait();
        if (step_.attention->has_merges()) {
            step_.attention->merge(index_, num_threads_);
            wait();
        }
        if (is_first()) times_.add_to(times_.attention_s);
    }

    void place(int layer, bool is_alone) const {
        const Placement& placement = pass_.placement_;
        const CacheSlots& cache = step_.cache;
        const int rope = pass_.layers_[layer].rope;
        rows::HeadRows call{};
        call.heads = step_.shared.fused;
        call.row_bytes = placement.width() * pass_.size_;
        if (rope >= 0) {
            const Angles& angles = step_.angles[rope];
            call.cos = angles.cos;
            call.sin = angles.sin;
            call.half = angles.half;
        }
        call.slots = cache.slots;
        call.keys = cache.keys + layer * cache.layer_bytes;
        call.values = cache.values + layer * cache.layer_bytes;
        call.is_int8 = cache.is_int8;
        const auto work = [&](int64_t first, int64_t last) { placement.place(call, first, last); };
        is_alone ? work(0, step_.num_rows) : on_rows(work);
        if (is_first())
            step_.attention->begin(layer, pass_.layers_[layer].is_windowed,
                                   reinterpret_cast<uintptr_t>(step_.shared.fused), placement.width(),
                                   reinterpret_cast<uintptr_t>(step_.shared.attended), placement.query_width());
    }

    const DecodePass& pass_;
    const Step& step_;
    Shares* const shares_;
    Times& times_;
    const int index_, num_threads_;
    const OwnRows own_;
};

std::pair<double, double> DecodePass::run(uintptr_t residual, uintptr_t pending, int64_t num_rows, Attention& attention,
                                          const std::vector<std::vector<uintptr_t>>& angles, uintptr_t slots,
                                          uintptr_t keys, uintptr_t values, int64_t layer_bytes, int64_t num_slots,
                                          bool is_int8, int num_threads) {
    Step step{num_rows,
              {reinterpret_cast<char*>(keys), reinterpret_cast<char*>(values), layer_bytes, is_int8,
               reinterpret_cast<const int64_t*>(slots)},
              {}, &attention, {}, {}};
    for (const std::vector<uintptr_t>& own : angles)
        step.angles.push_back({reinterpret_cast<const float*>(own.at(0)), reinterpret_cast<const float*>(own.at(1)),
                               int64_t(own.at(2))});
    check(step, num_slots, num_threads);
    step.shared.pending = reinterpret_cast<char*>(pending);
    divide_memory(step, reinterpret_cast<char*>(residual), num_threads);
    // A product's parts are handed out by one, while the next product's are counted into the other.
    Shares shares[2] = {{layers_[0].qkv.num_parts(num_rows), num_threads}, {0, num_threads}};
    Times times;
    nb::gil_scoped_release released;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    Thread(*this, step, shares, times).run();
    return {times.attention_s, times.products_s};
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
        .def("run", &DecodePass::run);
}

}  // namespace decode_pass
