// The Python side of products: packs weights once, divides the work over cores, runs a level.
//
// Addresses are checked by the caller (kernels/cpu/packed_linear.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "decode_pass/parts.h"
#include "levels.h"
#include "products.h"
#include "weight_rows.h"
#include "work.h"

namespace nb = nanobind;

namespace products {

extern const Level amx_level [[gnu::weak]], avx512_level [[gnu::weak]], avx2_level [[gnu::weak]];

namespace {

// Inputs that are multiplied by all panels before the next rows are: they stay in the core's second cache.
constexpr int64_t kInputBytes = 512 << 10;

const std::vector<Level>& all_levels() {
    static const auto all = levels::compiled({&amx_level, &avx512_level, &avx2_level});
    return all;
}

Element element_named(const std::string& name) {
    if (name == "float32") return Element::float32;
    if (name == "bfloat16") return Element::bfloat16;
    if (name == "int8") return Element::int8;
    throw std::invalid_argument("no products of " + name);
}

// The best level first.
std::vector<std::string> product_levels(const std::string& element) {
    return levels::supported(all_levels(), element_named(element));
}

constexpr int kNotFinite = -1;                // beside the system's errors
constexpr float kRounding = 12582912.0f;      // 1.5 * 2^23: a sum with it has no bits behind the point

std::vector<RowRun> runs_of(const std::vector<std::tuple<int, int64_t, int64_t, std::string>>& described) {
    std::vector<RowRun> runs;
    for (const auto& [fd, at, num_rows, numbers] : described) runs.push_back({fd, at, num_rows, numbers_named(numbers)});
    return runs;
}

int64_t num_rows(const std::vector<RowRun>& runs) {
    int64_t sum = 0;
    for (const RowRun& run : runs) sum += run.num_rows;
    return sum;
}

// Numbers of each column, or null.
struct ColumnNumbers {
    const float* bias;
    const float* scales;
};

// What a thread needs to pack panels.
struct PanelPacker {
    RowReader reader;
    Numbers numbers;
    std::vector<const char*> rows{};
    std::vector<char> nothing{};
    std::vector<float> floats{};
    std::vector<int8_t> integers{};

    const char* zeros(int64_t count) {
        nothing.resize(count);
        return nothing.data();
    }

    const float* floats_of(const char* row, int64_t count, const Level& level) {
        if (numbers != Numbers::bfloat16) return reinterpret_cast<const float*>(row);
        floats.resize(count);
        level.convert(row, Numbers::bfloat16, count, Numbers::float32, reinterpret_cast<char*>(floats.data()));
        return floats.data();
    }

