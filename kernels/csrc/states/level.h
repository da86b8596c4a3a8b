// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL the namespace
//   WIDTH floats per vector
//   HAS_BF16_DOT whether the level has AVX-512 (see vectors.h)
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace states {
namespace LEVEL {
namespace {

#include "../vectors.h"

inline float* head_of(const Memory& memory, int64_t block, int64_t head) {
    return reinterpret_cast<float*>(memory.first + block * memory.block_bytes) + head * memory.head_floats;
}

// The state where the part leaves it, with what was before in it.
inline float* begin_part(const Sequences& all, const Memory& memory, int64_t sequence, int64_t head, int64_t part,
                         const float* before) {
    float* state = head_of(memory, all.targets[part], head);
    const size_t bytes = memory.head_floats * sizeof(float);
    if (!before && all.sources[sequence] >= 0) before = head_of(memory, all.sources[sequence], head);
    if (!before)
        std::memset(state, 0, bytes);
    else if (before != state)
        std::memcpy(state, before, bytes);
    return state;
}

// Columns [0, kVectors * WIDTH) of a state, whose rows are `width` floats.
template <int kVectors>
inline void space_columns(float* state, int64_t width, int64_t rows, const float* x, const float* b, const float* c,
                          float dt, float decay, float skip, float* out) {
    Floats sums[kVectors], steps[kVectors], own[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        own[v] = load(x + v * WIDTH);
        steps[v] = own[v] * dt;
        sums[v] = Floats{};
    }
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < kVectors; ++v) {
            float* at = state + n * width + v * WIDTH;
            const Floats next = load(at) * decay + steps[v] * b[n];
            store(at, next);
            sums[v] += next * c[n];
        }
    for (int v = 0; v < kVectors; ++v) store(out + v * WIDTH, sums[v] + own[v] * skip);
}

void scan_space(const SpaceScan& scan, const Sequences& all, const Memory& memory, int64_t sequence, int64_t head) {
    const int64_t width = scan.head_dim, group = head / (scan.heads / scan.groups);
    const float* state_before = nullptr;
    int64_t token = all.firsts[sequence];
    for (int64_t part = all.first_parts[sequence]; part < all.first_parts[sequence + 1]; ++part) {
        float* state = begin_part(all, memory, sequence, head, part, state_before);
        for (; token <= all.ends[part]; ++token) {
            const int64_t at = token * scan.heads + head;
            const float* x = scan.x + token * scan.stride + head * width;
            const float* b = scan.b + token * scan.stride + group * scan.state_size;
            const float* c = scan.c + token * scan.stride + group * scan.state_size;
            float* out = scan.out + at * width;
            const float dt = scan.dt[at], decay = scan.decay[at], skip = scan.skip[head];
            int64_t i = 0;
            for (; i + 4 * WIDTH <= width; i += 4 * WIDTH)
                space_columns<4>(state + i, width, scan.state_size, x + i, b, c, dt, decay, skip, out + i);
            for (; i < width; i += WIDTH)
                space_columns<1>(state + i, width, scan.state_size, x + i, b, c, dt, decay, skip, out + i);
        }
        state_before = state;
    }
}

// x / |x| * scale -> out.
inline void make_unit(const float* x, int64_t width, float scale, float* out) {
    Floats squares{};
    for (int64_t i = 0; i < width; i += WIDTH) {
        const Floats own = load(x + i);
        squares += own * own;
    }
    const float factor = scale / __builtin_sqrtf(total(squares) + 1e-6f);
    for (int64_t i = 0; i < width; i += WIDTH) store(out + i, load(x + i) * factor);
}

template <int kVectors>
inline void delta_columns(float* state, int64_t width, int64_t rows, const float* q, const float* k, const float* v,
                          float beta, float decay, float* out) {
    Floats known[kVectors], change[kVectors], sums[kVectors];
    for (int i = 0; i < kVectors; ++i) known[i] = sums[i] = Floats{};
    for (int64_t n = 0; n < rows; ++n)
        for (int i = 0; i < kVectors; ++i) known[i] += load(state + n * width + i * WIDTH) * k[n];
    for (int i = 0; i < kVectors; ++i) change[i] = (load(v + i * WIDTH) - known[i] * decay) * beta;
    for (int64_t n = 0; n < rows; ++n)
        for (int i = 0; i < kVectors; ++i) {
            float* at = state + n * width + i * WIDTH;
            const Floats next = load(at) * decay + change[i] * k[n];
            store(at, next);
            sums[i] += next * q[n];
        }
    for (int i = 0; i < kVectors; ++i) store(out + i * WIDTH, sums[i]);
}

void scan_delta(const DeltaScan& scan, const Sequences& all, const Memory& memory, int64_t sequence, int64_t head) {
    const int64_t width = scan.value_dim, key_head = head / (scan.heads / scan.key_heads);
    const float scale = 1.0f / __builtin_sqrtf(float(scan.key_dim));
    alignas(64) float q[kMostKeys], k[kMostKeys];
    const float* state_before = nullptr;
    int64_t token = all.firsts[sequence];
    for (int64_t part = all.first_parts[sequence]; part < all.first_parts[sequence + 1]; ++part) {
        float* state = begin_part(all, memory, sequence, head, part, state_before);
        for (; token <= all.ends[part]; ++token) {
            const int64_t at = token * scan.heads + head, keys_at = token * scan.stride + key_head * scan.key_dim;
            make_unit(scan.q + keys_at, scan.key_dim, scale, q);
            make_unit(scan.k + keys_at, scan.key_dim, 1.0f, k);
            const float* v = scan.v + token * scan.stride + head * width;
            float* out = scan.out + at * width;
            const float beta = scan.beta[at], decay = scan.decay[at];
            int64_t i = 0;
            for (; i + 4 * WIDTH <= width; i += 4 * WIDTH)
                delta_columns<4>(state + i, width, scan.key_dim, q, k, v + i, beta, decay, out + i);
            for (; i < width; i += WIDTH)
                delta_columns<1>(state + i, width, scan.key_dim, q, k, v + i, beta, decay, out + i);
        }
        state_before = state;
    }
}

void silu(float* x, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += WIDTH) {
        const size_t bytes = (last - i >= WIDTH ? WIDTH : last - i) * sizeof(float);
        Floats own{};
        std::memcpy(&own, x + i, bytes);
        own *= sigmoid(own);
        std::memcpy(x + i, &own, bytes);
    }
}

}  // namespace
}  // namespace LEVEL
}  // namespace states
