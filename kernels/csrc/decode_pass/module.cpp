// A step of decodes through all layers in one call, in one parallel region.
//
// Each row runs through the same kernels as it does part by part, so results are the same bit by bit. What this saves
// is a call from Python and a waking of threads for each of some hundred parts: as much time as a small model computes.
//
// A layer has queries, keys and values side by side, norms before its two halves, and two products in the second:
//   normed = norm(residual += pending)          pending: what the layer before adds to the residual; the first has none
//   attended = attention(place(qkv(normed)))    place: each head normalised, in some models, then rotated and cached
//   pending = down(gate_up(norm(residual += output(attended))))
// and before each of the four products, for rows with an adapter, what that adds to the product's results;
// where, if ranks share the layers, output(..) and down(..) are added up over these,
// where some models normalise output(..) and pending as well; and, where they are asked for, logits = head(norm(residual += pending)) of the last.
//
// The step is a line of stages of some parts each (panels of a product, pieces of attention, rows of the rest). Threads
// take parts of the current stage. The one that completes it goes on to the next: a stage of a single part, as most are
// in a step of one row, it does by itself; others it hands out. So none waits for a thread that has nothing to do.
//
// Addresses are checked by the caller (kernels/cpu/decode_pass.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
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

constexpr size_t kMostLayers = 2048;  // their stages are numbered in 16 bits, with those of the head
constexpr int64_t kMostSlices = 1024;

typedef std::tuple<std::vector<LowRank*>, std::vector<uintptr_t>, std::vector<int>, std::vector<int64_t>> AdapterNumbers;

// Of attention, of the layers' products and of the head's.
typedef std::tuple<double, double, double> Seconds;

// What is called between parts of a run, in which others may come and go; of how many layers these are; how many of them
// are the head's. Nothing: it has one part.
typedef std::optional<std::tuple<nb::callable, int64_t, int64_t>> PauseNumbers;

StepAdapters adapters_of(const AdapterNumbers& numbers) {
    const auto& [groups, of_rows, at_site, widths] = numbers;
    StepAdapters adapters{groups, {}, at_site, widths};
    for (const uintptr_t of_row : of_rows) adapters.of_rows.push_back(reinterpret_cast<const int64_t*>(of_row));
    return adapters;
}

class DecodePass {
   public:
    DecodePass(const Placement& placement, int64_t hidden_size)
        : model_{placement, hidden_size, placement.is_bfloat16() ? 2 : 4, {}, nullptr, {}, nullptr} {}
    DecodePass(const DecodePass&) = delete;
    DecodePass& operator=(const DecodePass&) = delete;

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

    // The ranks that have the rest of every layer: results of the second and fourth product are added up.
    void set_exchange(rank_exchange::Exchange& exchange) { model_.exchange = &exchange; }

    // residual [num_rows, hidden_size] changes in place; pending, of the same shape, is written: what the residual still
    // lacks of the last layer, unless logits [num_rows, columns of the head] are asked for (0: not), or the highest of
    // each row alone: its column [num_rows] int64, its value [num_rows] float32. `allowed`: see TokenBits; its words
    // reach to the last column of the head. `angles`: cos, sin, half of each rope. `attentions`, `slots`: see CachePart;
    // `places`: of each layer, see Step.
    // `adapters`: groups, addresses of their of_row [num_rows], which are at which site, widths; see StepAdapters.
    Seconds run(uintptr_t residual, uintptr_t pending, uintptr_t logits, std::pair<uintptr_t, uintptr_t> highest,
                std::tuple<uintptr_t, uintptr_t, int64_t> allowed, int64_t num_rows,
                const std::vector<Attention*>& attentions, const std::vector<std::vector<uintptr_t>>& angles,
                const std::vector<uintptr_t>& slots, const std::vector<int>& places, uintptr_t keys, uintptr_t values,
                int64_t layer_bytes, int64_t num_slots, bool is_int8, const AdapterNumbers& adapters, int num_threads,
                const PauseNumbers& pause);

    // The logits [num_rows, columns of the head] of residual [num_rows, hidden_size], to which nothing is to be added.
    Seconds run_head(uintptr_t residual, uintptr_t logits, int64_t num_rows, int num_threads, const PauseNumbers& pause);

