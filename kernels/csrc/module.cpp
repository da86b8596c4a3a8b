// The Python side of paged attention: checks what it is given, divides the work over cores, runs a level.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "decode_pass/parts.h"

namespace nb = nanobind;

namespace rows {

void bind(nb::module_& module);  // operations on rows, see rows_module.cpp

}  // namespace rows

namespace products {

void bind(nb::module_& module);  // products with packed weights, see products_module.cpp
void bind_blocks(nb::module_& module);  // products with weights in blocks, see block_products/module.cpp

}  // namespace products

namespace block_copies {

void bind(nb::module_& module);  // of lists of blocks, see block_copies/module.cpp

}  // namespace block_copies

namespace length_prediction {

void bind(nb::module_& module);  // of the router, see length_prediction.cpp

}  // namespace length_prediction

namespace request_table {

void bind(nb::module_& module);  // of schedulers, see request_table.cpp

}  // namespace request_table

namespace iteration_costs {

void bind(nb::module_& module);  // of what workers learn, see iteration_costs.cpp

}  // namespace iteration_costs

namespace token_masks {

void bind(nb::module_& module);  // of grammars, see token_masks.cpp

}  // namespace token_masks

namespace decode_pass {

void bind_parts(nb::module_& module);  // before what implements them; see decode_pass/module.cpp
void bind(nb::module_& module);

}  // namespace decode_pass

namespace paged {

extern const Level plain_level;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
extern const Level avx2_level, avx512bf16_level;
#endif

const std::vector<Level>& levels() {
    static const std::vector<Level> all = {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
        avx512bf16_level, avx2_level,
#endif
        plain_level,
    };
    return all;
}

namespace {

// Pieces of decodes per thread, where there is enough to do ...
constexpr int64_t kPiecesPerThread = 4;
// ... which of fewer tokens there is not.
constexpr int64_t kFewTokens = 128;

// Pieces of chunks per thread, where there is enough to do.
constexpr int64_t kChunkPiecesPerThread = 6;

const Level& level_named(const std::string& name) {
    for (const Level& level : levels())
        if (name == level.name) {
            if (!level.is_supported()) throw std::invalid_argument("this processor has no " + name);
            return level;
        }
    throw std::invalid_argument("no attention level " + name);
}

std::vector<std::string> supported_levels() {
    std::vector<std::string> names;
    for (const Level& level : levels())
        if (level.is_supported()) names.emplace_back(level.name);
    return names;
}

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The blocks of one storage. `address` stays valid as long as this object is used: the Python side holds the tensor.
class Cache {
   public:
    Cache(const std::string& level, uintptr_t address, int64_t num_blocks, int num_layers, int block_size,
          int kv_heads, int group, int head_dim, bool is_bfloat16, bool is_int8)
        : level_(level_named(level)),
          shape_{kv_heads, group, head_dim, block_size, is_bfloat16, is_int8, 1.0f / std::sqrt(float(head_dim)),
                 kv_heads, 0},
          base_(reinterpret_cast<const char*>(address)),
          num_blocks_(num_blocks),
          num_layers_(num_layers) {
        if (!address || num_blocks < 1 || num_layers < 1 || block_size < 1 || kv_heads < 1 || group < 1 || head_dim < 1)
            throw std::invalid_argument("a cache needs memory and positive sizes");
    }

    const Level& level() const { return level_; }
    const Shape& shape() const { return shape_; }
    int64_t num_blocks() const { return num_blocks_; }
    int64_t num_layers() const { return num_layers_; }
    int64_t row_element_bytes() const { return shape_.is_bfloat16 ? 2 : 4; }

    Call call(int layer) const {
        if (layer < 0 || layer >= num_layers_) throw std::invalid_argument("no such layer");
        const int64_t run = shape_.slot_bytes() * shape_.block_size;
        Call call{};
        call.keys = base_ + 2 * run * layer;
        call.values = call.keys + run;
        call.block_bytes = 2 * run * num_layers_;
        return call;
    }

