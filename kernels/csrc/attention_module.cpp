// The Python side of paged attention: checks what it is given, divides the work over cores, runs a level.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "attention_division.h"
#include "decode_pass/parts.h"
#include "levels.h"

namespace nb = nanobind;

namespace paged {

extern const Level amx_level [[gnu::weak]], avx512_level [[gnu::weak]], avx2_level [[gnu::weak]], plain_level;

namespace {

const std::vector<Level>& all_levels() {
    static const auto all = levels::compiled({&amx_level, &avx512_level, &avx2_level, &plain_level});
    return all;
}

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The blocks of one storage. `address` stays valid as long as this object is used: the Python side holds the tensor.
class Cache {
   public:
    // `block_bytes`: from a block to the next; 0: they follow each other. `num_parts`: 2, or 1: the values are the keys.
    // `sinks`: of Call, [num_layers, num_heads], valid as long as the object is used, or 0. `cap`: of Shape.
    Cache(const std::string& level, uintptr_t address, int64_t num_blocks, int num_layers, int block_size,
          int kv_heads, int group, int head_dim, bool is_bfloat16, bool is_int8, int64_t block_bytes, int num_parts,
          uintptr_t sinks, float cap)
        : level_(levels::named(all_levels(), level)),
          shape_{kv_heads, group, head_dim, block_size, is_bfloat16, is_int8, 1.0f / std::sqrt(float(head_dim)),
                 kv_heads, 0, cap},
          base_(reinterpret_cast<const char*>(address)),
          sinks_(reinterpret_cast<const float*>(sinks)),
          num_parts_(num_parts),
          num_blocks_(num_blocks),
          num_layers_(num_layers),
          block_bytes_(block_bytes ? block_bytes : num_parts * shape_.slot_bytes() * block_size * num_layers) {
        if (!address || num_blocks < 1 || num_layers < 1 || block_size < 1 || kv_heads < 1 || group < 1 || head_dim < 1)
            throw std::invalid_argument("a cache needs memory and positive sizes");
        if ((num_parts != 1 && num_parts != 2) || !(cap >= 0.0f) || std::isinf(cap))
            throw std::invalid_argument("keys and values, or keys alone, and a finite cap");
        if (block_bytes_ < num_parts * shape_.slot_bytes() * block_size * num_layers)
            throw std::invalid_argument("blocks that overlap");
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
        call.keys = base_ + num_parts_ * run * layer;
        call.values = num_parts_ == 1 ? call.keys : call.keys + run;
        call.sinks = sinks_ ? sinks_ + layer * shape_.num_heads() : nullptr;
        call.block_bytes = block_bytes_;
        return call;
    }

