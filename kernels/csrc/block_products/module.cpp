// The Python side of products with weights in blocks: packs them once, divides the work over cores, runs a level.
//
// Addresses are checked by the caller (kernels/cpu/block_quantized_linear.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../decode_pass/parts.h"
#include "../levels.h"
#include "block_products.h"
#include "packing.h"
#include "work.h"

namespace nb = nanobind;

namespace products {

extern const BlockLevel block_avx512vnni_level [[gnu::weak]], block_avxvnni_level [[gnu::weak]], block_avx2_level [[gnu::weak]],
    block_plain_level;

namespace {

// With fewer inputs than this, waiting until every thread has rounded its share takes longer than rounding them all.
constexpr int64_t kSerialInputs = 1 << 13;
// Rounded inputs that are multiplied by all panels before the next rows are: they stay in the core's second cache.
constexpr int64_t kInputBytes = 512 << 10;
constexpr int64_t kFewestRows = 28;  // that a block is unpacked for

const std::vector<BlockLevel>& all_levels() {
    static const auto all = levels::compiled({&block_avx512vnni_level, &block_avxvnni_level, &block_avx2_level, &block_plain_level});
    return all;
}

Format format_named(const std::string& name) {
    if (name == "Q8_0") return Format::q8_0;
    if (name == "Q4_0") return Format::q4_0;
    if (name == "Q4_1") return Format::q4_1;
    if (name == "Q4_K") return Format::q4_k;
    if (name == "Q6_K") return Format::q6_k;
    if (name == "G4_32") return Format::g4_32;
    if (name == "G4_64") return Format::g4_64;
    if (name == "G4_128") return Format::g4_128;
    if (name == "MXFP4") return Format::mxfp4;
    throw std::invalid_argument("no products of blocks " + name);
}

class BlockWeight : public decode_pass::Product {
   public:
    // `rows`: `columns` rows of the file, one after another; `bias`: 0, or [columns] float32. Read here and not kept.
    BlockWeight(const std::string& level, const std::string& format, uintptr_t rows, int64_t columns, int64_t in_width,
                uintptr_t bias, const std::string& activation, bool is_gated)
        : format_(format_named(format)),
          level_(levels::named(all_levels(), level)),
          in_width_(checked_width(format_, columns, in_width, is_gated)),
          out_width_(is_gated ? columns / 2 : columns),
          panel_columns_(kVectors * level_.width),
          num_panels_(divided_up(out_width_, is_gated ? level_.width : panel_columns_)),
          panel_bytes_(in_width / (kBlock * blocks_together(format_)) * superblock_bytes(format_) * panel_columns_),
          panels_(size_t(num_panels_ * panel_bytes_)),
          bias_(size_t(num_panels_ * panel_columns_)) {
        weights_ = {panels_.data(), bias_.data(), in_width / kBlock,          panel_bytes_,
                    out_width_,     format_,      activation_named(activation), is_gated};
        nb::gil_scoped_release released;
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t panel = 0; panel < num_panels_; ++panel)
            pack(reinterpret_cast<const uint8_t*>(rows), reinterpret_cast<const float*>(bias), panel);
    }

    // x [num_rows, in_width], out [num_rows, out_width], both float32 or both bfloat16; strides in elements.
    // `addends`: see addends_of.
    void run(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t out_stride, int64_t num_rows, bool is_bfloat16,
             const AddendNumbers& addends, int num_threads) {
        const int64_t size = is_bfloat16 ? 2 : 4;
        nb::gil_scoped_release released;
        InputBlock* inputs = scratch(size_t(num_rows * weights_.num_blocks));
        const BlockRounding rounding{reinterpret_cast<const char*>(x), x_stride * size, num_rows, weights_.num_blocks,
                                     is_bfloat16, format_, inputs};
        const BlockCall call{inputs,          num_rows,    reinterpret_cast<char*>(out),
                             out_stride * size, is_bfloat16, addends_of(addends)};
        multiply(rounding, call, num_threads);
    }

    size_t num_bytes() const { return panels_.bytes(); }

    int64_t in_width() const override { return in_width_; }
    int64_t out_width() const override { return out_width_; }
    bool takes(bool) const override { return true; }

    size_t rounded_bytes(int64_t num_rows) const override {
        return size_t(num_rows * weights_.num_blocks) * sizeof(InputBlock);
    }

    void round(const decode_pass::ProductCall& call, int64_t first, int64_t last) const override {
        const BlockRounding rounding{call.x, call.x_row_bytes, call.num_rows, weights_.num_blocks, call.is_bfloat16,
                                     format_, reinterpret_cast<InputBlock*>(call.rounded)};
        round_rows(rounding, first, last);
    }

    int64_t num_parts(int64_t num_rows) const override { return divided_up(num_rows, rows_at_once()) * num_panels_; }

    decode_pass::FilledPart filled_by(int64_t part, int64_t num_rows) const override {
        const Group group = group_of(part / num_panels_, num_rows);
        const int64_t column = part % num_panels_ * panel_columns_;
        return {group.first, group.last - group.first, column, std::min(panel_columns_, out_width_ - column)};
    }

    void multiply(const decode_pass::ProductCall& call, int64_t part) const override {
        multiply_part({reinterpret_cast<const InputBlock*>(call.rounded), call.num_rows, call.out, call.out_row_bytes,
                       call.is_bfloat16, call.addends},
                      part);
    }