   private:
    Level level_;
    Shape shape_;
    const char* base_;
    int64_t num_blocks_;
    int64_t num_layers_;
};

// The block table of a row of `tables`, of which `length` tokens are read.
const int64_t* blocks_of(const Cache& cache, const Tables& tables, int64_t row, int64_t length) {
    if (row < 0 || row >= int64_t(tables.shape(0))) throw std::invalid_argument("a row outside the block tables");
    const int64_t count = (length + cache.shape().block_size - 1) / cache.shape().block_size;
    if (length < 1 || count > int64_t(tables.shape(1))) throw std::invalid_argument("a length outside the tables");
    const int64_t* blocks = tables.data() + row * tables.shape(1);
    for (int64_t i = 0; i < count; ++i)
        if (blocks[i] < 0 || blocks[i] >= cache.num_blocks())
            throw std::invalid_argument("a block outside the storage");
    return blocks;
}

// Tensors [rows, num_heads, head_dim], float32 or bfloat16, by address; rows `..._stride` elements apart.
Call call_of(const Cache& cache, int layer, uintptr_t queries, int64_t query_stride, uintptr_t out, int64_t out_stride) {
    Call call = cache.call(layer);
    call.queries = reinterpret_cast<const char*>(queries);
    call.query_row_bytes = query_stride * cache.row_element_bytes();
    call.out = reinterpret_cast<char*>(out);
    call.out_row_bytes = out_stride * cache.row_element_bytes();
    return call;
}

// Buffers of the calling thread, kept from call to call.
Scratch scratch_of(const Shape& shape) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), Scratch::floats(shape)));
    return Scratch::in(shape, memory.data());
}

// Partial results [first, first + count) belong to one row.
struct Merge {
    int64_t row, first, count;
};

// Contexts divided into their sections, whatever the number of threads: each is summed by itself. So is each head, by which
// sections are divided where there are few.
struct Division {
    std::vector<Piece> pieces;
    std::vector<Merge> merges;
    int64_t num_partials = 0;

    void add(const Piece& context) {
        const int64_t first = context.first / kSection, count = (context.last - 1) / kSection + 1 - first;
        if (count > 1) merges.push_back({context.row, num_partials, count});
        for (int64_t section = first; section < first + count; ++section) {
            Piece piece = context;
            piece.first = std::max(context.first, section * kSection);
            piece.last = std::min(context.last, (section + 1) * kSection);
            piece.partial = count > 1 ? num_partials++ : -1;
            pieces.push_back(piece);
        }
        num_tokens_ += context.last - context.first;
    }

    void split_heads(int num_threads) {
        if (num_threads == 1 || pieces.empty() || num_tokens_ < kFewTokens) return;
        const int64_t num_heads = pieces.front().num_heads, wanted = kPiecesPerThread * num_threads;
        const int64_t parts = std::min(num_heads, (wanted + num_pieces() - 1) / num_pieces());
        if (parts == 1) return;
        std::vector<Piece> divided;
        for (const Piece& whole : pieces)
            for (int64_t part = 0; part < parts; ++part) {
                Piece piece = whole;
                piece.first_head = int(num_heads * part / parts);
                piece.num_heads = int(num_heads * (part + 1) / parts) - piece.first_head;
                divided.push_back(piece);
            }
        pieces = std::move(divided);
    }

   private:
    int64_t num_pieces() const { return pieces.size(); }

    int64_t num_tokens_ = 0;
};

// One query token for each of some sequences: what each thread reads, the same on every layer. `rows` are rows of
// `tables`, which stay as they are while the plan is used; lengths[i] tokens of row i are read.
class DecodePlan : public decode_pass::Attention {
   public:
    DecodePlan(const Cache& cache, Tables tables, Ids rows, Flags reversed, Ids lengths, int64_t window,
               int num_threads)
        : cache_(cache), tables_(tables), num_rows_(rows.shape(0)), num_threads_(num_threads) {
        if (lengths.shape(0) != rows.shape(0)) throw std::invalid_argument("as many lengths as rows");
        if (reversed.shape(0) != rows.shape(0)) throw std::invalid_argument("as many directions as rows");
        if (num_threads < 1) throw std::invalid_argument("at least one thread");
        bool is_window_narrow = false;
        for (int64_t i = 0; i < num_rows_; ++i) {
            whole_.add({i, blocks_of(cache, tables, rows(i), lengths(i)), 0, lengths(i), reversed(i), -1, 0,
                        cache.shape().kv_heads});
            is_window_narrow |= window > 0 && lengths(i) > window;
        }
        whole_.split_heads(num_threads);
        for (int64_t i = 0; is_window_narrow && i < num_rows_; ++i) {
            const int64_t first = std::max<int64_t>(0, lengths(i) - window);
            windowed_.add({i, blocks_of(cache, tables, rows(i), lengths(i)), first, lengths(i), reversed(i), -1, 0,
                           cache.shape().kv_heads});
        }
        windowed_.split_heads(num_threads);
    }

