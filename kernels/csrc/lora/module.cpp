// The Python side of adapters: packs their matrices, and computes what they add to the results of a product.
//
// Addresses are checked by the caller (kernels/cpu/lora.py), which holds the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../decode_pass/parts.h"
#include "../levels.h"
#include "../work.h"
#include "lora.h"

namespace nb = nanobind;

namespace lora {

extern const Level avx512_level [[gnu::weak]], avx2_level [[gnu::weak]], plain_level;

namespace {

// With fewer multiplications than this, another thread takes longer to begin than the work.
constexpr int64_t kPartProducts = 1 << 16;
constexpr int64_t kTaskColumns = 1024;  // of B

const std::vector<Level>& all_levels() {
    static const auto all = levels::compiled({&avx512_level, &avx2_level, &plain_level});
    return all;
}

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [inputs, columns] at any strides (in elements), as panels of one vector of columns.
void pack(const float* from, int64_t input_stride, int64_t column_stride, int64_t num_inputs, int64_t first_column,
          int64_t num_columns, int width, float* panels) {
    for (int64_t i = 0; i < num_columns; ++i) {
        const int64_t at = first_column + i;
        float* to = panels + at / width * num_inputs * width + at % width;
        for (int64_t k = 0; k < num_inputs; ++k) to[k * width] = from[k * input_stride + i * column_stride];
    }
}

// What one module adds to the results of the product that it is part of.
struct Module {
    int64_t first_column, num_columns;  // in a row of addends
    int64_t rank;                       // 0: it has no adapter, and adds zeros
    int64_t first_rank;                 // among those of all modules of the product
    const float* panels;                // B's
};

// The modules of one product, which read the same input.
struct Site {
    int64_t in_width = 0, num_ranks = 0;
    std::unique_ptr<products::Memory> memory{};
    const float* panels = nullptr;  // of A, [vectors of ranks, in_width, width]
    std::vector<Module> modules{};
    int64_t num_columns = 0;
};

class LoraAdapter {
   public:
    LoraAdapter(const std::string& level, int num_sites)
        : level_(levels::named(all_levels(), level)), sites_(num_sites) {}
    LoraAdapter(const LoraAdapter&) = delete;
    LoraAdapter& operator=(const LoraAdapter&) = delete;

    // Modules: (first column, columns, rank, A [rank, in_width], B [columns, rank]) in float32, contiguous; read here
    // and not kept.
    void set(int index, int64_t in_width,
             const std::vector<std::tuple<int64_t, int64_t, int64_t, uintptr_t, uintptr_t>>& modules) {
        nb::gil_scoped_release released;  // the caller keeps the matrices
        Site& site = sites_.at(index);
        const int64_t width = level_.width;
        int64_t floats = 0;
        site.in_width = in_width;
        for (const auto& [first, count, rank, a, b] : modules) {
            site.modules.push_back({first, count, rank, site.num_ranks, nullptr});
            site.num_ranks += rank;
            site.num_columns += count;
            floats += divided_up(count, width) * width * rank;
        }
        const int64_t a_floats = divided_up(site.num_ranks, width) * width * in_width;
        site.memory = std::make_unique<products::Memory>(size_t(a_floats + floats) * sizeof(float));
        float* at = reinterpret_cast<float*>(site.memory->data());
        std::fill_n(at, a_floats + floats, 0.0f);
        site.panels = at;
        float* b_at = at + a_floats;
        for (size_t i = 0; i < modules.size(); ++i) {
            Module& module = site.modules[i];
            const auto [first, count, rank, a, b] = modules[i];
            pack(reinterpret_cast<const float*>(a), 1, in_width, in_width, module.first_rank, rank, int(width), at);
            pack(reinterpret_cast<const float*>(b), 1, rank, rank, 0, count, int(width), b_at);
            module.panels = b_at;
            b_at += divided_up(count, width) * width * rank;
        }
    }

    size_t num_bytes() const {
        size_t sum = 0;
        for (const Site& site : sites_) sum += site.memory ? site.memory->bytes() : 0;
        return sum;
    }

