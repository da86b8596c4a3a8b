// What the router's length predictor computes for every request: the code of a prompt, and a step of its regression.
// The interpreter stays locked: a call takes some microseconds, less than giving the lock up and waiting for it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

// One function for each kind of processor, chosen when the module is loaded. The loops are plain, for the compiler.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace length_prediction {
namespace {

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Targets = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// --- the code of a prompt

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15, kSalt = 0x51ED270B;

uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
}

void normalise(const double* values, int64_t count, double square, float* out) {
    const float length = square > 0.0 ? float(std::sqrt(square)) : 1.0f;
    for (int64_t i = 0; i < count; ++i) out[i] = float(values[i]) / length;
}

// `features` has a power of two of places, `key` divides it: see HashedNgrams in router/prediction/encoders.py.
void hash_ngrams(nb::tuple ids, Floats features, Floats key) {
    const uint64_t num_features = features.shape(0), key_len = key.shape(0);
    if (!num_features || (num_features & (num_features - 1)) || !key_len || num_features % key_len)
        throw std::invalid_argument("features are a power of two, and a multiple of the key's length");
    std::vector<int32_t> counts(num_features, 0);
    const auto count = [&](uint64_t hash) { counts[hash & (num_features - 1)] += hash >> 63 ? 1 : -1; };
    uint64_t previous = 0;
    const size_t num_ids = nb::len(ids);
    for (size_t i = 0; i < num_ids; ++i) {
        const uint64_t id = PyLong_AsUnsignedLongLong(nb::handle(ids[i]).ptr());
        if (id == ~uint64_t(0) && PyErr_Occurred()) throw nb::python_error();
        count(mixed(id + kSalt));
        if (i) count(mixed(mixed(previous) * kOdd + id));
        previous = id;
    }
    std::vector<double> roots(num_features), folded(key_len, 0.0);
    double square = 0.0, folded_square = 0.0;
    for (uint64_t i = 0; i < num_features; ++i) {
        const double root = std::sqrt(double(std::abs(counts[i])));
        square += std::abs(counts[i]);
        roots[i] = counts[i] < 0 ? -root : root;
    }
    for (uint64_t i = 0; i < num_features; ++i) folded[i % key_len] += roots[i];
    for (const double value : folded) folded_square += value * value;
    normalise(roots.data(), num_features, square, features.data());
    normalise(folded.data(), key_len, folded_square, key.data());
}

// --- the regression

constexpr int kHidden = 32;
constexpr int kMaxRows = 16;
constexpr int kWidth = 16, kVectors = kHidden / kWidth;
typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4)));  // of whatever registers there are

// Adam's state. Parameters lie one after another: weights [inputs, hidden], their bias, out weights, out bias.
struct Adam {
    float *parameters, *moments, *squares;
    float rate, moment_share, square_share, epsilon;
};

// Steps `count` parameters from `first` on. Inlined into what is compiled for each processor.
__attribute__((always_inline)) inline void step(const Adam& adam, int64_t first, int64_t count,
                                                const float* gradients) {
    float* __restrict parameters = adam.parameters + first;
    float* __restrict moments = adam.moments + first;
    float* __restrict squares = adam.squares + first;
    const float rate = adam.rate, moment_share = adam.moment_share, square_share = adam.square_share;
    const float epsilon = adam.epsilon;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float moment = moments[i] + moment_share * (gradients[i] - moments[i]);
        const float square = squares[i] + square_share * (gradients[i] * gradients[i] - squares[i]);
        moments[i] = moment;
        squares[i] = square;
        parameters[i] -= rate * moment / (std::sqrt(square) + epsilon);
    }
}

