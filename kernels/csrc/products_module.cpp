// The Python side of products: packs weights once, divides the work over cores, runs a level.
//
// Addresses are checked by the caller (kernels/products.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_pass/parts.h"
#include "products.h"
#include "work.h"

namespace nb = nanobind;

namespace products {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
extern const Level avx512_level, avx2_level;
#endif

namespace {

// Inputs that are multiplied by all panels before the next rows are: they stay in the core's second cache.
constexpr int64_t kInputBytes = 512 << 10;

const std::vector<Level>& levels() {
    static const std::vector<Level> all = {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
        avx512_level,
        avx2_level,
#endif
    };
    return all;
}

Element element_named(const std::string& name) {
    if (name == "float32") return Element::float32;
    if (name == "bfloat16") return Element::bfloat16;
    if (name == "int8") return Element::int8;
    throw std::invalid_argument("no products of " + name);
}

const Level& level_named(const std::string& name, Element element) {
    for (const Level& level : levels())
        if (name == level.name && level.is_supported(element)) return level;
    throw std::invalid_argument("this processor has no such products at level " + name);
}

// The best level first.
std::vector<std::string> product_levels(const std::string& element) {
    std::vector<std::string> names;
    for (const Level& level : levels())
        if (level.is_supported(element_named(element))) names.emplace_back(level.name);
    return names;
}

// A weight as it comes: [columns, in_width], float32 or bfloat16.
struct Source {
    const char* at;
    int64_t in_width;
    bool is_bfloat16;

    float value(int64_t column, int64_t k) const {
        const int64_t index = column * in_width + k;
        if (!is_bfloat16) return reinterpret_cast<const float*>(at)[index];
        const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(at)[index]) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }

    // One word of `per_word` inputs from `k` on, zeros behind the last.
    template <typename T>
    void copy(int64_t column, int64_t k, int per_word, char* to) const {
        T word[4 / sizeof(T)] = {};
        const int64_t count = std::min<int64_t>(per_word, in_width - k);
        if (count > 0) std::memcpy(word, at + (column * in_width + k) * sizeof(T), count * sizeof(T));
        std::memcpy(to, word, 4);
    }
};

class PackedWeight : public decode_pass::Product {
   public:
    // `weight` [columns, in_width] and `bias` (0, or [columns] float32) are read here and not kept.
    PackedWeight(const std::string& level, const std::string& element, uintptr_t weight, bool is_bfloat16,
                 int64_t columns, int64_t in_width, uintptr_t bias, const std::string& activation, bool is_gated)
        : element_(element_named(element)),
          level_(level_named(level, element_)),
          in_width_(in_width),
          per_word_(element_ == Element::float32 ? 1 : element_ == Element::bfloat16 ? 2 : 4),
          num_steps_((in_width + per_word_ - 1) / per_word_),
          out_width_(is_gated ? columns / 2 : columns),
          num_panels_((out_width_ + panel_width(is_gated) - 1) / panel_width(is_gated)),
          panels_(size_t(num_panels_ * num_steps_ * kVectors * level_.width) * 4) {
        if (columns < 1 || in_width < 1 || (is_gated && columns % 2)) throw std::invalid_argument("no such weight");
        if (element_ == Element::bfloat16 && (!is_bfloat16 || in_width % 2))
            throw std::invalid_argument("pairs of bfloat16 do not fill these rows");
        if (element_ == Element::float32 && is_bfloat16) throw std::invalid_argument("a float32 weight is needed");
        const size_t padded = size_t(num_panels_ * kVectors * level_.width);
        bias_.resize(padded);
        if (element_ == Element::int8) {
            scales_.resize(padded);
            sums_.resize(padded);
        }
        const Source source{reinterpret_cast<const char*>(weight), in_width, is_bfloat16};
        weights_ = {panels_.data(), bias_.data(),  scales_.data(), sums_.data(),
                    num_panels_,    num_steps_,    out_width_,     element_,
                    activation_named(activation), is_gated};
        nb::gil_scoped_release released;
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t panel = 0; panel < num_panels_; ++panel) pack(source, reinterpret_cast<const float*>(bias), panel);
    }

