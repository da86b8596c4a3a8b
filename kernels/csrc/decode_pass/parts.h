// What the kernels of a layer offer to a pass through all layers (module.cpp): work for threads that are there already.
//
// None of these starts or waits for a thread; the pass sees to it that what one thread needs of another is there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../products.h"
#include "../rows.h"

namespace decode_pass {

// Normalisation of rows, see rows::Norm; x may be normalised in place.
class RowNorm {
   public:
    virtual ~RowNorm() = default;
    virtual int64_t width() const = 0;
    virtual bool is_bfloat16() const = 0;
    virtual void normalise(const rows::NormRows& call, int64_t first, int64_t last) const = 0;
};

// Rotation of queries and keys, and the writing of keys and values; the shape of the heads is its own.
class Placement {
   public:
    virtual ~Placement() = default;
    virtual int64_t head_dim() const = 0;
    virtual int64_t query_width() const = 0;
    virtual int64_t width() const = 0;  // of queries, keys and values
    virtual bool is_bfloat16() const = 0;
    virtual const rows::Level& level() const = 0;
    virtual void place(rows::HeadRows call, int64_t first, int64_t last) const = 0;
};

// Inputs and results of a product, both float32 or both bfloat16.
struct ProductCall {
    const char* x;
    int64_t x_row_bytes;
    char* rounded;  // [rounded_bytes], at a multiple of 64
    char* out;
    int64_t out_row_bytes;
    int64_t num_rows;
    bool is_bfloat16;
    products::Addends addends{};  // float32
};

// What a part of a product fills of its results.
struct FilledPart {
    int64_t first_row, num_rows;
    int64_t first_column, num_columns;  // rows::kChunkColumns at most
};

// A product with a packed weight: all rows are rounded, then all parts multiplied, each once, by any thread.
class Product {
   public:
    virtual ~Product() = default;
    virtual int64_t in_width() const = 0;
    virtual int64_t out_width() const = 0;
    virtual bool takes(bool is_bfloat16) const = 0;  // inputs of this kind
    virtual size_t rounded_bytes(int64_t num_rows) const = 0;
    virtual void round(const ProductCall& call, int64_t first, int64_t last) const = 0;  // these rows
    virtual int64_t num_parts(int64_t num_rows) const = 0;
    virtual FilledPart filled_by(int64_t part, int64_t num_rows) const = 0;
    virtual void multiply(const ProductCall& call, int64_t part) const = 0;
};

// What adapters add to the results of one product.
struct LowRankCall {
    int site;       // of the product
    const char* x;  // its inputs
    int64_t x_row_bytes;
    bool is_bfloat16;
    float* shrunk;   // [shrunk_floats]
    float* addends;  // [num_rows, stride], to be written
    int64_t stride;
};

// The rows of a step that have an adapter: A x of all of them, then B of that. The parts of each by any thread, once.
class LowRank {
   public:
    virtual ~LowRank() = default;
    virtual int64_t num_rows() const = 0;
    virtual int64_t last_place() const = 0;  // of these rows in the step
    virtual int64_t num_sites() const = 0;
    virtual bool fits(int site, int64_t in_width, int64_t stride) const = 0;
    virtual int64_t shrunk_floats() const = 0;  // of any product, at most
    // By one thread, before the parts.
    virtual void begin(const LowRankCall& call) = 0;
    virtual int64_t num_shrinks() const = 0;
    virtual void shrink(int64_t part) = 0;
    virtual int64_t num_expands() const = 0;
    virtual void expand(int64_t part) = 0;
};

// Attention of the decoding sequences of one step, a layer at a time.
class Attention {
   public:
    virtual ~Attention() = default;
    virtual int64_t num_rows() const = 0;
    virtual int64_t num_layers() const = 0;
    virtual int64_t query_width() const = 0;
    virtual bool is_bfloat16() const = 0;
    // By one thread, before any attends. Addresses of [rows, num_heads, head_dim], rows `..._stride` elements apart.
    virtual void begin(int layer, bool is_windowed, uintptr_t queries, int64_t query_stride, uintptr_t out,
                       int64_t out_stride) = 0;
    // Each by any thread, once; merges when all pieces are done.
    virtual int64_t num_pieces() const = 0;
    virtual void attend(int64_t piece) = 0;
    virtual int64_t num_merges() const = 0;
    virtual void merge(int64_t index) = 0;
};

}  // namespace decode_pass
