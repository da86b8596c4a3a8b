// What a pass through all layers is made of, and what one step reads and writes.
#pragma once

#include <cstdint>
#include <vector>

#include "../rank_exchange/exchange.h"
#include "highest.h"
#include "parts.h"

namespace decode_pass {

constexpr size_t kAlignment = 64;
constexpr int kProducts = 4;  // of a layer

inline size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Products of the same inputs, whose results lie side by side.
struct JoinedProduct {
    std::vector<const Product*> parts;

    int64_t in_width() const { return parts.front()->in_width(); }

    int64_t out_width() const {
        int64_t width = 0;
        for (const Product* part : parts) width += part->out_width();
        return width;
    }

    size_t rounded_bytes(int64_t num_rows) const {
        size_t bytes = 0;
        for (const Product* part : parts) bytes += aligned(part->rounded_bytes(num_rows));
        return bytes;
    }

    int64_t num_parts(int64_t num_rows) const {
        int64_t count = 0;
        for (const Product* part : parts) count += part->num_parts(num_rows);
        return count;
    }
};

struct Layer {
    const RowNorm* attention_norm;
    JoinedProduct qkv;
    JoinedProduct output;
    const RowNorm* attention_post_norm;  // of what a half of the layer adds to the residual; or null
    const RowNorm* mlp_norm;
    JoinedProduct gate_up;
    JoinedProduct down;
    const RowNorm* mlp_post_norm;            // likewise
    std::vector<const RowNorm*> head_norms;  // of each query head and of each key head; or none
    int rope;                                // index of its angles; -1: nothing is rotated
    bool is_windowed;

    const JoinedProduct& product(int index) const {
        const JoinedProduct* products[kProducts] = {&qkv, &output, &gate_up, &down};
        return *products[index];
    }
};

// A decoder from the first layer's norm to the head.
struct Model {
    const Placement& placement;
    int64_t hidden_size;
    int64_t element_bytes;
    std::vector<Layer> layers;
    const RowNorm* head_norm = nullptr;  // null: logits are computed elsewhere
    JoinedProduct head;
    rank_exchange::Exchange* exchange = nullptr;  // with the ranks that have the rest of every layer; null: there are none
};

struct Angles {
    const float *cos, *sin;
    int64_t half;
};

// The slots of layer 0 of a block; those of the next layer lie `layer_bytes` further.
struct CacheSlots {
    char *keys, *values;
    int64_t layer_bytes;
    bool is_int8;
};

// Layers that have as many blocks of their own as a block has layers: where the contexts of the step's rows are.
struct CachePart {
    Attention* attention;
    const int64_t* slots;  // [rows], of new keys and values
};

// Rows between the stages of a layer, and the rounded inputs of a product.
struct Buffers {
    char *normed, *fused, *attended, *added, *inner, *rounded;
    float *shrunk, *addends;  // of adapters
};

// What adapters add to the products of a step, by their sites: product `i` of layer `l` is at l * kProducts + i.
struct StepAdapters {
    std::vector<LowRank*> groups;         // those that add to some site, all of the same rows or of fewer
    std::vector<const int64_t*> of_rows;  // of each: see products::Addends
    std::vector<int> at_site;             // which of `groups`; -1: nothing is added
    std::vector<int64_t> widths;          // of a row of addends, of each product of a layer
};

struct Step {
    char* residual;  // [rows, hidden_size], one run of memory, as are pending and logits
    char* pending;
    char* logits;            // or null
    HighestLogits* highest;  // of logits that are not kept; or null
    int64_t num_rows;
    CacheSlots cache;
    std::vector<Angles> angles;
    std::vector<CachePart> parts;  // none: the head alone
    std::vector<int> places;       // of each layer in the whole cache, all layers of a part after those of the one before
    const StepAdapters* adapters;  // or null
    Buffers buffers;
};

}  // namespace decode_pass
