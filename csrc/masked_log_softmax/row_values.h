// The values of a row from its sums, and the factors of its gradient from the gradients of its values: a few numbers per row.
// On the CPU this is plain torch, whose logarithm has other bits: finish and factors in
// megatron_rl/ops/masked_log_softmax_torch.py.
#pragma once

#include "masked_log_softmax/threshold.h"
#include "masked_log_softmax/types.h"

namespace masked_log_softmax {

constexpr int64_t IGNORED = -100;

struct RowSums {
    float maximum, at_target, safe, pruned, weighted;  // of extremes and sums in cpu.h
};

struct RowValues {
    float log_prob, coverage, entropy, margin, pruned;
    bool in_support;
    bool bad_logits;  // NaN, +inf or no logit above -inf; the values of such a row are meaningless
    bool outside;     // the target is not in the vocabulary
};

HOST_DEVICE inline RowValues values_of(int64_t target, int64_t vocabulary, const RowSums& row, const Options& options) {
    if (target == IGNORED) return {0, 1, 0, 0, 0, false, false, false};
    const float most = row.maximum / options.temperature, own = row.at_target / options.temperature;
    const float log_sum = logf(row.safe), full = row.safe + row.pruned;
    RowValues found;
    found.in_support = row.at_target > -INFINITY && !(own < most + options.log_rho);
    found.log_prob = found.in_support ? (row.at_target - row.maximum) / options.temperature - log_sum : -INFINITY;
    found.coverage = row.safe / full;
    found.pruned = row.pruned / full;
    found.entropy = log_sum - row.weighted / row.safe;
    found.margin = own - most;
    found.bad_logits = !(fabsf(most) <= FLT_MAX);
    found.outside = target < 0 || target >= vocabulary;
    return found;
}

// Arrays of all rows: ids [T], extremes [2, T], sums [3, T].
HOST_DEVICE inline void finish_row(int64_t row, const int64_t* ids, int64_t rows, int64_t vocabulary, const float* extremes,
                                   const float* sums, const Options& options, const Values& values) {
    const RowSums found{extremes[row], extremes[rows + row], sums[row], sums[rows + row], sums[2 * rows + row]};
    const RowValues value = values_of(ids[row], vocabulary, found, options);
    values.log_probs[row] = value.log_prob;
    values.coverage[row] = value.coverage;
    if (values.entropy) values.entropy[row] = value.entropy;
    values.margin[row] = value.margin;
    values.pruned[row] = value.pruned;
    values.in_support[row] = value.in_support;
    values.bad_logits[row] = value.bad_logits;
    if (values.outside) values.outside[row] = value.outside;
}

struct RowFactors {
    float factor, slope, at_target;  // of gradient in cpu.h
};

// entropy and grad_entropy: 0 if they are not given.
HOST_DEVICE inline RowFactors factors_of(int64_t target, bool in_support, float safe, float entropy, float grad_log_prob,
                                         float grad_entropy, float temperature) {
    RowFactors found{0, 0, 0};
    if (in_support) {
        found.at_target = grad_log_prob / temperature;
        found.factor = -found.at_target / safe;
    }
    if (grad_entropy != 0 && target != IGNORED) {
        const float scaled = grad_entropy / safe / temperature;
        found.slope = -scaled;
        found.factor += scaled * (logf(safe) - entropy);
    }
    return found;
}

// factors [3, T].
HOST_DEVICE inline void factors_row(int64_t row, const int64_t* ids, int64_t rows, const Slopes& slopes, float temperature,
                                    float* factors) {
    const float entropy = slopes.entropy ? slopes.entropy[row] : 0;
    const float of_log_prob = slopes.grad_log_probs ? slopes.grad_log_probs[row] : 0;
    const float of_entropy = slopes.entropy && slopes.grad_entropy ? slopes.grad_entropy[row] : 0;
    const RowFactors found =
        factors_of(ids[row], slopes.in_support[row], slopes.safe[row], entropy, of_log_prob, of_entropy, temperature);
    factors[row] = found.factor;
    factors[rows + row] = found.slope;
    factors[2 * rows + row] = found.at_target;
}

}  // namespace masked_log_softmax
