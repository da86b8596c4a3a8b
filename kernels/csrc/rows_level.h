// The kernels of one level. Included by one source file per level, which sets the target and defines
//   LEVEL the namespace
//   WIDTH floats per vector
//   HAS_BF16_DOT whether the level rounds to bfloat16 in one instruction (AVX-512)
// after all headers: what a header defines must not be compiled for this level's instructions.

namespace rows {
namespace LEVEL {
namespace {

#include "vectors.h"
#include "elements.h"

// The row that is normalised, as floats in `row`, with the residual added and kept; its sum, or its sum of squares.
template <typename Type>
inline float gather(const Norm& norm, const char* x, char* residual, float* row) {
    Floats sums{};
    for (int64_t i = 0; i < norm.width; i += WIDTH) {
        const int64_t valid = norm.width - i;
        Floats values = Type::widened(get<Type>(x + i * Type::kBytes, valid));
        if (residual) {
            char* own = residual + i * Type::kBytes;
            const typename Type::Stored sum = Type::narrowed(values + Type::widened(get<Type>(own, valid)));
            put<Type>(own, sum, valid);
            values = Type::widened(sum);
        }
        store(row + i, values);
        sums += norm.is_rms ? values * values : values;
    }
    return total(sums);
}

inline float centred_squares(const Norm& norm, float* row, float mean) {
    const int64_t padded = (norm.width + WIDTH - 1) / WIDTH * WIDTH;
    for (int64_t i = norm.width; i < padded; ++i) row[i] = mean;
    Floats sums{};
    for (int64_t i = 0; i < norm.width; i += WIDTH) {
        const Floats centred = load(row + i) - mean;
        store(row + i, centred);
        sums += centred * centred;
    }
    return total(sums);
}

template <typename Type>
void normalise_typed(const Norm& norm, const NormRows& call, float* scratch, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
        char* residual = call.residual ? call.residual + index * call.residual_row_bytes : nullptr;
        float squares = gather<Type>(norm, call.x + index * call.x_row_bytes, residual, scratch);
        if (!norm.is_rms) squares = centred_squares(norm, scratch, squares / float(norm.width));
        const float scale = 1.0f / __builtin_sqrtf(squares / float(norm.width) + norm.eps);
        char* out = call.out + index * call.out_row_bytes;
        for (int64_t i = 0; i < norm.width; i += WIDTH) {
            const int64_t valid = norm.width - i, at = i * Type::kBytes;
            Floats y = load(scratch + i) * scale * get<Float32>((const char*)(norm.weight + i), valid);
            if (norm.bias) y += get<Float32>((const char*)(norm.bias + i), valid);
            put<Type>(out + at, Type::narrowed(y), valid);
        }
    }
}

template <typename Type, Gate kGate>
void gate_typed(const GateRows& call, int64_t first, int64_t last) {
    const int64_t half_bytes = call.width * Type::kBytes;
    for (int64_t index = first; index < last; ++index) {
        const char* gates = call.gates_and_ups + index * 2 * half_bytes;
        char* out = call.out + index * half_bytes;
        for (int64_t i = 0; i < call.width; i += WIDTH) {
            const int64_t valid = call.width - i, at = i * Type::kBytes;
            const Floats gate = Type::widened(get<Type>(gates + at, valid));
            const Floats up = Type::widened(get<Type>(gates + half_bytes + at, valid));
            // gelu_tanh: (1 + tanh(z)) / 2 is the sigmoid of 2 z.
            const Floats inner =
                kGate == Gate::silu ? gate : (gate + gate * gate * gate * 0.044715f) * 1.5957691216f;
            put<Type>(out + at, Type::narrowed(gate * sigmoid(inner) * up), valid);
        }
    }
}

template <typename Type>
inline void rotate(char* head, const float* cos, const float* sin, int64_t half) {
    char* other = head + half * Type::kBytes;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const int64_t valid = half - i, at = i * Type::kBytes;
        const Floats x = Type::widened(get<Type>(head + at, valid)), y = Type::widened(get<Type>(other + at, valid));
        const Floats c = get<Float32>((const char*)(cos + i), valid), s = get<Float32>((const char*)(sin + i), valid);
        put<Type>(head + at, Type::narrowed(x * c - y * s), valid);
        put<Type>(other + at, Type::narrowed(y * c + x * s), valid);
    }
}

typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

// One head -> int8 elements at `to`, and the scale that they are to be multiplied with: the largest magnitude / 127.
template <typename Type>
inline float round_to_bytes(const char* head, int64_t head_dim, char* to) {
    Floats largest{}, remainders{};  // remainders: NaN where an element is not finite, else 0
    for (int64_t i = 0; i < head_dim; i += WIDTH) {
        const Floats x = Type::widened(get<Type>(head + i * Type::kBytes, head_dim - i));
        largest = larger(largest, larger(x, -x));
        remainders += x - x;
    }
    const float most = highest(largest);
    const bool is_zero = !(most > 1e-30f);
    const float inverse = is_zero ? 0.0f : 127.0f / most;
    const Floats magic = same(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
    for (int64_t i = 0; i < head_dim; i += WIDTH) {
        const Floats x = Type::widened(get<Type>(head + i * Type::kBytes, head_dim - i));
        const Bytes bytes = __builtin_convertvector((Ints)(x * inverse + magic) - (Ints)magic, Bytes);
        std::memcpy(to + i, &bytes, head_dim - i >= WIDTH ? WIDTH : head_dim - i);
    }
    return (is_zero ? 0.0f : most / 127.0f) + total(remainders);
}

// The heads of one row, `kv_heads` of them, -> one slot.
template <typename Type>
inline void round_slot(const HeadRows& call, const char* heads, char* slot) {
    char* scales = slot + call.kv_heads * call.head_dim;
    for (int64_t h = 0; h < call.kv_heads; ++h) {
        const float scale =
            round_to_bytes<Type>(heads + h * call.head_dim * Type::kBytes, call.head_dim, slot + h * call.head_dim);
        std::memcpy(scales + h * sizeof scale, &scale, sizeof scale);
    }
}

template <typename Type>
void place_typed(const HeadRows& call, int64_t first, int64_t last) {
    const int64_t head_bytes = call.head_dim * Type::kBytes, kv_bytes = call.kv_heads * head_bytes;
    for (int64_t index = first; index < last; ++index) {
        char* row = call.heads + index * call.row_bytes;
        if (call.cos)
            for (int64_t h = 0; h < call.num_heads + call.kv_heads; ++h)
                rotate<Type>(row + h * head_bytes, call.cos + index * call.half, call.sin + index * call.half,
                             call.half);
        const char* keys = row + call.num_heads * head_bytes;
        if (call.is_int8) {
            const int64_t slot_bytes = call.kv_heads * (call.head_dim + int64_t(sizeof(float)));
            round_slot<Type>(call, keys, call.keys + call.slots[index] * slot_bytes);
            if (call.values) round_slot<Type>(call, keys + kv_bytes, call.values + call.slots[index] * slot_bytes);
            continue;
        }
        std::memcpy(call.keys + call.slots[index] * kv_bytes, keys, kv_bytes);
        if (call.values) std::memcpy(call.values + call.slots[index] * kv_bytes, keys + kv_bytes, kv_bytes);
    }
}

inline int first_true(Ints is_true) {
    int found = 0;
    while (!is_true[found]) ++found;
    return found;
}

inline bool any(Ints is_true) {
#if HAS_BF16_DOT
    return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true) != 0;
#else
    int32_t joined = 0;
    for (int i = 0; i < WIDTH; ++i) joined |= is_true[i];
    return joined != 0;
#endif
}

constexpr float kLowest = -__builtin_inff();

// The highest of the row; NaN where it holds one. Past its end, as -inf.
template <typename Type>
inline Floats some(const char* x, int64_t i, int64_t width) {
    Floats values = Type::widened(get<Type>(x + i * Type::kBytes, width - i));
    for (int64_t past = width - i; past < WIDTH; ++past) values[past] = kLowest;
    return values;
}

template <typename Type>
inline float highest_of(const char* x, int64_t width) {
    Floats high[4] = {same(kLowest), same(kLowest), same(kLowest), same(kLowest)};
    Ints is_number = Ints{} - 1;
    int64_t i = 0;
    for (; i + 4 * WIDTH <= width; i += 4 * WIDTH)
        for (int v = 0; v < 4; ++v) {
            const Floats values = Type::widened(get<Type>(x + (i + v * WIDTH) * Type::kBytes, WIDTH));
            high[v] = larger(values, high[v]);
            is_number &= values == values;
        }
    for (; i < width; i += WIDTH) {
        const Floats values = some<Type>(x, i, width);
        high[0] = larger(values, high[0]);
        is_number &= values == values;
    }
    if (any(~is_number)) return __builtin_nanf("");
    return highest(larger(larger(high[0], high[1]), larger(high[2], high[3])));
}

template <typename Type>
void highest_typed(const HighestRows& call, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
        const char* x = call.x + index * call.row_bytes;
        const float most = highest_of<Type>(x, call.width);
        call.values[index] = most;
        call.indices[index] = 0;
        if (most != most) continue;
        for (int64_t i = 0; i < call.width; i += WIDTH) {
            const Ints is_found = some<Type>(x, i, call.width) == most;
            if (!any(is_found)) continue;
            call.indices[index] = i + first_true(is_found);
            break;
        }
    }
}