    const Level& level() const { return level_; }
    const Site& site(int index) const { return sites_.at(index); }
    int num_sites() const { return int(sites_.size()); }

   private:
    const Level& level_;
    std::vector<Site> sites_;
};

struct Tile {
    const Site* site;
    int64_t first;  // among the rows with an adapter
    int num_rows;
    int64_t part;    // vector of A's columns, or module of B's
    int64_t column;  // first of the module's columns
};

// The work of one product for the groups of rows, in parts of several tiles.
struct SiteWork {
    std::vector<Tile> shrinks{}, expands{};
    int64_t num_ranks = 0;   // of a row, at most
    int64_t num_shrinks = 0, num_expands = 0;  // parts
    decode_pass::LowRankCall call{};
};

// The rows of one pass that have an adapter, grouped by it.
class LoraGroups final : public decode_pass::LowRank {
   public:
    // Group i: adapters[i], rows places[ends[i - 1] : ends[i]] of the pass.
    LoraGroups(std::vector<const LoraAdapter*> adapters, std::vector<int64_t> ends, std::vector<int64_t> places)
        : adapters_(std::move(adapters)), ends_(std::move(ends)), places_(std::move(places)) {
        if (adapters_.empty() || adapters_.size() != ends_.size() || ends_.back() != int64_t(places_.size()))
            throw std::invalid_argument("no such groups");
        for (const LoraAdapter* adapter : adapters_)
            if (&adapter->level() != &adapters_[0]->level() || adapter->num_sites() != adapters_[0]->num_sites())
                throw std::invalid_argument("adapters of two kinds");
    }

    // x [rows of the pass, in_width] -> addends [rows with an adapter, width] float32; strides in elements.
    void run(int site, uintptr_t x, int64_t x_stride, bool is_bfloat16, uintptr_t addends, int64_t stride,
             int num_threads) const {
        nb::gil_scoped_release released;
        SiteWork work;
        work.call = {site,    reinterpret_cast<const char*>(x),    x_stride * (is_bfloat16 ? 2 : 4), is_bfloat16,
                     nullptr, reinterpret_cast<float*>(addends), stride};
        divide(work);
        std::vector<float> shrunk(places_.size() * row_floats(work.num_ranks));
        work.call.shrunk = shrunk.data();
        const int threads = work.num_shrinks + work.num_expands > 2 ? num_threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for schedule(dynamic, 1)
            for (int64_t part = 0; part < work.num_shrinks; ++part) shrink_part(work, part);
#pragma omp for schedule(dynamic, 1)
            for (int64_t part = 0; part < work.num_expands; ++part) expand_part(work, part);
        }
    }

    int64_t num_rows() const override { return int64_t(places_.size()); }
    int64_t last_place() const override { return *std::max_element(places_.begin(), places_.end()); }
    int64_t num_sites() const override { return adapters_[0]->num_sites(); }

    bool fits(int index, int64_t in_width, int64_t stride) const override {
        for (const LoraAdapter* adapter : adapters_) {
            const Site& site = adapter->site(index);
            if (site.in_width != in_width || site.num_columns != stride) return false;
        }
        return true;
    }

    int64_t shrunk_floats() const override {
        int64_t num_ranks = 0;
        for (const LoraAdapter* adapter : adapters_)
            for (int index = 0; index < adapter->num_sites(); ++index)
                num_ranks = std::max(num_ranks, adapter->site(index).num_ranks);
        return int64_t(places_.size()) * row_floats(num_ranks);
    }

    void begin(const decode_pass::LowRankCall& call) override {
        work_.call = call;
        divide(work_);
    }

    int64_t num_shrinks() const override { return work_.num_shrinks; }
    void shrink(int64_t part) override { shrink_part(work_, part); }
    int64_t num_expands() const override { return work_.num_expands; }
    void expand(int64_t part) override { expand_part(work_, part); }

   private:
    int64_t row_floats(int64_t num_ranks) const {
        const int64_t width = adapters_[0]->level().width;
        return divided_up(num_ranks, width) * width;
    }

