// What is done with rows before and behind a recurrence. Included by the file of each level, behind level.h.

namespace states {
namespace LEVEL {
namespace {

#include "../elements.h"

template <typename Type>
inline Floats element(const char* row, int64_t channel) {
    return Type::widened(get<Type>(row + channel * Type::kBytes, WIDTH));
}

template <typename Type>
inline Floats rounded_to(Floats x) {
    return Type::widened(Type::narrowed(x));
}

template <typename Type>
inline void put_element(char* row, int64_t channel, Floats x) {
    put<Type>(row + channel * Type::kBytes, Type::narrowed(x), WIDTH);
}

// Inputs before the first token of a part, of kVectors vectors of channels.
template <int kTaps, int kVectors>
struct Before {
    Floats x[kTaps - 1][kVectors];

    template <typename Type>
    inline void read(const char* tail, int64_t channels, int64_t at) {
        for (int tap = 0; tap < kTaps - 1; ++tap)
            for (int v = 0; v < kVectors; ++v)
                x[tap][v] = tail ? element<Type>(tail, tap * channels + at + v * WIDTH) : Floats{};
    }

    template <typename Type>
    inline void write(char* tail, int64_t channels, int64_t at) const {
        for (int tap = 0; tap < kTaps - 1; ++tap)
            for (int v = 0; v < kVectors; ++v) put_element<Type>(tail, tap * channels + at + v * WIDTH, x[tap][v]);
    }

    inline void push(int v, Floats own) {
#pragma GCC unroll 4
        for (int tap = 0; tap + 1 < kTaps - 1; ++tap) x[tap][v] = x[tap + 1][v];
        x[kTaps - 2][v] = own;
    }
};

template <typename Type, bool kHasGates, int kTaps, int kVectors>
inline void convolve_columns(const Convolution& own, const Sequences& all, int64_t sequence, int64_t at) {
    Floats weights[kTaps][kVectors], bias[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        bias[v] = own.bias ? load(own.bias + at + v * WIDTH) : Floats{};
        for (int tap = 0; tap < kTaps; ++tap) weights[tap][v] = load(own.weight + tap * own.channels + at + v * WIDTH);
    }
    constexpr int64_t kAhead = 8;  // rows lie far apart
    const int64_t out_bytes = own.channels * (kHasGates ? Type::kBytes : 4), source = all.sources[sequence];
    Before<kTaps, kVectors> before;
    before.template read<Type>(source < 0 ? nullptr : own.tails + source * own.tail_bytes, own.channels, at);
    int64_t token = all.firsts[sequence];
    for (int64_t part = all.first_parts[sequence]; part < all.first_parts[sequence + 1]; ++part) {
        for (; token <= all.ends[part]; ++token) {
            const int64_t row = token * own.row_bytes;
            for (int64_t line = 0; line < kVectors * WIDTH * Type::kBytes; line += 64)
                __builtin_prefetch(own.x + row + kAhead * own.row_bytes + at * Type::kBytes + line);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const int64_t channel = at + v * WIDTH;
                Floats x = element<Type>(own.x + row, channel), sum = bias[v];
                if (kHasGates) x = rounded_to<Type>(element<Type>(own.gate + row, channel) * x);
#pragma GCC unroll 4
                for (int tap = 0; tap < kTaps - 1; ++tap) sum += before.x[tap][v] * weights[tap][v];
                sum += x * weights[kTaps - 1][v];
                before.push(v, x);
                char* out = own.out + token * out_bytes;
                if (kHasGates)
                    put_element<Type>(out, channel, element<Type>(own.gate_behind + row, channel) * rounded_to<Type>(sum));
                else
                    store((float*)out + channel, sum * sigmoid(sum));
            }
        }
        before.template write<Type>(own.tails + all.targets[part] * own.tail_bytes, own.channels, at);
    }
}

template <typename Type, bool kHasGates, int kTaps>
void convolve_typed(const Convolution& own, const Sequences& all, int64_t sequence, int64_t first, int64_t last) {
    for (; first + 4 * WIDTH <= last; first += 4 * WIDTH)
        convolve_columns<Type, kHasGates, kTaps, 4>(own, all, sequence, first);
    for (; first < last; first += WIDTH) convolve_columns<Type, kHasGates, kTaps, 1>(own, all, sequence, first);
}

template <typename Type, bool kHasGates>
void convolve_taps(const Convolution& own, const Sequences& all, int64_t sequence, int64_t first, int64_t last) {
    static_assert(kLeastTaps == 2 && kMostTaps == 4, "a form for every number of taps");
    switch (own.taps) {
        case 2: return convolve_typed<Type, kHasGates, 2>(own, all, sequence, first, last);
        case 3: return convolve_typed<Type, kHasGates, 3>(own, all, sequence, first, last);
        default: return convolve_typed<Type, kHasGates, 4>(own, all, sequence, first, last);
    }
}

void convolve(const Convolution& own, const Sequences& all, int64_t sequence, int64_t first, int64_t last) {
    const auto convolve_rows = own.is_bfloat16 ? own.gate ? convolve_taps<BFloat16, true> : convolve_taps<BFloat16, false>
                               : own.gate      ? convolve_taps<Float32, true>
                                               : convolve_taps<Float32, false>;
    convolve_rows(own, all, sequence, first, last);
}

template <typename Type>
void gate_typed(const GatedRows& own, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
        const int64_t row = index / own.groups, group = index % own.groups, start = group * own.width;
        float* x = own.x + index * own.width;
        const char* gates = own.gates + row * own.gate_row_bytes + start * Type::kBytes;
        const float* weight = own.weight ? own.weight + start : nullptr;
        char* out = own.out + index * own.width * Type::kBytes;
        Floats squares{};
        for (int64_t i = 0; i < own.width; i += WIDTH) {
            Floats value = load(x + i);
            if (own.gates_first || !weight) {
                const Floats gate = element<Type>(gates, i);
                value *= gate * sigmoid(gate);
                store(x + i, value);
            }
            squares += value * value;
        }
        const float scale = 1.0f / __builtin_sqrtf(total(squares) / float(own.width) + own.eps);
        for (int64_t i = 0; i < own.width; i += WIDTH) {
            Floats value = load(x + i);
            if (weight) value *= load(weight + i) * scale;
            if (weight && !own.gates_first) {
                const Floats gate = element<Type>(gates, i);
                value *= gate * sigmoid(gate);
            }
            put_element<Type>(out, i, value);
        }
    }
}

void gate(const GatedRows& own, int64_t first, int64_t last) {
    return own.is_bfloat16 ? gate_typed<BFloat16>(own, first, last) : gate_typed<Float32>(own, first, last);
}

}  // namespace
}  // namespace LEVEL
}  // namespace states
