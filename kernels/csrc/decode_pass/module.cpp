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

// Rows of the vectors between the parts of a layer.
struct Buffers {
    char *normed, *fused, *attended, *added, *inner, *rounded;
};

struct Step {
    char* residual;  // [rows, hidden_size], one run of memory, as is pending
    char* pending;
    int64_t num_rows;
    CacheSlots cache;
    std::vector<Angles> angles;
    Attention* attention;
    Buffers buffers;
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
                                  int num_threads) {
        Step step{reinterpret_cast<char*>(residual), reinterpret_cast<char*>(pending), num_rows,
                  {reinterpret_cast<char*>(keys), reinterpret_cast<char*>(values), layer_bytes, is_int8,
                   reinterpret_cast<const int64_t*>(slots)},
                  {}, &attention, {}};
        for (const std::vector<uintptr_t>& own : angles)
            step.angles.push_back({reinterpret_cast<const float*>(own.at(0)), reinterpret_cast<const float*>(own.at(1)),
                                   int64_t(own.at(2))});
        check(step, num_slots, num_threads);
        step.buffers = buffers(num_rows);
        Shares shares(0, num_threads);
        Times times;
        nb::gil_scoped_release released;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            Team team{omp_get_thread_num(), omp_get_num_threads(), shares, times};
            for (size_t index = 0; index < layers_.size(); ++index) run_layer(step, int(index), team);
        }
        return {times.attention_s, times.products_s};
    }

   private:
    // One thread among those of the region.
    struct Team {
        const int thread, num_threads;
        Shares& shares;
        Times& times;

        bool is_first() const { return thread == 0; }

        static void wait() {
#pragma omp barrier
        }

        template <typename Work>
        void on_rows(int64_t num_rows, const Work& work) const {
            const int64_t first = num_rows * thread / num_threads, last = num_rows * (thread + 1) / num_threads;
            if (first < last) work(first, last);
        }
    };

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

    // Carved out of one run of memory that is kept from step to step.
    Buffers buffers(int64_t num_rows) {
        int64_t inner_width = 0;
        size_t rounded_bytes = 0;
        for (const Layer& layer : layers_) {
            inner_width = std::max(inner_width, layer.down.in_width());
            for (const JoinedProduct* product : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
                rounded_bytes = std::max(rounded_bytes, product->rounded_bytes(num_rows));
        }
        const size_t hidden = row_bytes(num_rows, hidden_size_), fused = row_bytes(num_rows, placement_.width()),
                     attended = row_bytes(num_rows, placement_.query_width()), inner = row_bytes(num_rows, inner_width);
        const size_t bytes = 2 * hidden + fused + attended + inner + rounded_bytes;
        if (!memory_ || memory_->bytes() < bytes) {
            memory_.reset();
            memory_ = std::make_unique<Memory>(bytes);
        }
        Buffers own{};
        own.normed = memory_->data();
        own.added = own.normed + hidden;
        own.fused = own.added + hidden;
        own.attended = own.fused + fused;
        own.inner = own.attended + attended;
        own.rounded = own.inner + inner;
        return own;
    }

    size_t row_bytes(int64_t num_rows, int64_t width) const { return aligned(size_t(num_rows * width * size_)); }

    void run_layer(const Step& step, int index, const Team& team) const {
        const Layer& layer = layers_[index];
        const Buffers& buffers = step.buffers;
        norm_and_multiply(step, *layer.attention_norm, index ? step.pending : nullptr, layer.qkv, buffers.fused, team);
        place(step, index, team);
        attend(step, index, team);
        round_and_multiply(step, layer.output, buffers.attended, buffers.added, team);
        norm_and_multiply(step, *layer.mlp_norm, buffers.added, layer.gate_up, buffers.inner, team);
        round_and_multiply(step, layer.down, buffers.inner, step.pending, team);
    }

    // residual += added, if there is any; then product(norm(residual)).
    void norm_and_multiply(const Step& step, const RowNorm& norm, const char* added, const JoinedProduct& product, char* out,
                           const Team& team) const {
        const int64_t row_bytes = hidden_size_ * size_;
        char* normed = step.buffers.normed;
        const rows::NormRows call{added ? added : step.residual,
                                  row_bytes,
                                  added ? step.residual : nullptr,
                                  row_bytes,
                                  normed,
                                  row_bytes};
        team.on_rows(step.num_rows, [&](int64_t first, int64_t last) { norm.normalise(call, first, last); });
        round_and_multiply(step, product, normed, out, team);
    }

    // Each thread rounds the rows that it may have just written itself.
    void round_and_multiply(const Step& step, const JoinedProduct& product, const char* x, char* out,
                            const Team& team) const {
        const auto on_parts = [&](const auto& work) {
            ProductCall call{x,   product.in_width() * size_,  step.buffers.rounded,     out,
                             product.out_width() * size_, step.num_rows, placement_.is_bfloat16()};
            for (const Product* part : product.parts) {
                if (!work(*part, call)) return;
                call.rounded += aligned(part->rounded_bytes(step.num_rows));
                call.out += part->out_width() * size_;
            }
        };
        int64_t num_parts = 0;
        on_parts([&](const Product& part, const ProductCall& call) {
            team.on_rows(step.num_rows, [&](int64_t first, int64_t last) { part.round(call, first, last); });
            num_parts += part.num_parts(step.num_rows);
            return true;
        });
        if (team.is_first()) team.shares.restart(num_parts);
        team.wait();
        if (team.is_first()) team.times.restart();
        for (int64_t taken = team.shares.take(team.thread); taken >= 0; taken = team.shares.take(team.thread))
            on_parts([&](const Product& part, const ProductCall& call) {
                const int64_t own = part.num_parts(step.num_rows);
                if (taken < own) {
                    part.multiply(call, taken);
                    return false;
                }
                taken -= own;
                return true;
            });
        team.wait();
        if (team.is_first()) team.times.add_to(team.times.products_s);
    }

    void place(const Step& step, int index, const Team& team) const {
        const CacheSlots& cache = step.cache;
        rows::HeadRows call{};
        call.heads = step.buffers.fused;
        call.row_bytes = placement_.width() * size_;
        if (layers_[index].rope >= 0) {
            const Angles& angles = step.angles[layers_[index].rope];
            call.cos = angles.cos;
            call.sin = angles.sin;
            call.half = angles.half;
        }
        call.slots = cache.slots;
        call.keys = cache.keys + index * cache.layer_bytes;
        call.values = cache.values + index * cache.layer_bytes;
        call.is_int8 = cache.is_int8;
        team.on_rows(step.num_rows, [&](int64_t first, int64_t last) { placement_.place(call, first, last); });
        if (team.is_first())
            step.attention->begin(index, layers_[index].is_windowed, reinterpret_cast<uintptr_t>(step.buffers.fused),
                                  placement_.width(), reinterpret_cast<uintptr_t>(step.buffers.attended),
                                  placement_.query_width());
        team.wait();
    }

    void attend(const Step& step, int index, const Team& team) const {
        if (team.is_first()) team.times.restart();
        step.attention->attend();
        team.wait();
        if (step.attention->has_merges()) {
            step.attention->merge(team.thread, team.num_threads);
            team.wait();
        }
        if (team.is_first()) team.times.add_to(team.times.attention_s);
    }

    const Placement& placement_;
    const int64_t hidden_size_;
    const int64_t size_;  // bytes of an element
    std::vector<Layer> layers_;
    std::unique_ptr<Memory> memory_;
};

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