   private:
    // Kept by the calling thread from product to product: fresh memory costs a page fault for every page.
    static InputBlock* scratch(size_t count) {
        static thread_local std::unique_ptr<Memory> memory;
        const size_t bytes = count * sizeof(InputBlock);
        if (!memory || memory->bytes() < bytes) {
            memory.reset();
            memory = std::make_unique<Memory>(bytes);
        }
        return reinterpret_cast<InputBlock*>(memory->data());
    }

    static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

    static int64_t checked_width(Format format, int64_t columns, int64_t in_width, bool is_gated) {
        if (columns < 1 || in_width < 1 || in_width % source_inputs(format) || (is_gated && columns % 2))
            throw std::invalid_argument("no such weight");
        return in_width;
    }

    // The row of the weight that packed column `at` holds; -1: none.
    int64_t row_of(int64_t at) const {
        if (!weights_.is_gated) return at < out_width_ ? at : -1;
        const int64_t vector = at / level_.width, column = vector / kVectors * level_.width + at % level_.width;
        return column < out_width_ ? column + vector % kVectors * out_width_ : -1;
    }

    void pack(const uint8_t* rows, const float* bias, int64_t panel) {
        const int64_t num_sources = in_width_ / source_inputs(format_), from_bytes = source_bytes(format_);
        const int64_t to_bytes = superblock_bytes(format_) * panel_columns_;
        for (int64_t i = 0; i < panel_columns_; ++i) {
            const int64_t at = panel * panel_columns_ + i, row = row_of(at);
            bias_[at] = bias && row >= 0 ? bias[row] : 0.0f;
            SourceBlock block{};
            for (int64_t index = 0; index < num_sources; ++index) {
                if (row >= 0) take_apart(format_, rows + (row * num_sources + index) * from_bytes, block);
                place(format_, block, int(i), int(panel_columns_), panels_.data() + panel * panel_bytes_ + index * to_bytes);
            }
        }
    }

    // Rounds and multiplies in one parallel region: threads need to be woken only once.
    void multiply(const BlockRounding& rounding, const BlockCall& call, int num_threads) const {
        const int64_t num_parts = this->num_parts(call.num_rows);
        const int threads = int(std::min<int64_t>(num_threads, num_parts));
        const bool is_rounding_shared =
            threads > 1 && call.num_rows >= threads && call.num_rows * in_width_ >= kSerialInputs;
        if (!is_rounding_shared) round_rows(rounding, 0, call.num_rows);
        Shares shares(num_parts, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const int thread = omp_get_thread_num(), count = omp_get_num_threads();  // fewer than asked for, perhaps
            if (is_rounding_shared) {
                round_rows(rounding, call.num_rows * thread / count, call.num_rows * (thread + 1) / count);
#pragma omp barrier
            }
            for (int64_t part = shares.take(thread); part >= 0; part = shares.take(thread)) multiply_part(call, part);
        }
    }

    // Rows of one group lie together, so that reading them is a walk through memory.
    struct Group {
        int64_t first, last;  // rows
    };

    Group group_of(int64_t index, int64_t num_rows) const {
        const int64_t num_groups = divided_up(num_rows, rows_at_once());
        return {num_rows * index / num_groups, num_rows * (index + 1) / num_groups};
    }

    void round_rows(const BlockRounding& rounding, int64_t first, int64_t last) const {
        Group group{0, 0};
        for (int64_t index = 0; group.last < last; ++index) {
            group = group_of(index, rounding.num_rows);
            const int64_t from = std::max(first, group.first), to = std::min(last, group.last);
            if (from >= to) continue;
            BlockRounding part = rounding;
            part.x += group.first * rounding.x_row_bytes;
            part.out += group.first * weights_.num_blocks;
            part.num_rows = group.last - group.first;
            level_.round(part, from - group.first, to - group.first);
        }
    }

    void multiply_part(const BlockCall& call, int64_t part) const {
        const Group group = group_of(part / num_panels_, call.num_rows);
        BlockCall rows = call;
        rows.inputs += group.first * weights_.num_blocks;
        rows.num_rows = group.last - group.first;
        rows.out += group.first * call.out_row_bytes;
        if (rows.addends.of_row) rows.addends.of_row += group.first;
        level_.multiply(weights_, rows, {0, rows.num_rows, part % num_panels_});
    }

    int64_t rows_at_once() const {
        const int64_t fitting = kInputBytes / (weights_.num_blocks * int64_t(sizeof(InputBlock)));
        return std::min<int64_t>(std::max(fitting, kFewestRows), kMaxBlockRows);
    }

    const Format format_;
    const BlockLevel& level_;
    const int64_t in_width_, out_width_, panel_columns_, num_panels_, panel_bytes_;
    const WeightMemory panels_;
    std::vector<float> bias_;
    BlockWeights weights_{};
};

}  // namespace

void bind_blocks(nb::module_& module) {
    module.def("block_levels", [] { return levels::supported(all_levels()); });
    nb::class_<BlockWeight, decode_pass::Product>(module, "BlockWeight")
        .def(nb::init<const std::string&, const std::string&, uintptr_t, int64_t, int64_t, uintptr_t,
                      const std::string&, bool>())
        .def_prop_ro("num_bytes", &BlockWeight::num_bytes)
        .def_prop_ro("out_width", &BlockWeight::out_width)
        .def("run", &BlockWeight::run);
}

}  // namespace products
