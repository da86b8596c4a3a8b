// A step of the cost model that a worker corrects after every iteration: alignedserve/costmodel/online.py, where the
// plain form is. This gives the same to the last bit: numpy's and Python's operations, in the same order, none fused.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "buffers.h"

namespace nb = nanobind;

namespace iteration_costs {
namespace {

constexpr int kMaxFeatures = 32;

void read(nb::sequence values, int64_t count, double* out) {
    if (int64_t(nb::len(values)) != count) throw std::invalid_argument("another number of coefficients");
    for (int64_t i = 0; i < count; ++i) out[i] = nb::cast<double>(values[i]);
}

// Adds an iteration's features to the sums `products` [features, features] and `targets` [features], which forget by
// `decay`; then sets every weight with a prior above 0, once, to its best with the others as they are.
nb::tuple learn(nb::handle products, nb::handle targets, nb::sequence features, double weight, double decay,
                nb::sequence priors, nb::sequence weights, double scale, double prior_weight) {
    const buffers::Floats sums(products, 2, true), goals(targets, 1, true);
    const int64_t count = goals.size();
    if (count > kMaxFeatures || sums.size() != count || sums.num_stacks() != count)
        throw std::invalid_argument("sums of another number of features");
    double row[kMaxFeatures], prior[kMaxFeatures], found[kMaxFeatures];
    read(features, count, row);
    read(priors, count, prior);
    read(weights, count, found);
    for (int64_t i = 0; i < count; ++i) {
        const double scaled = weight * row[i];
        for (int64_t j = 0; j < count; ++j) {
            double& sum = sums.row(i)[j];
            sum *= decay;
            sum += scaled * row[j];
        }
        goals.data()[i] = goals.data()[i] * decay + scaled;
    }
    for (int64_t i = 0; i < count; ++i) {
        if (!(prior[i] > 0.0)) continue;
        const double* const sum = sums.row(i);
        const double expected = scale * prior[i], pull = prior_weight / (expected * expected);
        double all = 0.0;
        for (int64_t j = 0; j < count; ++j) all += sum[j] * found[j];
        const double others = all - sum[i] * found[i];
        const double best = (goals.data()[i] + pull * expected - others) / (sum[i] + pull);
        found[i] = best > 0.0 ? best : 0.0;
    }
    nb::list out;
    for (int64_t i = 0; i < count; ++i) out.append(found[i]);
    return nb::tuple(out);
}

}  // namespace

void bind(nb::module_& module) { module.def("learn_iteration_costs", learn); }

}  // namespace iteration_costs
