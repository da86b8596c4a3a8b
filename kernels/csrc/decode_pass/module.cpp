// A step of decodes through all layers in one call, in one parallel region.
//
// Each row runs through the same kernels as it does part by part, so results are the same bit by bit. What this saves
// is a call from Python and a waking of threads for each of some hundred parts: as much time as a small model computes.
//
// A layer has queries, keys and values side by side, norms before its two halves, and two products in the second:
//   normed = norm(residual += pending)          pending: what the layer before adds to the residual; the first has none
//   attended = attention(place(qkv(normed)))    place: each head normalised, in some models, then rotated and cached
//   pending = down(gate_up(norm(residual += output(attended))))
// where some models normalise output(..) and pending as well; and, where they are asked for, logits = head(norm(residual += pending)) of the last.
//
// The step is a line of stages of some parts each (panels of a product, pieces of attention, rows of the rest). Threads
// take parts of the current stage. The one that completes it goes on to the next: a stage of a single part, as most are
// in a step of one row, it does by itself; others it hands out. So none waits for a thread that has nothing to do.
//
// Addresses are checked by the caller (kernels/cpu/decode_pass.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../work.h"
#include "layers.h"
#include "parts.h"
#include "step_run.h"

namespace nb = nanobind;

namespace decode_pass {

namespace {

using products::Memory;

constexpr size_t kMostLayers = 4096;  // their stages are numbered in 16 bits

class DecodePass {
   public:
    DecodePass(const Placement& placement, int64_t hidden_size)
        : model_{placement, hidden_size, placement.is_bfloat16() ? 2 : 4, {}, nullptr, {}} {}

    // `norms`: before attention and before the second half; then of what these add, or null. `head_norms`: of each query
    // and of each key head, or none.
    void add_layer(const std::vector<const RowNorm*>& norms, const std::vector<std::vector<const Product*>>& products,
                   const std::vector<const RowNorm*>& head_norms, int rope, bool is_windowed) {
        if (model_.layers.size() == kMostLayers) throw std::invalid_argument("too many layers");
        if (norms.size() != 4 || !norms[0] || !norms[1]) throw std::invalid_argument("not the norms of a layer");
        if (products.size() != kProducts) throw std::invalid_argument("not the products of a layer");
        for (const RowNorm* norm : norms)
            if (norm) check(*norm);
        if (!head_norms.empty() && head_norms.size() != 2) throw std::invalid_argument("norms of other heads");
        for (const RowNorm* norm : head_norms)
            if (norm->width() != model_.placement.head_dim() || norm->is_bfloat16() != model_.placement.is_bfloat16())
                throw std::invalid_argument("norms of other heads");
        const int64_t hidden_size = model_.hidden_size, query_width = model_.placement.query_width();
        const Layer layer{norms[0],
                          joined(products[0], hidden_size, model_.placement.width()),
                          joined(products[1], query_width, hidden_size),
                          norms[2],
                          norms[1],
                          joined(products[2], hidden_size, -1),
                          joined(products[3], -1, hidden_size),
                          norms[3],
                          head_norms,
                          rope,
                          is_windowed};
        if (layer.gate_up.out_width() != layer.down.in_width())
            throw std::invalid_argument("products that do not follow one another");
        model_.layers.push_back(layer);
    }

    void set_head(const RowNorm& norm, const std::vector<const Product*>& head) {
        check(norm);
        model_.head_norm = &norm;
        model_.head = joined(head, model_.hidden_size, -1);
    }

    // residual [num_rows, hidden_size] changes in place; pending, of the same shape, is written: what the residual still
    // lacks of the last layer, unless logits [num_rows, columns of the head] are asked for (0: not), or the highest of
    // each row alone: its column [num_rows] int64, its value [num_rows] float32. `angles`: cos, sin, half of each rope.
    // Returns the seconds of attention and products.
    std::pair<double, double> run(uintptr_t residual, uintptr_t pending, uintptr_t logits,
                                  std::pair<uintptr_t, uintptr_t> highest, int64_t num_rows, Attention& attention,
                                  const std::vector<std::vector<uintptr_t>>& angles,
                                  uintptr_t slots, uintptr_t keys, uintptr_t values, int64_t layer_bytes,
                                  int64_t num_slots, bool is_int8, int num_threads);

   private:
    void check(const RowNorm& norm) const {
        if (norm.width() != model_.hidden_size || norm.is_bfloat16() != model_.placement.is_bfloat16())
            throw std::invalid_argument("a norm of other rows");
    }

