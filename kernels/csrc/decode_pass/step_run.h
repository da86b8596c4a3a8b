// The stages of one step, and how threads go through them.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "layers.h"
#include "parts.h"
#include "stage_parts.h"

namespace decode_pass {

// Up to so many rows are one part of a stage: they take less than waking another thread's attention.
constexpr int64_t kRowsTogether = 2;
// A thread that waits for a stage looks so often, some ten microseconds, before it offers its core to others.
constexpr int kSpins = 1000;

// Seconds of attention, of the layers' products and of the head's, from the beginning of their stages to the end.
struct Times {
    using Clock = std::chrono::steady_clock;

    double attention_s = 0.0, products_s = 0.0, head_s = 0.0;
    Clock::time_point since = Clock::now();

    // Add the time since the last call to `seconds`, if given.
    void lap(double* seconds) {
        const Clock::time_point now = Clock::now();
        if (seconds) *seconds += std::chrono::duration<double>(now - since).count();
        since = now;
    }
};

// The stages of one step, for all threads of a region at a time. Between two regions it stands still: what it has
// computed so far is in its own buffers.
class StepRun {
   public:
    // Runs the head alone where the step has no attention. The head's product is cut into `num_slices` stages.
    StepRun(const Model& model, const Step& step, int num_threads, int64_t num_slices)
        : model_(model),
          step_(step),
          num_row_parts_(step.num_rows <= kRowsTogether ? 1 : std::min<int64_t>(step.num_rows, num_threads)),
          num_slices_(num_slices),
          head_(int64_t(model.layers.size()) * kStages),
          end_(head_ + (step.logits || step.highest ? kHead + num_slices : 0)),
          parts_(num_threads),
          stage_(step.parts.empty() ? head_ : 0) {}

    bool has_more() const { return stage_.load(std::memory_order_relaxed) < end_; }

    // Before a region: its threads come to the end of the next `num_layers` layers, and of the next slice of the head,
    // with the norm before the first. A head of one slice goes with the last layers. 0: to the end of all.
    void begin(int64_t num_layers) {
        const int64_t stage = stage_.load(std::memory_order_relaxed);
        until_ = stage < head_ ? std::min(stage + num_layers * kStages, head_) : std::max(stage, head_ + kHead) + 1;
        if (!num_layers || (until_ == head_ && num_slices_ == 1)) until_ = end_;
        times_.lap(nullptr);
        enter(stage, 0);
    }

    // By every thread.
    void work(int thread) {
        for (int64_t stage = stage_.load(std::memory_order_acquire); stage < until_;) {
            int64_t num_done = 0;
            for (int64_t part = parts_.take(stage, thread); part >= 0; part = parts_.take(stage, thread)) {
                compute(stage, part, thread);
                ++num_done;
            }
            if (num_done && completes(num_done)) go_on(stage, thread);
            stage = next_of(stage);
        }
    }

    const Times& times() const { return times_; }

   private:
    // Of a layer, in order.
    enum Stage {
        kNormQkv, kShrinkQkv, kExpandQkv, kQkv, kPlace, kAttend, kMerge,
        kRoundAttended, kShrinkOutput, kExpandOutput, kOutput, kShareOutput, kSumOutput, kPostAttention,
        kNormMlp, kShrinkGateUp, kExpandGateUp, kGateUp,
        kRoundInner, kShrinkDown, kExpandDown, kDown, kShareDown, kSumDown, kPostMlp, kStages
    };

    // Behind the last layer; as many of the last as the head has slices.
    enum HeadStage { kFinalNorm, kHead };

    // Count parts of the current stage, which does not end before; true: they were the last.
    bool completes(int64_t num_done) {
        const int64_t num_parts = num_parts_;
        return num_done_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == num_parts;
    }

    // By the thread that completed the stage, alone.
    void go_on(int64_t stage, int thread) {
        leave(stage);
        enter(stage + 1, thread);
    }

    // Do stages of a single part, from this one on, up to one that is handed out.
    void enter(int64_t stage, int thread) {
        for (; stage < until_; ++stage) {
            num_parts_ = num_parts(stage);
            if (num_parts_ > 1) break;
            if (num_parts_) compute(stage, 0, thread);
            leave(stage);
        }
        num_done_.store(0, std::memory_order_relaxed);
        if (stage < until_) parts_.restart(stage, num_parts_);
        stage_.store(stage, std::memory_order_release);
    }

    void leave(int64_t stage) {
        times_.lap(seconds_of(stage));
        if (is_sum(stage)) model_.exchange->advance();
    }