    // Of row `i` of a vector's, zeros behind its last.
    int8_t* integers_of(int64_t i, int64_t row_bytes, int num_rows) {
        integers.resize(num_rows * row_bytes);
        return integers.data() + i * row_bytes;
    }
};

class PackedWeight : public decode_pass::Product {
   public:
    // The rows of `runs`, one per column, `bias` (0, or [columns] float32) and `scales` (0, or likewise, of rows that are
    // int8 already) are read here and not kept. Other rows become int8 from what the model computes with: bfloat16, or
    // float32.
    PackedWeight(const std::string& level, const std::string& element, bool is_bfloat16,
                 const std::vector<std::tuple<int, int64_t, int64_t, std::string>>& runs, int64_t in_width, uintptr_t bias,
                 const std::string& activation, bool is_gated, uintptr_t scales, int num_threads)
        : element_(element_named(element)),
          level_(levels::named(all_levels(), level, element_)),
          runs_(runs_of(runs)),
          columns_(num_rows(runs_)),
          in_width_(in_width),
          per_word_(element_ == Element::float32 ? 1 : element_ == Element::bfloat16 ? 2 : 4),
          num_words_((in_width + per_word_ - 1) / per_word_),
          num_steps_((num_words_ + level_.steps - 1) / level_.steps * level_.steps),
          out_width_(is_gated ? columns_ / 2 : columns_),
          num_panels_((out_width_ + panel_width(is_gated) - 1) / panel_width(is_gated)),
          panels_(size_t(num_panels_ * num_steps_ * kVectors * level_.width) * 4) {
        if (columns_ < 1 || in_width < 1 || (is_gated && columns_ % 2)) throw std::invalid_argument("no such weight");
        if (element_ == Element::bfloat16 && (!is_bfloat16 || in_width % 2))
            throw std::invalid_argument("pairs of bfloat16 do not fill these rows");
        if (element_ == Element::float32 && is_bfloat16) throw std::invalid_argument("a float32 weight is needed");
        if (scales && element_ != Element::int8) throw std::invalid_argument("scales of a weight that is not int8");
        const size_t padded = size_t(num_panels_ * kVectors * level_.width);
        bias_.resize(padded);
        if (element_ == Element::int8) {
            scales_.resize(padded);
            sums_.resize(padded);
        }
        // Rounded inputs fill whole steps.
        const int64_t num_readable = element_ == Element::int8 ? num_steps_ : num_words_;
        weights_ = {panels_.data(), bias_.data(), scales_.data(), sums_.data(), num_panels_, num_readable,
                    num_steps_,     out_width_,   element_,       activation_named(activation), is_gated};
        nb::gil_scoped_release released;
        const Numbers wanted = scales ? Numbers::int8 : is_bfloat16 ? Numbers::bfloat16 : Numbers::float32;
        pack_all(wanted, {reinterpret_cast<const float*>(bias), reinterpret_cast<const float*>(scales)}, num_threads);
    }