FOR_EACH_PROCESSOR
void hidden_of(const float* input, int64_t num_inputs, const float* parameters, float* hidden) {
    const Vector* weights = reinterpret_cast<const Vector*>(parameters);
    const Vector* bias = weights + num_inputs * kVectors;
    Vector sums[kVectors], odd[kVectors] = {};  // of even and odd inputs: an addition takes longer than the next may wait
    for (int k = 0; k < kVectors; ++k) sums[k] = bias[k];
    int64_t i = 0;
    for (; i + 1 < num_inputs; i += 2)
        for (int k = 0; k < kVectors; ++k) {
            sums[k] += input[i] * weights[i * kVectors + k];
            odd[k] += input[i + 1] * weights[(i + 1) * kVectors + k];
        }
    if (i < num_inputs)
        for (int k = 0; k < kVectors; ++k) sums[k] += input[i] * weights[i * kVectors + k];
    for (int k = 0; k < kVectors; ++k) sums[k] += odd[k];
    for (int j = 0; j < kHidden; ++j) hidden[j] = std::max(sums[j / kWidth][j % kWidth], 0.0f);
}

// A step of all weights between inputs and hidden layer; `back` [rows, hidden] is the error of the hidden layer.
FOR_EACH_PROCESSOR
void update_weights(const Adam& adam, const float* const* inputs, int num_rows, int64_t num_inputs,
                    const float (*back)[kHidden]) {
    const Vector* errors = reinterpret_cast<const Vector*>(back);
    for (int64_t i = 0; i < num_inputs; ++i) {
        Vector gradients[kVectors] = {};
        for (int row = 0; row < num_rows; ++row)
            for (int k = 0; k < kVectors; ++k) gradients[k] += inputs[row][i] * errors[row * kVectors + k];
        step(adam, i * kHidden, kHidden, reinterpret_cast<const float*>(gradients));
    }
}

// One step of Adam on the mean squared error of these rows: `LengthMlp._descend` of router/prediction/predictor.py.
void descend(Floats parameters, Floats moments, Floats squares, Rows inputs, Targets targets, Ids rows, float rate,
             float moment_share, float square_share, float epsilon) {
    const int64_t num_inputs = inputs.shape(1), num_rows = rows.shape(0);
    const size_t size = num_inputs * kHidden + 2 * kHidden + 1;
    if (parameters.shape(0) != size || moments.shape(0) != size || squares.shape(0) != size)
        throw std::invalid_argument("parameters of another network");
    if (num_rows < 1 || num_rows > kMaxRows || targets.shape(0) != inputs.shape(0))
        throw std::invalid_argument("too many rows, or other targets than inputs");
    const float* input_of[kMaxRows];
    for (int64_t row = 0; row < num_rows; ++row) {
        if (rows.data()[row] < 0 || rows.data()[row] >= int64_t(inputs.shape(0)))
            throw std::invalid_argument("a row outside the inputs");
        input_of[row] = inputs.data() + rows.data()[row] * num_inputs;
    }
    const Adam adam{parameters.data(), moments.data(), squares.data(), rate, moment_share, square_share, epsilon};
    const float* out_weights = adam.parameters + num_inputs * kHidden + kHidden;
    float back[kMaxRows][kHidden], tail[2 * kHidden + 1] = {};  // gradients of bias, out weights, out bias
    for (int64_t row = 0; row < num_rows; ++row) {
        float hidden[kHidden];
        hidden_of(input_of[row], num_inputs, adam.parameters, hidden);
        float predicted = out_weights[kHidden];
        for (int j = 0; j < kHidden; ++j) predicted += hidden[j] * out_weights[j];
        const float error = (predicted - targets.data()[rows.data()[row]]) * (2.0f / float(num_rows));
        for (int j = 0; j < kHidden; ++j) {
            back[row][j] = hidden[j] > 0.0f ? error * out_weights[j] : 0.0f;
            tail[j] += back[row][j];
            tail[kHidden + j] += hidden[j] * error;
        }
        tail[2 * kHidden] += error;
    }
    update_weights(adam, input_of, int(num_rows), num_inputs, back);
    step(adam, num_inputs * kHidden, 2 * kHidden + 1, tail);
}

}  // namespace

void bind(nb::module_& module) {
    module.def("hash_ngrams", hash_ngrams);
    module.def("descend", descend);
    module.attr("LENGTH_HIDDEN") = kHidden;
    module.attr("LENGTH_ROWS") = kMaxRows;
}

}  // namespace length_prediction