    // Addresses of [rows, num_heads, head_dim] tensors, rows `..._stride` elements apart.
    void run(int layer, bool is_windowed, uintptr_t queries, int64_t query_stride, uintptr_t out, int64_t out_stride) {
        begin(layer, is_windowed, queries, query_stride, out, out_stride);
        nb::gil_scoped_release released;
        const int num_threads = int(std::min<int64_t>(num_threads_, num_pieces()));
        std::atomic<int64_t> taken{0};
        const auto take = [&] { return taken.fetch_add(1, std::memory_order_relaxed); };
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            for (int64_t piece = take(), next; piece < num_pieces(); piece = next) {
                next = take();
                attend(piece, next);
            }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_merges(); ++i) merge(i);
        }
    }

    int64_t num_rows() const override { return num_rows_; }
    int64_t num_layers() const override { return cache_.num_layers(); }
    int64_t query_width() const override { return int64_t(cache_.shape().num_heads()) * cache_.shape().head_dim; }
    bool is_bfloat16() const override { return cache_.shape().is_bfloat16; }
    int64_t num_pieces() const override { return division_->pieces.size(); }
    int64_t num_merges() const override { return division_->merges.size(); }

    void begin(int layer, bool is_windowed, uintptr_t queries, int64_t query_stride, uintptr_t out,
               int64_t out_stride) override {
        call_ = call_of(cache_, layer, queries, query_stride, out, out_stride);
        division_ = is_windowed && !windowed_.pieces.empty() ? &windowed_ : &whole_;
        partials_.resize(size_t(division_->num_partials * partial_floats()));
    }

    void attend(int64_t piece) override { attend(piece, piece + 1); }

    void merge(int64_t index) override {
        const Merge& own = division_->merges[index];
        const float* partials = partials_.data() + own.first * partial_floats();
        cache_.level().merge(cache_.shape(), call_, own.row, scratch_of(cache_.shape()), partials, own.count);
    }

   private:
    // `next`: what this thread is likely to do next; past the last piece: nothing.
    void attend(int64_t piece, int64_t next) {
        const std::vector<Piece>& pieces = division_->pieces;
        const Piece* ahead = next < num_pieces() ? &pieces[next] : nullptr;
        cache_.level().decode_piece(cache_.shape(), call_, pieces[piece], ahead, scratch_of(cache_.shape()),
                                    partials_.data());
    }

    int64_t partial_floats() const { return int64_t(cache_.shape().num_heads()) * cache_.shape().partial_floats(); }

    const Cache cache_;
    Tables tables_;
    int64_t num_rows_;
    int num_threads_;
    Division whole_, windowed_;
    std::vector<float> partials_;
    // Of the layer that is computed:
    Call call_{};
    const Division* division_ = &whole_;
};

// Pieces of chunks, longest first: cores take one after another.
struct ChunkDivision {
    std::vector<ChunkPiece> pieces;

    void build(const Shape& shape, const std::vector<ChunkPiece>& chunks, int num_threads) {
        // Keys are packed once per piece, so pieces are wide, unless cores would go without.
        for (int64_t rows = kChunkRows; rows >= 2 * kRows; rows /= 2) {
            pieces.clear();
            for (const ChunkPiece& chunk : chunks) add(shape, chunk, std::max<int64_t>(1, rows / shape.group));
            if (num_threads == 1 || int64_t(pieces.size()) >= kChunkPiecesPerThread * num_threads) break;
        }
        std::stable_sort(pieces.begin(), pieces.end(),
                         [](const ChunkPiece& a, const ChunkPiece& b) { return work(a) > work(b); });
    }

   private:
    static int64_t work(const ChunkPiece& piece) {
        const int64_t context = piece.position + piece.num_tokens;
        return piece.num_tokens * (piece.window ? std::min(context, piece.window + piece.num_tokens) : context);
    }