    // x [rows, in_width] of the weight's element, or, for int8, float32 or bfloat16 -> out [rows, out_width].
    // `addends`: see addends_of.
    void run(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t num_rows, bool is_bfloat16,
             const AddendNumbers& addends, int num_threads) {
        const int64_t size = is_bfloat16 ? 2 : 4;
        Call call{reinterpret_cast<const char*>(x), x_stride * size,     nullptr, reinterpret_cast<char*>(out),
                  out_width_ * size,                is_bfloat16,           addends_of(addends)};
        nb::gil_scoped_release released;
        std::unique_ptr<Memory> inputs;
        std::vector<float> row_scales;
        if (element_ == Element::int8) {
            const int64_t row_bytes = rounded_row_bytes(num_rows);
            inputs = std::make_unique<Memory>(size_t(num_rows * row_bytes));
            row_scales.resize(num_rows);
            round_inputs(call, num_rows, is_bfloat16, {inputs->data(), row_bytes}, row_scales.data(), num_threads);
        } else if (const int64_t row_bytes = apart(call.x_row_bytes, num_rows); row_bytes > call.x_row_bytes) {
            inputs = std::make_unique<Memory>(size_t(num_rows * row_bytes));
            spread_inputs(call, num_rows, in_width_ * size, {inputs->data(), row_bytes}, num_threads);
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
        return element_ == Element::int8 ? size_t(num_rows) * (rounded_row_bytes(num_rows) + sizeof(float)) : 0;
    }

    void round(const decode_pass::ProductCall& call, int64_t first, int64_t last) const override {
        if (element_ != Element::int8) return;
        const Rounding rounding{call.x, call.x_row_bytes, in_width_, call.is_bfloat16,
                                reinterpret_cast<uint8_t*>(call.rounded), rounded_row_bytes(call.num_rows),
                                row_scales(call)};
        level_.round(rounding, first, last);
    }

    int64_t num_parts(int64_t num_rows) const override {
        return (num_rows + rows_per_block() - 1) / rows_per_block() * num_panels_;
    }

    decode_pass::FilledPart filled_by(int64_t part, int64_t num_rows) const override {
        const Part own = part_at(part, num_rows);
        const int64_t width = panel_width(weights_.is_gated), column = own.panel * width;
        return {own.first, own.last - own.first, column, std::min(width, out_width_ - column)};
    }

    void multiply(const decode_pass::ProductCall& call, int64_t part) const override {
        const bool is_int8 = element_ == Element::int8;
        const Call own{is_int8 ? call.rounded : call.x, is_int8 ? rounded_row_bytes(call.num_rows) : call.x_row_bytes,
                       is_int8 ? row_scales(call) : nullptr, call.out, call.out_row_bytes, call.is_bfloat16, call.addends};
        multiply_part(own, call.num_rows, part);
    }

   private:
    float* row_scales(const decode_pass::ProductCall& call) const {
        return reinterpret_cast<float*>(call.rounded + call.num_rows * rounded_row_bytes(call.num_rows));
    }

    int64_t rounded_row_bytes(int64_t num_rows) const { return apart(num_steps_ * 4, num_rows); }

    int64_t panel_width(bool is_gated) const { return int64_t(level_.width) * (is_gated ? 1 : kVectors); }

    // The column of the weight that packed column `at` holds; -1: none.
    int64_t column_of(int64_t at) const {
        if (!weights_.is_gated) return at < out_width_ ? at : -1;
        const int64_t vector = at / level_.width, lane = at % level_.width;
        const int64_t column = vector / kVectors * level_.width + lane;
        return column < out_width_ ? column + vector % kVectors * out_width_ : -1;
    }

    void pack_all(Numbers wanted, const ColumnNumbers& numbers, int num_threads) {
        std::atomic<int> error{0};
        const RowReader reader(runs_, level_, in_width_, wanted);
#pragma omp parallel num_threads(num_threads)
        {
            PanelPacker packer{reader.another(), wanted};
            packer.reader.reserve(int64_t(kVectors) * level_.width);
#pragma omp for schedule(dynamic, 1)
            for (int64_t panel = 0; panel < num_panels_; ++panel)
                if (error.load(std::memory_order_relaxed) == 0)
                    if (const int failed = pack(packer, numbers, panel)) error = failed;
        }
        runs_.clear();
        if (error == kNotFinite) throw std::invalid_argument("it holds numbers that are not finite");
        if (error) throw std::system_error(error, std::generic_category(), "the rows of a weight cannot be read");
    }

    int pack(PanelPacker& packer, const ColumnNumbers& numbers, int64_t panel) {
        const int64_t vector_columns = level_.width, panel_columns = kVectors * vector_columns;
        const int64_t step_bytes = panel_columns * 4;
        char* words = panels_.data() + panel * num_steps_ * step_bytes;
        packer.reader.clear();
        for (int j = 0; j < kVectors; ++j) {
            const int64_t first_at = panel * panel_columns + j * vector_columns, first = column_of(first_at);
            const int64_t end = weights_.is_gated && j == 0 ? out_width_ : columns_;
            const int64_t count = first < 0 ? 0 : std::min(vector_columns, end - first);
            packer.rows.assign(vector_columns, packer.zeros(num_steps_ * 4));
            if (const int error = packer.reader.read(first, count, packer.rows.data())) return error;
            for (int64_t i = 0; i < count; ++i) {
                bias_[first_at + i] = numbers.bias ? numbers.bias[first + i] : 0.0f;
                const float* scale = numbers.scales ? numbers.scales + first + i : nullptr;
                if (element_ == Element::int8 && !pack_integers(packer, i, first_at + i, scale)) return kNotFinite;
            }
            level_.interleave(packer.rows.data(), num_words_, words + j * vector_columns * 4);
        }
        std::memset(words + num_words_ * step_bytes, 0, (num_steps_ - num_words_) * step_bytes);
        return 0;
    }

    // Row `i` of a vector's as integers: rounded symmetrically, or those that it is, whose scale is given. Returns whether
    // all of it is finite.
    bool pack_integers(PanelPacker& packer, int64_t i, int64_t at, const float* scale) {
        int8_t* integers = packer.integers_of(i, num_steps_ * 4, level_.width);
        if (scale)
            std::memcpy(integers, packer.rows[i], in_width_);
        else if (!round_row(packer.floats_of(packer.rows[i], in_width_, level_), scales_[at], integers))
            return false;
        if (scale) scales_[at] = *scale;
        int32_t sum = 0;
        for (int64_t k = 0; k < in_width_; ++k) sum += integers[k];
        sums_[at] = sum;
        packer.rows[i] = reinterpret_cast<const char*>(integers);
        return true;
    }

    bool round_row(const float* values, float& scale, int8_t* integers) const {
        float largest = 0.0f, difference = 0.0f;
        for (int64_t k = 0; k < in_width_; ++k) {
            largest = std::max(largest, std::abs(values[k]));
            difference += values[k] - values[k];  // NaN where a value is not finite
        }
        if (difference != 0.0f) return false;  // no integer is near such a value
        scale = std::max(largest / 127.0f, 1e-12f);
        for (int64_t k = 0; k < in_width_; ++k) integers[k] = int8_t(int32_t(values[k] / scale + kRounding - kRounding));
        return true;
    }

    struct Rows {
        char* data;
        int64_t row_bytes;
    };

    void round_inputs(Call& call, int64_t num_rows, bool is_bfloat16, Rows to, float* scales, int num_threads) const {
        const Rounding rounding{call.x, call.x_row_bytes, in_width_, is_bfloat16, reinterpret_cast<uint8_t*>(to.data),
                                to.row_bytes, scales};
        const int threads = num_rows * in_width_ < (1 << 16) ? 1 : num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int part = 0; part < threads; ++part)
            level_.round(rounding, num_rows * part / threads, num_rows * (part + 1) / threads);
        call.x = to.data;
        call.x_row_bytes = to.row_bytes;
        call.row_scales = scales;
    }