    // x [rows, in_width] of the weight's element, or, for int8, float32 or bfloat16 -> out [rows, out_width].
    void run(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t num_rows, bool is_bfloat16, int num_threads) {
        const int64_t size = is_bfloat16 ? 2 : 4;
        Call call{reinterpret_cast<const char*>(x), x_stride * size,     nullptr, reinterpret_cast<char*>(out),
                  out_width_ * size,                is_bfloat16};
        nb::gil_scoped_release released;
        std::unique_ptr<Memory> rounded;
        std::vector<float> row_scales;
        if (element_ == Element::int8) {
            rounded = std::make_unique<Memory>(size_t(num_rows * num_steps_ * 4));
            row_scales.resize(num_rows);
            round_inputs(call, num_rows, is_bfloat16, rounded->data(), row_scales.data(), num_threads);
        }
        multiply(call, num_rows, num_threads);
    }

    size_t num_bytes() const { return panels_.bytes(); }

    int64_t in_width() const override { return in_width_; }
    int64_t out_width() const override { return out_width_; }

    bool takes(bool is_bfloat16) const override {
        return element_ == Element::int8 || is_bfloat16 == (element_ == Element::bfloat16);
    }

    // Of int8: the rows, then their scales.
    size_t rounded_bytes(int64_t num_rows) const override {
        return element_ == Element::int8 ? size_t(num_rows) * (num_steps_ * 4 + sizeof(float)) : 0;
    }

    void round(const decode_pass::ProductCall& call, int64_t first, int64_t last) const override {
        if (element_ != Element::int8) return;
        const Rounding rounding{call.x, call.x_row_bytes, in_width_, call.is_bfloat16,
                                reinterpret_cast<uint8_t*>(call.rounded), num_steps_ * 4, row_scales(call)};
        level_.round(rounding, first, last);
    }

    int64_t num_parts(int64_t num_rows) const override {
        return (num_rows + rows_per_block() - 1) / rows_per_block() * num_panels_;
    }

    void multiply(const decode_pass::ProductCall& call, int64_t part) const override {
        const bool is_int8 = element_ == Element::int8;
        const Call own{is_int8 ? call.rounded : call.x, is_int8 ? num_steps_ * 4 : call.x_row_bytes,
                       is_int8 ? row_scales(call) : nullptr, call.out, call.out_row_bytes, call.is_bfloat16};
        multiply_part(own, call.num_rows, part);
    }

   private:
    float* row_scales(const decode_pass::ProductCall& call) const {
        return reinterpret_cast<float*>(call.rounded + call.num_rows * num_steps_ * 4);
    }

    int64_t panel_width(bool is_gated) const { return int64_t(level_.width) * (is_gated ? 1 : kVectors); }

    // The column of the weight that packed column `at` holds; -1: none.
    int64_t column_of(int64_t at) const {
        if (!weights_.is_gated) return at < out_width_ ? at : -1;
        const int64_t vector = at / level_.width, lane = at % level_.width;
        const int64_t column = vector / kVectors * level_.width + lane;
        return column < out_width_ ? column + vector % kVectors * out_width_ : -1;
    }

    void pack(const Source& source, const float* bias, int64_t panel) {
        const int64_t panel_columns = int64_t(kVectors) * level_.width;
        char* words = panels_.data() + panel * num_steps_ * panel_columns * 4;
        for (int64_t i = 0; i < panel_columns; ++i) {
            const int64_t at = panel * panel_columns + i, column = column_of(at);
            bias_[at] = bias && column >= 0 ? bias[column] : 0.0f;
            char* to = words + i * 4;
            if (element_ == Element::int8)
                pack_rounded(source, column, at, to, panel_columns * 4);
            else
                for (int64_t step = 0; step < num_steps_; ++step, to += panel_columns * 4)
                    pack_word(source, column, step * per_word_, to);
        }
    }