    void add(const Shape& shape, const ChunkPiece& chunk, int64_t longest) {
        const int64_t count = (chunk.num_tokens + longest - 1) / longest;
        for (int head = 0; head < shape.kv_heads; ++head)
            for (int64_t i = 0; i < count; ++i) {
                const int64_t first = chunk.num_tokens * i / count, last = chunk.num_tokens * (i + 1) / count;
                ChunkPiece piece = chunk;
                piece.row += first;
                piece.position += first;
                piece.num_tokens = last - first;
                piece.kv_head = head;
                pieces.push_back(piece);
            }
    }
};

// Chunks of some sequences: the last counts[i] of the first lengths[i] tokens of row rows[i] of `tables`, whose query
// rows follow one another in this order. Otherwise as DecodePlan.
class ChunkPlan {
   public:
    ChunkPlan(const Cache& cache, Tables tables, Ids rows, Flags reversed, Ids lengths, Ids counts, int64_t window,
              int num_threads)
        : cache_(cache), tables_(tables), num_threads_(num_threads) {
        if (lengths.shape(0) != rows.shape(0)) throw std::invalid_argument("as many lengths as rows");
        if (reversed.shape(0) != rows.shape(0)) throw std::invalid_argument("as many directions as rows");
        if (counts.shape(0) != rows.shape(0)) throw std::invalid_argument("as many counts as rows");
        if (num_threads < 1) throw std::invalid_argument("at least one thread");
        std::vector<ChunkPiece> chunks;
        bool is_window_narrow = false;
        for (size_t i = 0; i < rows.shape(0); ++i) {
            const int64_t count = counts(i), length = lengths(i);
            if (count < 1 || count > length) throw std::invalid_argument("a count outside its length");
            const int64_t* blocks = blocks_of(cache, tables, rows(i), length);
            chunks.push_back({num_rows_, count, length - count, 0, blocks, reversed(i), 0});
            num_rows_ += count;
            is_window_narrow |= window > 0 && length > window;
        }
        whole_.build(cache.shape(), chunks, num_threads);
        if (!is_window_narrow) return;
        for (ChunkPiece& chunk : chunks) chunk.window = window;
        windowed_.build(cache.shape(), chunks, num_threads);
    }

    void run(int layer, bool is_windowed, uintptr_t queries, int64_t query_stride, uintptr_t out, int64_t out_stride) {
        const Call call = call_of(cache_, layer, queries, query_stride, out, out_stride);
        const std::vector<ChunkPiece>& pieces =
            is_windowed && !windowed_.pieces.empty() ? windowed_.pieces : whole_.pieces;
        nb::gil_scoped_release released;
        const int64_t num_pieces = pieces.size();
        const int num_threads = int(std::min<int64_t>(num_threads_, num_pieces));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            const Scratch scratch = scratch_of(cache_.shape());
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_pieces; ++i)
                cache_.level().chunk_piece(cache_.shape(), call, pieces[i], scratch);
        }
    }

    int64_t num_rows() const { return num_rows_; }

   private:
    const Cache cache_;
    Tables tables_;
    int64_t num_rows_ = 0;
    int num_threads_;
    ChunkDivision whole_, windowed_;
};

}  // namespace
}  // namespace paged

NB_MODULE(_native, module) {
    using namespace paged;
    module.def("supported_levels", supported_levels);
    decode_pass::bind_parts(module);
    rows::bind(module);
    products::bind(module);
    products::bind_blocks(module);
    decode_pass::bind(module);
    block_copies::bind(module);
    length_prediction::bind(module);
    request_table::bind(module);
    iteration_costs::bind(module);
    token_masks::bind(module);
    nb::class_<Cache>(module, "Cache")
        .def(nb::init<const std::string&, uintptr_t, int64_t, int, int, int, int, int, bool, bool>());
    nb::class_<DecodePlan, decode_pass::Attention>(module, "DecodePlan")
        .def(nb::init<const Cache&, Tables, Ids, Flags, Ids, int64_t, int>())
        .def_prop_ro("num_rows", &DecodePlan::num_rows)
        .def("run", &DecodePlan::run);
    nb::class_<ChunkPlan>(module, "ChunkPlan")
        .def(nb::init<const Cache&, Tables, Ids, Flags, Ids, Ids, int64_t, int>())
        .def_prop_ro("num_rows", &ChunkPlan::num_rows)
        .def("run", &ChunkPlan::run);
}