    void spread_inputs(Call& call, int64_t num_rows, int64_t width_bytes, Rows to, int num_threads) const {
        const int threads = num_rows * width_bytes < (1 << 18) ? 1 : num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t row = 0; row < num_rows; ++row)
            std::memcpy(to.data + row * to.row_bytes, call.x + row * call.x_row_bytes, size_t(width_bytes));
        call.x = to.data;
        call.x_row_bytes = to.row_bytes;
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

    Part part_at(int64_t index, int64_t num_rows) const {
        const int64_t num_blocks = (num_rows + rows_per_block() - 1) / rows_per_block();
        const int64_t block = index / num_panels_, panel = index % num_panels_;
        const int64_t next = panel + 1 < num_panels_ ? panel + 1 : 0;
        return {num_rows * block / num_blocks, num_rows * (block + 1) / num_blocks, panel,
                weights_.panels + next * num_steps_ * kVectors * level_.width * 4};
    }

    void multiply_part(const Call& call, int64_t num_rows, int64_t index) const {
        level_.multiply(weights_, call, part_at(index, num_rows));
    }

    int64_t rows_per_block() const {
        const int64_t fitting = kInputBytes / (num_steps_ * 4) / level_.max_rows;
        return std::max<int64_t>(fitting, 4) * level_.max_rows;
    }

    const Element element_;
    const Level& level_;
    std::vector<RowRun> runs_;  // until they are packed
    const int64_t columns_;
    const int64_t in_width_;
    const int per_word_;
    const int64_t num_words_;  // of a row
    const int64_t num_steps_, out_width_, num_panels_;
    const WeightMemory panels_;
    std::vector<float> bias_, scales_;
    std::vector<int32_t> sums_;
    Weights weights_{};
};

}  // namespace

void raise_os_error(const std::exception_ptr& exception, void*) {
    try {
        std::rethrow_exception(exception);
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::steal(Py_BuildValue("(is)", error.code().value(), error.what()));
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

void bind(nb::module_& module) {
    nb::register_exception_translator(raise_os_error);
    module.def("product_levels", product_levels);
    module.def("weight_memories", &WeightMemory::all);
    nb::class_<PackedWeight, decode_pass::Product>(module, "PackedWeight")
        .def(nb::init<const std::string&, const std::string&, bool,
                      const std::vector<std::tuple<int, int64_t, int64_t, std::string>>&, int64_t, uintptr_t,
                      const std::string&, bool, uintptr_t, int>())
        .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
        .def_prop_ro("out_width", &PackedWeight::out_width)
        .def("run", &PackedWeight::run);
}

}  // namespace products