    // Wait until the stage is another one.
    int64_t next_of(int64_t stage) const {
        for (int spins = 0;; ++spins) {
            const int64_t current = stage_.load(std::memory_order_acquire);
            if (current != stage) return current;
            if (spins < kSpins)
                pause();
            else
                sched_yield();
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    // Whether the ranks' parts of a product are added up in this stage.
    bool is_sum(int64_t stage) const {
        if (!model_.exchange || stage >= head_) return false;
        return stage % kStages == kSumOutput || stage % kStages == kSumDown;
    }

    const Layer& layer_of(int64_t stage) const { return model_.layers[stage / kStages]; }

    double* seconds_of(int64_t stage) {
        if (stage >= head_) return stage == head_ + kFinalNorm ? nullptr : &times_.head_s;
        if (is_of_adapters(stage)) return &times_.products_s;
        switch (stage % kStages) {
            case kQkv:
            case kOutput:
            case kGateUp:
            case kDown: return &times_.products_s;
            case kAttend:
            case kMerge: return &times_.attention_s;
            default: return nullptr;
        }
    }

    int64_t num_parts(int64_t stage) const {
        if (stage == head_ + kFinalNorm) return num_row_parts_;
        if (stage > head_) return first_of_slice(stage + 1) - first_of_slice(stage);
        if (is_of_adapters(stage)) return num_parts_of_adapters(stage);
        const Layer& layer = layer_of(stage);
        switch (stage % kStages) {
            case kQkv: return layer.qkv.num_parts(step_.num_rows);
            case kOutput: return layer.output.num_parts(step_.num_rows);
            case kGateUp: return layer.gate_up.num_parts(step_.num_rows);
            case kDown: return layer.down.num_parts(step_.num_rows);
            case kAttend: begin_attention(stage / kStages); return attention_of(stage).num_pieces();
            case kMerge: return attention_of(stage).num_merges();
            case kShareOutput:
            case kShareDown: return model_.exchange ? 1 : 0;
            case kSumOutput:
            case kSumDown: return model_.exchange ? num_row_parts_ : 0;
            case kPostAttention: return layer.attention_post_norm ? num_row_parts_ : 0;
            case kPostMlp: return layer.mlp_post_norm ? num_row_parts_ : 0;
            default: return num_row_parts_;
        }
    }

    void compute(int64_t stage, int64_t part, int thread) const {
        const Buffers& rows = step_.buffers;
        if (stage == head_ + kFinalNorm) return normalise(*model_.head_norm, step_.pending, model_.head, part);
        if (stage > head_ && step_.highest) return note_highest(first_of_slice(stage) + part, thread);
        if (stage > head_)
            return multiply(model_.head, rows.normed, step_.logits, first_of_slice(stage) + part, {});
        if (is_of_adapters(stage)) return compute_of_adapters(stage, part);
        const Layer& layer = layer_of(stage);
        switch (stage % kStages) {
            case kNormQkv: return normalise(*layer.attention_norm, stage ? step_.pending : nullptr, layer.qkv, part);
            case kQkv: return multiply(layer.qkv, rows.normed, rows.fused, part, addends_at(stage));
            case kPlace: return place(stage / kStages, part);
            case kAttend: return attention_of(stage).attend(part);
            case kMerge: return attention_of(stage).merge(part);
            case kRoundAttended: return round(layer.output, rows.attended, part);
            case kOutput: return multiply(layer.output, rows.attended, shared(rows.added), part, addends_at(stage));
            case kShareOutput:
            case kShareDown: model_.exchange->share(); return;
            case kSumOutput: return sum(rows.added, part);
            case kSumDown: return sum(step_.pending, part);
            case kPostAttention: return normalise_in_place(*layer.attention_post_norm, rows.added, part);
            case kNormMlp: return normalise(*layer.mlp_norm, rows.added, layer.gate_up, part);
            case kGateUp: return multiply(layer.gate_up, rows.normed, rows.inner, part, addends_at(stage));
            case kRoundInner: return round(layer.down, rows.inner, part);
            case kDown: return multiply(layer.down, rows.inner, shared(step_.pending), part, addends_at(stage));
            case kPostMlp: return normalise_in_place(*layer.mlp_post_norm, step_.pending, part);
        }
    }

    // The first part of the head's product in a stage, or behind the last of all.
    int64_t first_of_slice(int64_t stage) const {
        return model_.head.num_parts(step_.num_rows) * (stage - head_ - kHead) / num_slices_;
    }

    int64_t first_row(int64_t part) const { return step_.num_rows * part / num_row_parts_; }

    // normed = norm(residual += added), if anything is added; rounded for the product.
    void normalise(const RowNorm& norm, const char* added, const JoinedProduct& product, int64_t part) const {
        const int64_t row_bytes = model_.hidden_size * model_.element_bytes;
        const rows::NormRows call{added ? added : step_.residual, row_bytes,           added ? step_.residual : nullptr,
                                  row_bytes,                      step_.buffers.normed, input_bytes(model_.hidden_size)};
        norm.normalise(call, first_row(part), first_row(part + 1));
        round(product, step_.buffers.normed, part);
    }

    // Where a product goes whose parts the ranks add up, in place of `out`.
    char* shared(char* out) const { return model_.exchange ? model_.exchange->own() : out; }

    // After a broken exchange too: the caller asks it once the step has ended.
    void sum(char* out, int64_t part) const {
        const int64_t width = model_.hidden_size;
        model_.exchange->sum(out, model_.element_bytes == 2, first_row(part) * width, first_row(part + 1) * width);
    }

    void normalise_in_place(const RowNorm& norm, char* rows, int64_t part) const {
        const int64_t row_bytes = model_.hidden_size * model_.element_bytes;
        norm.normalise({rows, row_bytes, nullptr, 0, rows, row_bytes}, first_row(part), first_row(part + 1));
    }

    void round(const JoinedProduct& product, const char* x, int64_t part) const {
        on_calls(product, x, nullptr, [&](const Product& own, const ProductCall& call) {
            own.round(call, first_row(part), first_row(part + 1));
            return true;
        });
    }

    void multiply(const JoinedProduct& product, const char* x, char* out, int64_t part,
                  products::Addends addends) const {
        on_calls(product, x, out, [&](const Product& own, ProductCall call) {
            const int64_t count = own.num_parts(step_.num_rows);
            call.addends = addends;
            if (part < count) own.multiply(call, part);
            if (addends.of_row) addends.values += own.out_width();
            return (part -= count) >= 0;
        });
    }

    // The product of a layer that a stage belongs to: one that multiplies, or what adapters do before it.
    static int product_of(int64_t stage) {
        switch (stage % kStages) {
            case kShrinkQkv: case kExpandQkv: case kQkv: return 0;
            case kShrinkOutput: case kExpandOutput: case kOutput: return 1;
            case kShrinkGateUp: case kExpandGateUp: case kGateUp: return 2;
            default: return 3;
        }
    }

    static bool is_shrink(int64_t stage) {
        const int64_t own = stage % kStages;
        return own == kShrinkQkv || own == kShrinkOutput || own == kShrinkGateUp || own == kShrinkDown;
    }

    bool is_of_adapters(int64_t stage) const {
        return stage < head_ && (is_shrink(stage) || (stage % kStages && is_shrink(stage - 1)));
    }

    // Which of the step's groups add to the product of this stage; -1: none.
    int groups_at(int64_t stage) const {
        return step_.adapters ? step_.adapters->at_site[site_of(stage)] : -1;
    }

    static int site_of(int64_t stage) { return int(stage / kStages) * kProducts + product_of(stage); }

    int64_t num_parts_of_adapters(int64_t stage) const {
        const int index = groups_at(stage);
        if (index < 0) return 0;
        LowRank& groups = *step_.adapters->groups[index];
        if (!is_shrink(stage)) return groups.num_expands();
        const Buffers& rows = step_.buffers;
        const char* inputs[kProducts] = {rows.normed, rows.attended, rows.normed, rows.inner};
        const int product = product_of(stage);
        groups.begin({site_of(stage), inputs[product], input_bytes(layer_of(stage).product(product).in_width()),
                      model_.placement.is_bfloat16(), rows.shrunk, rows.addends, step_.adapters->widths[product]});
        return groups.num_shrinks();
    }

    void compute_of_adapters(int64_t stage, int64_t part) const {
        LowRank& groups = *step_.adapters->groups[groups_at(stage)];
        return is_shrink(stage) ? groups.shrink(part) : groups.expand(part);
    }

    products::Addends addends_at(int64_t stage) const {
        const int index = groups_at(stage);
        if (index < 0) return {};
        const int64_t width = step_.adapters->widths[product_of(stage)];
        return {step_.buffers.addends, width, width / 2, step_.adapters->of_rows[index]};
    }

    // A part of the logits, which stay in the caches until their highest is noted.
    void note_highest(int64_t part, int thread) const {
        static thread_local std::vector<char> chunk;
        const int64_t row_bytes = rows::kChunkColumns * model_.element_bytes;
        int64_t first_column = 0;
        on_calls(model_.head, step_.buffers.normed, nullptr, [&](const Product& own, ProductCall call) {
            const int64_t count = own.num_parts(step_.num_rows);
            if (part < count) {
                const FilledPart at = own.filled_by(part, step_.num_rows);
                if (int64_t(chunk.size()) < at.num_rows * row_bytes) chunk.resize(at.num_rows * row_bytes);
                // The product counts rows and columns from the first of all.
                const int64_t offset = at.first_row * row_bytes + at.first_column * model_.element_bytes;
                call.out = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(chunk.data()) - offset);
                call.out_row_bytes = row_bytes;
                own.multiply(call, part);
                step_.highest->note(thread, chunk.data(), row_bytes, at.first_row, at.num_rows,
                                    first_column + at.first_column, at.num_columns);
            }
            first_column += own.out_width();
            return (part -= count) >= 0;
        });
    }

    // work(product, call) for each of the joined ones, until it returns false.
    template <typename Work>
    void on_calls(const JoinedProduct& product, const char* x, char* out, const Work& work) const {
        const int64_t size = model_.element_bytes;
        const int64_t out_bytes = product.out_width() * size;
        ProductCall call{x,   input_bytes(product.in_width()),  step_.buffers.rounded,           out,
                         out == step_.buffers.inner ? input_bytes(product.out_width()) : out_bytes,
                         step_.num_rows, model_.placement.is_bfloat16()};
        for (const Product* own : product.parts) {
            if (!work(*own, call)) return;
            call.rounded += aligned(own->rounded_bytes(step_.num_rows));
            if (out) call.out += own->out_width() * size;
        }
    }

    // Each query and key head by itself, in place.
    void normalise_heads(const std::vector<const RowNorm*>& norms, int64_t row) const {
        const int64_t head_dim = model_.placement.head_dim(), head_bytes = head_dim * model_.element_bytes;
        const int64_t num_heads = model_.placement.query_width() / head_dim;
        const int64_t kv_heads = (model_.placement.width() / head_dim - num_heads) / 2;
        char* heads = step_.buffers.fused + row * model_.placement.width() * model_.element_bytes;
        char* keys = heads + num_heads * head_bytes;
        norms[0]->normalise({heads, head_bytes, nullptr, 0, heads, head_bytes}, 0, num_heads);
        norms[1]->normalise({keys, head_bytes, nullptr, 0, keys, head_bytes}, 0, kv_heads);
    }

    void place(int64_t layer, int64_t part) const {
        const std::vector<const RowNorm*>& norms = model_.layers[layer].head_norms;
        for (int64_t row = first_row(part); !norms.empty() && row < first_row(part + 1); ++row)
            normalise_heads(norms, row);
        const CacheSlots& cache = step_.cache;
        const int rope = model_.layers[layer].rope;
        rows::HeadRows call{};
        call.heads = step_.buffers.fused;
        call.row_bytes = model_.placement.width() * model_.element_bytes;
        if (rope >= 0) {
            call.cos = step_.angles[rope].cos;
            call.sin = step_.angles[rope].sin;
            call.half = step_.angles[rope].half;
        }
        call.slots = part_of(layer).slots;
        call.keys = cache.keys + place_in_part(layer) * cache.layer_bytes;
        call.values = cache.values + place_in_part(layer) * cache.layer_bytes;
        call.is_int8 = cache.is_int8;
        model_.placement.place(call, first_row(part), first_row(part + 1));
    }

    void begin_attention(int64_t layer) const {
        part_of(layer).attention->begin(int(place_in_part(layer)), model_.layers[layer].is_windowed,
                                        reinterpret_cast<uintptr_t>(step_.buffers.fused), model_.placement.width(),
                                        reinterpret_cast<uintptr_t>(step_.buffers.attended),
                                        input_bytes(model_.placement.query_width()) / model_.element_bytes);
    }

    // Between rows that a product reads.
    int64_t input_bytes(int64_t width) const {
        return products::apart(width * model_.element_bytes, step_.num_rows);
    }

    Attention& attention_of(int64_t stage) const { return *part_of(stage / kStages).attention; }

    const CachePart& part_of(int64_t layer) const { return step_.parts[step_.places[layer] / layers_in_part()]; }

    int64_t place_in_part(int64_t layer) const { return step_.places[layer] % layers_in_part(); }

    int64_t layers_in_part() const { return step_.parts.front().attention->num_layers(); }

    const Model& model_;
    const Step& step_;
    const int64_t num_row_parts_;
    const int64_t num_slices_;
    const int64_t head_;  // the first stage behind the layers
    const int64_t end_;
    int64_t until_ = 0;  // the first stage that the threads of this region leave
    Times times_;  // written by the thread that goes on, as num_parts_
    int64_t num_parts_ = 0;
    StageParts parts_;
    alignas(64) std::atomic<int64_t> stage_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
};

}  // namespace decode_pass
