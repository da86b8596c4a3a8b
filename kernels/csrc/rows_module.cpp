// The Python side of operations on rows: divides them over cores where there are many, runs a level.
//
// Addresses are checked by the caller (kernels/cpu/rows.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "decode_pass/parts.h"
#include "levels.h"
#include "rows.h"

namespace nb = nanobind;

namespace rows {

extern const Level avx512_level [[gnu::weak]], avx2_level [[gnu::weak]], plain_level;

namespace {

// With fewer elements than this, waking another thread takes longer than the work.
constexpr int64_t kSerialElements = 1 << 14;

const std::vector<Level>& all_levels() {
    static const auto all = levels::compiled({&avx512_level, &avx2_level, &plain_level});
    return all;
}

template <typename Work>
void divide(int64_t num_rows, int64_t elements_per_row, int num_threads, const Work& work) {
    nb::gil_scoped_release released;
    if (num_threads < 2 || num_rows < 2 || num_rows * elements_per_row < kSerialElements) return work(0, num_rows);
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int part = 0; part < num_threads; ++part)
        work(num_rows * part / num_threads, num_rows * (part + 1) / num_threads);
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

class RowNormaliser : public decode_pass::RowNorm {
   public:
    RowNormaliser(const std::string& level, uintptr_t weight, uintptr_t bias, int64_t width, float eps, bool is_rms,
               bool is_bfloat16)
        : level_(levels::named(all_levels(), level)),
          norm_{at<float>(weight), at<float>(bias), width, eps, is_rms, is_bfloat16} {}

    // Strides in elements; residual 0: there is none.
    void run(uintptr_t x, int64_t x_stride, uintptr_t residual, int64_t residual_stride, uintptr_t out,
             int64_t num_rows, int num_threads) {
        const int64_t size = norm_.is_bfloat16 ? 2 : 4;
        const NormRows call{at<char>(x),   x_stride * size,    at<char>(residual), residual_stride * size,
                            at<char>(out), norm_.width * size};
        divide(num_rows, norm_.width, num_threads, [&](int64_t first, int64_t last) { normalise(call, first, last); });
    }

    int64_t width() const override { return norm_.width; }
    bool is_bfloat16() const override { return norm_.is_bfloat16; }

    void normalise(const NormRows& call, int64_t first, int64_t last) const override {
        static thread_local std::vector<float> scratch;
        if (scratch.size() < norm_.scratch_floats()) scratch.resize(norm_.scratch_floats());
        level_.normalise(norm_, call, scratch.data(), first, last);
    }

   private:
    const Level& level_;
    const Norm norm_;
};

class Gates {
   public:
    Gates(const std::string& level, const std::string& activation, bool is_bfloat16)
        : level_(levels::named(all_levels(), level)),
          gate_(activation == "silu" ? Gate::silu : Gate::gelu_tanh),
          is_bfloat16_(is_bfloat16) {
        if (activation != "silu" && activation != "gelu_tanh") throw std::invalid_argument("no gate " + activation);
    }

    void run(uintptr_t gates_and_ups, uintptr_t out, int64_t num_rows, int64_t width, int num_threads) {
        const GateRows call{at<char>(gates_and_ups), at<char>(out), width, gate_, is_bfloat16_};
        divide(num_rows, 2 * width, num_threads, [&](int64_t first, int64_t last) { level_.gate(call, first, last); });
    }

   private:
    const Level& level_;
    const Gate gate_;
    const bool is_bfloat16_;
};

class Placer : public decode_pass::Placement {
   public:
    Placer(const std::string& level, int64_t num_heads, int64_t kv_heads, int64_t head_dim, bool is_bfloat16)
        : level_(levels::named(all_levels(), level)),
          num_heads_(num_heads),
          kv_heads_(kv_heads),
          head_dim_(head_dim),
          is_bfloat16_(is_bfloat16) {}

    // cos 0: nothing is rotated. values 0: there are none. is_int8: of the cache, see HeadRows. Slots from `num_slots` on are refused before anything is written.
    void run(uintptr_t heads, int64_t stride, uintptr_t cos, uintptr_t sin, int64_t half, uintptr_t slots,
             uintptr_t keys, uintptr_t values, int64_t num_slots, bool is_int8, int64_t num_rows, int num_threads) {
        const int64_t size = is_bfloat16_ ? 2 : 4;
        const HeadRows call{at<char>(heads),  stride * size,     num_heads_, kv_heads_,          head_dim_,
                            at<float>(cos),   at<float>(sin),    half,       at<int64_t>(slots), at<char>(keys),
                            at<char>(values), is_bfloat16_,       is_int8};
        for (int64_t i = 0; i < num_rows; ++i)
            if (call.slots[i] < 0 || call.slots[i] >= num_slots) throw std::invalid_argument("a slot outside the storage");
        divide(num_rows, (num_heads_ + 2 * kv_heads_) * head_dim_, num_threads,
               [&](int64_t first, int64_t last) { level_.place(call, first, last); });
    }

    int64_t head_dim() const override { return head_dim_; }
    int64_t query_width() const override { return num_heads_ * head_dim_; }
    int64_t width() const override { return (num_heads_ + 2 * kv_heads_) * head_dim_; }
    bool is_bfloat16() const override { return is_bfloat16_; }

    const Level& level() const override { return level_; }

    void place(HeadRows call, int64_t first, int64_t last) const override {
        call.num_heads = num_heads_;
        call.kv_heads = kv_heads_;
        call.head_dim = head_dim_;
        call.is_bfloat16 = is_bfloat16_;
        level_.place(call, first, last);
    }

   private:
    const Level& level_;
    const int64_t num_heads_, kv_heads_, head_dim_;
    const bool is_bfloat16_;
};

void highest(const std::string& level, uintptr_t x, int64_t stride, int64_t num_rows, int64_t width, bool is_bfloat16,
             uintptr_t indices, uintptr_t values, int num_threads) {
    const Level& chosen = levels::named(all_levels(), level);
    const HighestRows call{at<char>(x),          stride * (is_bfloat16 ? 2 : 4), width,
                           at<int64_t>(indices), at<float>(values),              is_bfloat16};
    divide(num_rows, width, num_threads, [&](int64_t first, int64_t last) { chosen.highest(call, first, last); });
}

}  // namespace

void bind(nb::module_& module) {
    nb::class_<RowNormaliser, decode_pass::RowNorm>(module, "RowNormaliser")
        .def(nb::init<const std::string&, uintptr_t, uintptr_t, int64_t, float, bool, bool>())
        .def("run", &RowNormaliser::run);
    nb::class_<Gates>(module, "Gates")
        .def(nb::init<const std::string&, const std::string&, bool>())
        .def("run", &Gates::run);
    nb::class_<Placer, decode_pass::Placement>(module, "Placer")
        .def(nb::init<const std::string&, int64_t, int64_t, int64_t, bool>())
        .def("run", &Placer::run);
    module.def("highest", highest);
}

}  // namespace rows