template <typename Type>
void note_highest_typed(const HighestChunk& chunk) {
    const Ints column = Ints{} + chunk.first_column;
    for (int64_t row = 0; row < chunk.num_rows; ++row) {
        const char* x = chunk.x + row * chunk.row_bytes;
        for (int64_t i = 0; i < chunk.count; i += WIDTH) {
            const Floats values = chunk.count - i >= WIDTH ? Type::widened(get<Type>(x + i * Type::kBytes, WIDTH))
                                                           : some<Type>(x, i, chunk.count);
            float* best = chunk.values + row * kChunkColumns + i;
            int32_t* best_column = chunk.columns + row * kChunkColumns + i;
            const Floats old = load(best);
            Ints old_column;
            std::memcpy(&old_column, best_column, sizeof old_column);
            const Ints is_taken = (values > old) | (values != values) | ((values == old) & (column < old_column));
            store(best, is_taken ? values : old);
            const Ints chosen = is_taken ? column : old_column;
            std::memcpy(best_column, &chosen, sizeof chosen);
        }
    }
}

void normalise(const Norm& norm, const NormRows& call, float* scratch, int64_t first, int64_t last) {
    norm.is_bfloat16 ? normalise_typed<BFloat16>(norm, call, scratch, first, last)
                     : normalise_typed<Float32>(norm, call, scratch, first, last);
}

void gate(const GateRows& call, int64_t first, int64_t last) {
    if (call.gate == Gate::silu)
        call.is_bfloat16 ? gate_typed<BFloat16, Gate::silu>(call, first, last)
                         : gate_typed<Float32, Gate::silu>(call, first, last);
    else
        call.is_bfloat16 ? gate_typed<BFloat16, Gate::gelu_tanh>(call, first, last)
                         : gate_typed<Float32, Gate::gelu_tanh>(call, first, last);
}

void place(const HeadRows& call, int64_t first, int64_t last) {
    call.is_bfloat16 ? place_typed<BFloat16>(call, first, last) : place_typed<Float32>(call, first, last);
}

void note_highest(const HighestChunk& chunk) {
    chunk.is_bfloat16 ? note_highest_typed<BFloat16>(chunk) : note_highest_typed<Float32>(chunk);
}

void highest(const HighestRows& call, int64_t first, int64_t last) {
    call.is_bfloat16 ? highest_typed<BFloat16>(call, first, last) : highest_typed<Float32>(call, first, last);
}

}  // namespace
}  // namespace LEVEL
}  // namespace rows