   private:
    Seconds perform(Step& step, int num_threads, const PauseNumbers& pause);

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
        if (step.parts.empty()) return;
        if (model_.exchange && step.num_rows * model_.hidden_size * model_.element_bytes > model_.exchange->slot_bytes())
            throw std::invalid_argument("more rows than a slot of the exchange holds");
        const int64_t num_layers = step.parts.front().attention->num_layers();
        for (const CachePart& part : step.parts)
            if (part.attention->num_rows() != step.num_rows || part.attention->num_layers() != num_layers ||
                part.attention->query_width() != model_.placement.query_width() ||
                part.attention->is_bfloat16() != model_.placement.is_bfloat16())
                throw std::invalid_argument("attention of another step");
        if (step.parts.size() == 1 && num_layers != int64_t(model_.layers.size()))
            throw std::invalid_argument("attention of another step");
        if (step.places.size() != model_.layers.size()) throw std::invalid_argument("not a place for each layer");
        for (const int place : step.places)
            if (place < 0 || place >= num_layers * int64_t(step.parts.size()))
                throw std::invalid_argument("attention of another step");
        for (const Layer& layer : model_.layers)
            if (layer.rope >= int(step.angles.size())) throw std::invalid_argument("no angles of a rope");
        for (const CachePart& part : step.parts)
            for (int64_t i = 0; i < step.num_rows; ++i)
                if (part.slots[i] < 0 || part.slots[i] >= num_slots)
                    throw std::invalid_argument("a slot outside the storage");
        if (step.adapters) check(*step.adapters, step.num_rows);
    }

    void check(const StepAdapters& adapters, int64_t num_rows) const {
        if (adapters.widths.size() != kProducts || adapters.at_site.size() != model_.layers.size() * kProducts ||
            adapters.of_rows.size() != adapters.groups.size())
            throw std::invalid_argument("adapters of another model");
        for (const LowRank* groups : adapters.groups)
            if (groups->last_place() >= num_rows || groups->num_sites() != int64_t(adapters.at_site.size()))
                throw std::invalid_argument("adapters of another step");
        for (size_t site = 0; site < adapters.at_site.size(); ++site) {
            const int index = adapters.at_site[site], product = int(site) % kProducts;
            if (index >= int(adapters.groups.size())) throw std::invalid_argument("adapters of another step");
            const int64_t in_width = model_.layers[site / kProducts].product(product).in_width();
            if (index >= 0 && !adapters.groups[index]->fits(int(site), in_width, adapters.widths[product]))
                throw std::invalid_argument("adapters of other widths");
        }
    }

    // Out of one run of memory that is kept from step to step; a step within another has its own.
    Buffers buffers(int64_t num_rows, const StepAdapters* adapters) {
        int64_t inner_width = 0;
        size_t rounded = model_.head_norm ? model_.head.rounded_bytes(num_rows) : 0;
        for (const Layer& layer : model_.layers) {
            inner_width = std::max(inner_width, layer.down.in_width());
            for (int i = 0; i < kProducts; ++i) rounded = std::max(rounded, layer.product(i).rounded_bytes(num_rows));
        }
        const auto bytes_of = [&](int64_t width) {
            return aligned(size_t(num_rows * products::apart(width * model_.element_bytes, num_rows)));
        };
        const size_t hidden = bytes_of(model_.hidden_size), fused = bytes_of(model_.placement.width()),
                     attended = bytes_of(model_.placement.query_width()), inner = bytes_of(inner_width);
        int64_t shrunk_floats = 0, addend_floats = 0;
        for (size_t i = 0; adapters && i < adapters->groups.size(); ++i) {
            const LowRank& groups = *adapters->groups[i];
            shrunk_floats = std::max(shrunk_floats, groups.shrunk_floats());
            for (const int64_t width : adapters->widths) addend_floats = std::max(addend_floats, groups.num_rows() * width);
        }
        const size_t shrunk = aligned(size_t(shrunk_floats) * sizeof(float));
        const size_t bytes = 2 * hidden + fused + attended + inner + rounded + shrunk +
                             aligned(size_t(addend_floats) * sizeof(float));
        memories_.resize(std::max(memories_.size(), size_t(depth_)));
        std::unique_ptr<Memory>& memory = memories_[depth_ - 1];
        if (!memory || memory->bytes() < bytes) {
            memory.reset();
            memory = std::make_unique<Memory>(bytes);
        }
        char* at = memory->data();
        const auto next = [&](size_t size) { return std::exchange(at, at + size); };
        Buffers rows{next(hidden), next(fused), next(attended), next(hidden), next(inner), next(rounded), nullptr, nullptr};
        rows.shrunk = reinterpret_cast<float*>(next(shrunk));
        rows.addends = reinterpret_cast<float*>(at);
        return rows;
    }

    Model model_;
    int depth_ = 0;  // of steps in progress, each within a pause of the one before
    std::vector<std::unique_ptr<Memory>> memories_;
};

