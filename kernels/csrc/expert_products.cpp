// Both products of a mixture's experts in one call: those of all experts that have rows, then their second ones.
//
// Of a few rows an expert's products take some ten microseconds, which is what a call from Python and a waking of threads
// take as well. Each row runs through the same kernels as it does expert by expert, so results are the same bit by bit.
//
// Addresses are checked by the caller (kernels/cpu/expert_products.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "decode_pass/layers.h"
#include "decode_pass/parts.h"
#include "work.h"

namespace nb = nanobind;

namespace expert_products {

namespace {

using decode_pass::Product;
using decode_pass::ProductCall;
using products::Shares;

// Rows one after another, as bytes.
struct Rows {
    char* first;
    int64_t row_bytes;
};

// One product of every expert that has rows, for all threads of a region.
class Stage {
   public:
    Stage(const std::vector<const Product*>& products, const std::vector<int64_t>& counts, bool is_bfloat16)
        : is_bfloat16_(is_bfloat16) {
        int64_t row = 0, end = 0;
        for (size_t i = 0; i < products.size(); row += counts[i++]) {
            if (!counts[i]) continue;
            if (!products[i]->takes(is_bfloat16)) throw std::invalid_argument("rows of another kind than the weights");
            end += products[i]->num_parts(counts[i]);
            own_.push_back({products[i], row, counts[i], end, rounded_bytes_});
            rounded_bytes_ += decode_pass::aligned(products[i]->rounded_bytes(counts[i]));
        }
    }

    int64_t num_experts() const { return own_.size(); }
    int64_t num_parts() const { return own_.empty() ? 0 : own_.back().end; }
    size_t rounded_bytes() const { return rounded_bytes_; }

    void place(Rows x, Rows out, char* rounded) {
        x_ = x;
        out_ = out;
        rounded_ = rounded;
    }

    // The inputs of one expert, before its parts.
    void round(int64_t index) const { own_[index].product->round(call_of(own_[index]), 0, own_[index].count); }

    // Each by any thread, once.
    void multiply(int64_t part) const {
        const auto own = std::upper_bound(own_.begin(), own_.end(), part,
                                          [](int64_t value, const Expert& expert) { return value < expert.end; });
        own->product->multiply(call_of(*own), part - (own->end - own->product->num_parts(own->count)));
    }

   private:
    struct Expert {
        const Product* product;
        int64_t row, count;  // its rows
        int64_t end;         // behind its parts, among those of all
        size_t rounded_at;
    };

    ProductCall call_of(const Expert& own) const {
        return {x_.first + own.row * x_.row_bytes, x_.row_bytes, rounded_ + own.rounded_at,
                out_.first + own.row * out_.row_bytes, out_.row_bytes, own.count, is_bfloat16_};
    }

    const bool is_bfloat16_;
    std::vector<Expert> own_;
    size_t rounded_bytes_ = 0;
    Rows x_{}, out_{};
    char* rounded_ = nullptr;
};

// By every thread.
void compute(const Stage& stage, Shares& rounds, Shares& parts, int thread) {
    if (stage.rounded_bytes()) {
        for (int64_t i = rounds.take(thread); i >= 0; i = rounds.take(thread)) stage.round(i);
#pragma omp barrier
    }
    for (int64_t part = parts.take(thread); part >= 0; part = parts.take(thread)) stage.multiply(part);
}

class ExpertProducts {
   public:
    ExpertProducts(const std::vector<const Product*>& gate_up, const std::vector<const Product*>& down)
        : gate_up_(gate_up), down_(down) {
        if (gate_up.empty() || gate_up.size() != down.size()) throw std::invalid_argument("not two products an expert");
        for (size_t i = 0; i < down.size(); ++i) {
            const bool is_alike = gate_up[i]->in_width() == in_width() && gate_up[i]->out_width() == down[i]->in_width() &&
                                  down[i]->in_width() == down[0]->in_width() && down[i]->out_width() == out_width();
            if (!is_alike) throw std::invalid_argument("experts of different widths");
        }
    }

    int64_t in_width() const { return gate_up_[0]->in_width(); }
    int64_t out_width() const { return down_[0]->out_width(); }

    // x [rows, in_width] and out [rows, out_width], each one run of memory, sorted by expert: `counts` rows of each.
    void run(uintptr_t x, uintptr_t out, const std::vector<int64_t>& counts, bool is_bfloat16, int num_threads) const {
        if (counts.size() != down_.size()) throw std::invalid_argument("not a number of rows for each expert");
        const int64_t size = is_bfloat16 ? 2 : 4, inner_width = down_[0]->in_width();
        int64_t num_rows = 0;
        for (const int64_t count : counts) num_rows += count;
        Stage first(gate_up_, counts, is_bfloat16), second(down_, counts, is_bfloat16);
        const size_t inner_bytes = decode_pass::aligned(num_rows * inner_width * size);
        // Kept from call to call: memory that was never written costs more than the rows.
        static thread_local std::vector<char> kept;
        const size_t needed = inner_bytes + first.rounded_bytes() + second.rounded_bytes() + decode_pass::kAlignment;
        if (kept.size() < needed) kept = std::vector<char>(needed);
        char* const inner = reinterpret_cast<char*>(decode_pass::aligned(reinterpret_cast<size_t>(kept.data())));
        char* const rounded = inner + inner_bytes;
        const Rows between{inner, inner_width * size};
        first.place({reinterpret_cast<char*>(x), in_width() * size}, between, rounded);
        second.place(between, {reinterpret_cast<char*>(out), out_width() * size}, rounded + first.rounded_bytes());
        nb::gil_scoped_release released;
        Shares first_rounds(first.num_experts(), num_threads), first_parts(first.num_parts(), num_threads);
        Shares second_rounds(second.num_experts(), num_threads), second_parts(second.num_parts(), num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            const int thread = omp_get_thread_num();
            compute(first, first_rounds, first_parts, thread);
#pragma omp barrier
            compute(second, second_rounds, second_parts, thread);
        }
    }

   private:
    const std::vector<const Product*> gate_up_, down_;
};

}  // namespace

void bind(nb::module_& module) {
    nb::class_<ExpertProducts>(module, "ExpertProducts")
        .def(nb::init<const std::vector<const Product*>&, const std::vector<const Product*>&>())
        .def("run", &ExpertProducts::run);
}

}  // namespace expert_products