    void pack_word(const Source& source, int64_t column, int64_t k, char* to) const {
        if (column < 0)
            std::memset(to, 0, 4);
        else if (element_ == Element::float32)
            source.copy<float>(column, k, per_word_, to);
        else
            source.copy<uint16_t>(column, k, per_word_, to);
    }

    // Symmetrically, with one scale per column.
    void pack_rounded(const Source& source, int64_t column, int64_t at, char* to, int64_t step_bytes) {
        float largest = 0.0f;
        for (int64_t k = 0; column >= 0 && k < in_width_; ++k) largest = std::max(largest, std::abs(source.value(column, k)));
        const float scale = std::max(largest / 127.0f, 1e-12f);
        int32_t sum = 0;
        for (int64_t step = 0; step < num_steps_; ++step, to += step_bytes) {
            int8_t word[4] = {};
            for (int i = 0; column >= 0 && i < 4 && step * 4 + i < in_width_; ++i) {
                word[i] = int8_t(std::nearbyint(source.value(column, step * 4 + i) / scale));
                sum += word[i];
            }
            std::memcpy(to, word, 4);
        }
        scales_[at] = scale;
        sums_[at] = sum;
    }

    void round_inputs(Call& call, int64_t num_rows, bool is_bfloat16, char* out, float* scales, int num_threads) const {
        const Rounding rounding{call.x,           call.x_row_bytes, in_width_, is_bfloat16, reinterpret_cast<uint8_t*>(out),
                                num_steps_ * 4, scales};
        const int threads = num_rows * in_width_ < (1 << 16) ? 1 : num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int part = 0; part < threads; ++part)
            level_.round(rounding, num_rows * part / threads, num_rows * (part + 1) / threads);
        call.x = out;
        call.x_row_bytes = num_steps_ * 4;
        call.row_scales = scales;
    }

    void multiply(const Call& call, int64_t num_rows, int num_threads) const {
        const int64_t num_parts = this->num_parts(num_rows);
        const int threads = int(std::min<int64_t>(num_threads, num_parts));
        Shares shares(num_parts, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
        for (int thread = 0; thread < threads; ++thread)
            for (int64_t part = shares.take(thread); part >= 0; part = shares.take(thread))
                multiply_part(call, num_rows, part);
    }

    void multiply_part(const Call& call, int64_t num_rows, int64_t index) const {
        const int64_t num_blocks = (num_rows + rows_per_block() - 1) / rows_per_block();
        const int64_t block = index / num_panels_, panel = index % num_panels_;
        const int64_t next = panel + 1 < num_panels_ ? panel + 1 : 0;
        const Part part{num_rows * block / num_blocks, num_rows * (block + 1) / num_blocks, panel,
                        weights_.panels + next * num_steps_ * kVectors * level_.width * 4};
        level_.multiply(weights_, call, part);
    }

    int64_t rows_per_block() const {
        const int64_t fitting = kInputBytes / (num_steps_ * 4) / level_.max_rows;
        return std::max<int64_t>(fitting, 4) * level_.max_rows;
    }

    const Element element_;
    const Level& level_;
    const int64_t in_width_;
    const int per_word_;
    const int64_t num_steps_, out_width_, num_panels_;
    const Memory panels_;
    std::vector<float> bias_, scales_;
    std::vector<int32_t> sums_;
    Weights weights_{};
};

}  // namespace

void bind(nb::module_& module) {
    module.def("product_levels", product_levels);
    nb::class_<PackedWeight, decode_pass::Product>(module, "PackedWeight")
        .def(nb::init<const std::string&, const std::string&, uintptr_t, bool, int64_t, int64_t, uintptr_t,
                      const std::string&, bool>())
        .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
        .def_prop_ro("out_width", &PackedWeight::out_width)
        .def("run", &PackedWeight::run);
}

}  // namespace products