    void divide(SiteWork& work) const {
        int64_t begin = 0, shrinks = 0, expands = 0;
        const int width = adapters_[0]->level().width;
        work.shrinks.clear();
        work.expands.clear();
        work.num_ranks = 0;
        for (size_t i = 0; i < adapters_.size(); begin = ends_[i++]) {
            const Site& site = adapters_[i]->site(work.call.site);
            work.num_ranks = std::max(work.num_ranks, site.num_ranks);
            shrinks += (ends_[i] - begin) * site.num_ranks * site.in_width;
            expands += (ends_[i] - begin) * site.num_ranks * site.num_columns;
            for (int64_t first = begin; first < ends_[i]; first += kRows) {
                const int count = int(std::min<int64_t>(kRows, ends_[i] - first));
                for (int64_t part = 0; part < divided_up(site.num_ranks, width); ++part)
                    work.shrinks.push_back({&site, first, count, part, 0});
                for (size_t part = 0; part < site.modules.size(); ++part)
                    for (int64_t column = 0; column < site.modules[part].num_columns; column += kTaskColumns)
                        work.expands.push_back({&site, first, count, int64_t(part), column});
            }
        }
        work.num_shrinks = num_parts(shrinks, work.shrinks.size());
        work.num_expands = num_parts(expands, work.expands.size());
    }

    static int64_t num_parts(int64_t products, size_t num_tiles) {
        return std::min(std::max<int64_t>(products / kPartProducts, 1), int64_t(num_tiles));
    }

    void shrink_part(const SiteWork& work, int64_t part) const {
        const Level& level = adapters_[0]->level();
        const int64_t count = work.shrinks.size(), floats = row_floats(work.num_ranks);
        for (int64_t i = count * part / work.num_shrinks; i < count * (part + 1) / work.num_shrinks; ++i) {
            const Tile& tile = work.shrinks[i];
            const char* inputs[kRows];
            float* results[kRows];
            for (int r = 0; r < tile.num_rows; ++r) {
                inputs[r] = work.call.x + places_[tile.first + r] * work.call.x_row_bytes;
                results[r] = work.call.shrunk + (tile.first + r) * floats + tile.part * level.width;
            }
            const float* panel = tile.site->panels + tile.part * tile.site->in_width * level.width;
            level.shrink({inputs, work.call.is_bfloat16, tile.site->in_width, panel, results}, tile.num_rows);
        }
    }

    void expand_part(const SiteWork& work, int64_t part) const {
        const Level& level = adapters_[0]->level();
        const int64_t all = work.expands.size(), floats = row_floats(work.num_ranks);
        for (int64_t i = all * part / work.num_expands; i < all * (part + 1) / work.num_expands; ++i) {
            const Tile& tile = work.expands[i];
            const Module& module = tile.site->modules[tile.part];
            const float* inputs[kRows];
            float* results[kRows];
            for (int r = 0; r < tile.num_rows; ++r) {
                inputs[r] = work.call.shrunk + (tile.first + r) * floats + module.first_rank;
                results[r] = work.call.addends + (tile.first + r) * work.call.stride + module.first_column + tile.column;
            }
            const int64_t count = std::min(kTaskColumns, module.num_columns - tile.column);
            level.expand({inputs, module.rank, module.panels + tile.column * module.rank, count, results}, tile.num_rows);
        }
    }

    const std::vector<const LoraAdapter*> adapters_;
    const std::vector<int64_t> ends_;
    const std::vector<int64_t> places_;
    SiteWork work_;  // of a pass through all layers, which does one product at a time
};

}  // namespace

void bind(nb::module_& module) {
    module.def("lora_levels", [] { return levels::supported(all_levels()); });
    nb::class_<LoraAdapter>(module, "LoraAdapter")
        .def(nb::init<const std::string&, int>())
        .def("set", &LoraAdapter::set)
        .def_prop_ro("num_bytes", &LoraAdapter::num_bytes);
    nb::class_<LoraGroups, decode_pass::LowRank>(module, "LoraGroups")
        .def(nb::init<std::vector<const LoraAdapter*>, std::vector<int64_t>, std::vector<int64_t>>())
        .def("run", &LoraGroups::run);
}

}  // namespace lora