Seconds DecodePass::run(uintptr_t residual, uintptr_t pending, uintptr_t logits, std::pair<uintptr_t, uintptr_t> highest,
                        std::tuple<uintptr_t, uintptr_t, int64_t> allowed, int64_t num_rows,
                        const std::vector<Attention*>& attentions, const std::vector<std::vector<uintptr_t>>& angles,
                        const std::vector<uintptr_t>& slots, const std::vector<int>& places, uintptr_t keys,
                        uintptr_t values, int64_t layer_bytes, int64_t num_slots, bool is_int8,
                        const AdapterNumbers& adapter_numbers, int num_threads, const PauseNumbers& pause) {
    if (attentions.empty() || attentions.size() != slots.size()) throw std::invalid_argument("not the parts of a cache");
    const StepAdapters adapters = adapters_of(adapter_numbers);
    Step step{reinterpret_cast<char*>(residual), reinterpret_cast<char*>(pending), reinterpret_cast<char*>(logits),
              nullptr,
              num_rows,
              {reinterpret_cast<char*>(keys), reinterpret_cast<char*>(values), layer_bytes, is_int8},
              {}, {}, places, adapters.groups.empty() ? nullptr : &adapters, {}};
    for (size_t i = 0; i < attentions.size(); ++i) {
        if (!attentions[i]) throw std::invalid_argument("attention of another step");
        step.parts.push_back({attentions[i], reinterpret_cast<const int64_t*>(slots[i])});
    }
    for (const std::vector<uintptr_t>& own : angles)
        step.angles.push_back({reinterpret_cast<const float*>(own.at(0)), reinterpret_cast<const float*>(own.at(1)),
                               int64_t(own.at(2))});
    const TokenBits bits{reinterpret_cast<const int64_t*>(std::get<0>(allowed)),
                         reinterpret_cast<const uint32_t*>(std::get<1>(allowed)), std::get<2>(allowed)};
    HighestLogits noted(model_.placement.level(), num_rows, model_.placement.is_bfloat16(), num_threads, bits);
    if (highest.first) step.highest = &noted;
    check(step, num_slots, num_threads);
    const Seconds seconds = perform(step, num_threads, pause);
    if (highest.first)
        noted.finish(reinterpret_cast<int64_t*>(highest.first), reinterpret_cast<float*>(highest.second));
    return seconds;
}

Seconds DecodePass::run_head(uintptr_t residual, uintptr_t logits, int64_t num_rows, int num_threads,
                             const PauseNumbers& pause) {
    Step step{reinterpret_cast<char*>(residual), nullptr, reinterpret_cast<char*>(logits), nullptr, num_rows, {}, {},
              {}, {}, nullptr, {}};
    check(step, 0, num_threads);
    return perform(step, num_threads, pause);
}

Seconds DecodePass::perform(Step& step, int num_threads, const PauseNumbers& pause) {
    const int64_t num_layers = pause ? std::get<1>(*pause) : 0, num_slices = pause ? std::get<2>(*pause) : 1;
    if (num_layers < (pause ? 1 : 0) || num_slices < 1 || num_slices > kMostSlices)
        throw std::invalid_argument("not parts of a run");
    struct Deeper {
        explicit Deeper(int& depth) : depth(depth) { ++depth; }
        ~Deeper() { --depth; }
        int& depth;
    } deeper(depth_);
    step.buffers = buffers(step.num_rows, step.adapters);
    nb::gil_scoped_release released;
    StepRun run(model_, step, num_threads, num_slices);
    for (bool is_first = true; run.has_more(); is_first = false) {
        if (!is_first) {
            nb::gil_scoped_acquire held;
            std::get<0>(*pause)();
        }
        run.begin(num_layers);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        run.work(omp_get_thread_num());
    }
    return {run.times().attention_s, run.times().products_s, run.times().head_s};
}

}  // namespace

void bind_parts(nb::module_& module) {
    nb::class_<RowNorm>(module, "RowNorm");
    nb::class_<Placement>(module, "Placement");
    nb::class_<Product>(module, "Product");
    nb::class_<Attention>(module, "Attention");
    nb::class_<LowRank>(module, "LowRank");
}

void bind(nb::module_& module) {
    nb::class_<DecodePass>(module, "DecodePass")
        .def(nb::init<const Placement&, int64_t>(), nb::keep_alive<1, 2>())
        .def("add_layer", &DecodePass::add_layer)
        .def("set_head", &DecodePass::set_head)
        .def("set_exchange", &DecodePass::set_exchange, nb::keep_alive<1, 2>())
        .def("run", &DecodePass::run)
        .def("run_head", &DecodePass::run_head);
}

}  // namespace decode_pass