   private:
    Level level_;
    Shape shape_;
    const char* base_;
    const float* sinks_;
    int num_parts_;
    int64_t num_blocks_;
    int64_t num_layers_;
    int64_t block_bytes_;
};

// The block table of a row of `tables`, of which `length` tokens are read.
const int64_t* blocks_of(const Cache& cache, const Tables& tables, int64_t row, int64_t length) {
    if (row < 0 || row >= int64_t(tables.shape(0))) throw std::invalid_argument("a row outside the block tables");
    const int64_t block_size = cache.shape().block_size;
    if (length < 1 || (length - 1) / block_size >= int64_t(tables.shape(1)))
        throw std::invalid_argument("a length outside the tables");
    const int64_t count = (length - 1) / block_size + 1;
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

// One query token for each of some sequences: what each thread reads, the same on every layer. `rows` are rows of
// `tables`, which stay as they are while the plan is used; lengths[i] tokens of row i are read. With a window that is
// chunked, contexts are cut at its multiples, and a token reads the part that it is in.
class DecodePlan : public decode_pass::Attention {
   public:
    DecodePlan(const Cache& cache, Tables tables, Ids rows, Flags reversed, Ids lengths, int64_t window,
               bool is_chunked, int num_threads)
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
            const int64_t first = is_chunked ? (lengths(i) - 1) / window * window : std::max<int64_t>(0, lengths(i) - window);
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

// Chunks of some sequences: the last counts[i] of the first lengths[i] tokens of row rows[i] of `tables`, whose query
// rows follow one another in this order. Each reads up to itself or, if bidirectional, all of the lengths[i] tokens; with
// `ends`, one for each query row, those before its end. Otherwise as DecodePlan.
class ChunkPlan {
   public:
    ChunkPlan(const Cache& cache, Tables tables, Ids rows, Flags reversed, Ids lengths, Ids counts, int64_t window,
              bool is_chunked, int num_threads, bool is_bidirectional, std::optional<Ids> ends = std::nullopt)
        : cache_(cache), tables_(tables), num_threads_(num_threads) {
        if (lengths.shape(0) != rows.shape(0)) throw std::invalid_argument("as many lengths as rows");
        if (reversed.shape(0) != rows.shape(0)) throw std::invalid_argument("as many directions as rows");
        if (counts.shape(0) != rows.shape(0)) throw std::invalid_argument("as many counts as rows");
        if (num_threads < 1) throw std::invalid_argument("at least one thread");
        if (is_bidirectional && window > 0) throw std::invalid_argument("a window reaches back only");
        const int64_t num_ends = ends ? int64_t(ends->shape(0)) : 0;
        if (num_ends && (is_chunked || is_bidirectional)) throw std::invalid_argument("ends of parts that are cut");
        std::vector<ChunkPiece> chunks;
        bool is_window_narrow = false;
        for (size_t i = 0; i < rows.shape(0); ++i) {
            const int64_t count = counts(i), length = lengths(i);
            if (count < 1 || count > length) throw std::invalid_argument("a count outside its length");
            const int64_t* blocks = blocks_of(cache, tables, rows(i), length);
            const ChunkPiece chunk = {num_rows_, count, length - count, 0, is_bidirectional ? length : 0, blocks,
                                      reversed(i), 0, 0};
            if (num_ends) {
                if (num_rows_ + count > num_ends) throw std::invalid_argument("as many ends as query rows");
                divide(chunk, *ends, length, chunks);
            } else {
                chunks.push_back(chunk);
            }
            num_rows_ += count;
            is_window_narrow |= window > 0 && length > window;
        }
        if (num_ends && num_ends != num_rows_) throw std::invalid_argument("as many ends as query rows");
        whole_.build(cache.shape(), chunks, num_threads);
        if (!is_window_narrow) return;
        if (is_chunked) chunks = divided(chunks, window);
        for (ChunkPiece& chunk : chunks) chunk.window = is_chunked ? 0 : window;
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
    // The tokens of a chunk in runs that read alike: each up to itself, or all of them up to the same end.
    static void divide(const ChunkPiece& chunk, const Ids& ends, int64_t length, std::vector<ChunkPiece>& pieces) {
        for (int64_t done = 0; done < chunk.num_tokens;) {
            const int64_t end = ends(chunk.row + done), own = chunk.position + done + 1;
            if (end < own || end > length) throw std::invalid_argument("an end outside its context");
            int64_t last = done + 1;
            while (last < chunk.num_tokens && ends(chunk.row + last) == (end == own ? chunk.position + last + 1 : end)) ++last;
            ChunkPiece piece = chunk;
            piece.row += done;
            piece.position += done;
            piece.num_tokens = last - done;
            piece.context = end == own ? 0 : end;
            pieces.push_back(piece);
            done = last;
        }
    }

    // The tokens of each part of a context, `size` positions long, by themselves: they read that part alone.
    static std::vector<ChunkPiece> divided(const std::vector<ChunkPiece>& chunks, int64_t size) {
        std::vector<ChunkPiece> pieces;
        for (const ChunkPiece& chunk : chunks)
            for (int64_t done = 0; done < chunk.num_tokens;) {
                ChunkPiece piece = chunk;
                piece.row += done;
                piece.position += done;
                piece.lowest = piece.position / size * size;
                piece.num_tokens = std::min(chunk.num_tokens - done, piece.lowest + size - piece.position);
                done += piece.num_tokens;
                pieces.push_back(piece);
            }
        return pieces;
    }

    const Cache cache_;
    Tables tables_;
    int64_t num_rows_ = 0;
    int num_threads_;
    ChunkDivision whole_, windowed_;
};

}  // namespace

void bind(nb::module_& module) {
    module.def("supported_levels", [] { return levels::supported(all_levels()); });
    nb::class_<Cache>(module, "BlockCache")
        .def(nb::init<const std::string&, uintptr_t, int64_t, int, int, int, int, int, bool, bool, int64_t, int,
                      uintptr_t, float>());
    nb::class_<DecodePlan, decode_pass::Attention>(module, "DecodePlan")
        .def(nb::init<const Cache&, Tables, Ids, Flags, Ids, int64_t, bool, int>())
        .def_prop_ro("num_rows", &DecodePlan::num_rows)
        .def("run", &DecodePlan::run);
    nb::class_<ChunkPlan>(module, "ChunkPlan")
        .def(nb::init<const Cache&, Tables, Ids, Flags, Ids, Ids, int64_t, bool, int, bool>())
        .def(nb::init<const Cache&, Tables, Ids, Flags, Ids, Ids, int64_t, bool, int, bool, std::optional<Ids>>())
        .def_prop_ro("num_rows", &ChunkPlan::num_rows)
        .def("run", &ChunkPlan::run);
}

}  // namespace paged