    JoinedProduct joined(const std::vector<const Product*>& parts, int64_t in_width, int64_t out_width) const {
        if (parts.empty()) throw std::invalid_argument("no product");
        const JoinedProduct product{parts};
        for (const Product* part : parts)
            if (part->in_width() != product.in_width() || !part->takes(model_.placement.is_bfloat16()))
                throw std::invalid_argument("a product of other inputs");
        if ((in_width >= 0 && product.in_width() != in_width) || (out_width >= 0 && product.out_width() != out_width))
            throw std::invalid_argument("a product of other widths");
        return product;
    }

    void check(const Step& step, int64_t num_slots, int num_threads) const {
        if (model_.layers.empty() || num_threads < 1 || step.num_rows < 1)
            throw std::invalid_argument("nothing to run");
        if ((step.logits || step.highest) && !model_.head_norm) throw std::invalid_argument("no head");
        const Attention& attention = *step.attention;
        if (attention.num_rows() != step.num_rows || attention.num_layers() != int64_t(model_.layers.size()) ||
            attention.query_width() != model_.placement.query_width() ||
            attention.is_bfloat16() != model_.placement.is_bfloat16())
            throw std::invalid_argument("attention of another step");
        for (const Layer& layer : model_.layers)
            if (layer.rope >= int(step.angles.size())) throw std::invalid_argument("no angles of a rope");
        for (int64_t i = 0; i < step.num_rows; ++i)
            if (step.cache.slots[i] < 0 || step.cache.slots[i] >= num_slots)
                throw std::invalid_argument("a slot outside the storage");
    }

    // Out of one run of memory that is kept from step to step.
    Buffers buffers(int64_t num_rows) {
        int64_t inner_width = 0;
        size_t rounded = model_.head_norm ? model_.head.rounded_bytes(num_rows) : 0;
        for (const Layer& layer : model_.layers) {
            inner_width = std::max(inner_width, layer.down.in_width());
            for (int i = 0; i < kProducts; ++i) rounded = std::max(rounded, layer.product(i).rounded_bytes(num_rows));
        }
        const auto bytes_of = [&](int64_t width) { return aligned(size_t(num_rows * width * model_.element_bytes)); };
        const size_t hidden = bytes_of(model_.hidden_size), fused = bytes_of(model_.placement.width()),
                     attended = bytes_of(model_.placement.query_width()), inner = bytes_of(inner_width);
        const size_t bytes = 2 * hidden + fused + attended + inner + rounded;
        if (!memory_ || memory_->bytes() < bytes) {
            memory_.reset();
            memory_ = std::make_unique<Memory>(bytes);
        }
        char* at = memory_->data();
        const auto next = [&](size_t size) { return std::exchange(at, at + size); };
        return {next(hidden), next(fused), next(attended), next(hidden), next(inner), next(rounded)};
    }

    Model model_;
    std::unique_ptr<Memory> memory_;
};

std::pair<double, double> DecodePass::run(uintptr_t residual, uintptr_t pending, uintptr_t logits,
                                          std::pair<uintptr_t, uintptr_t> highest, int64_t num_rows,
                                          Attention& attention, const std::vector<std::vector<uintptr_t>>& angles,
                                          uintptr_t slots, uintptr_t keys, uintptr_t values, int64_t layer_bytes,
                                          int64_t num_slots, bool is_int8, int num_threads) {
    Step step{reinterpret_cast<char*>(residual), reinterpret_cast<char*>(pending), reinterpret_cast<char*>(logits),
              nullptr,
              num_rows,
              {reinterpret_cast<char*>(keys), reinterpret_cast<char*>(values), layer_bytes, is_int8,
               reinterpret_cast<const int64_t*>(slots)},
              {}, &attention, {}};
    for (const std::vector<uintptr_t>& own : angles)
        step.angles.push_back({reinterpret_cast<const float*>(own.at(0)), reinterpret_cast<const float*>(own.at(1)),
                               int64_t(own.at(2))});
    HighestLogits noted(model_.placement.level(), num_rows, model_.placement.is_bfloat16(), num_threads);
    if (highest.first) step.highest = &noted;
    check(step, num_slots, num_threads);
    step.buffers = buffers(num_rows);
    nb::gil_scoped_release released;
    StepRun run(model_, step, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    run.work(omp_get_thread_num());
    if (highest.first)
        noted.finish(reinterpret_cast<int64_t*>(highest.first), reinterpret_cast<float*>(highest.second));
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
