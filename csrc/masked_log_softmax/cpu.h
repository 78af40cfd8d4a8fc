// Row kernels on the CPU.
#pragma once

#include "isa.h"
#include "masked_log_softmax/types.h"

namespace masked_log_softmax {

struct Range {
    int64_t begin, end;
};

// extremes [2, T]: the row's largest logit, +inf where it has a NaN; its target's logit, -inf where the target is not here.
void extremes(Isa isa, Logits logits, Targets targets, float* extremes, Range rows);

// sums [3, T], with d = (x - maximum) / temperature, maximum [T] over the whole vocabulary: e^d over the safe set, e^d outside
// of it, d e^d over the safe set (0 without entropy). The second is a sum of its own: in 1 - safe / all it would round away.
void sums(Isa isa, Logits logits, const float* maximum, Options options, float* sums, Range rows);

// Both of a row while it is in the cache, for a vocabulary that is whole. Rows without a finite maximum get sums of 0.
void extremes_and_sums(Isa isa, Logits logits, Targets targets, Options options, float* extremes, float* sums, Range rows);

// gradient = (factor + slope d) e^d inside the safe set, 0 outside, at_target added at the target. factors [3, T] holds
// factor, slope and at_target; a row whose three are zero gets zeros. `gradient` has the logits' type and may be the
// logits themselves.
void gradient(Isa isa, Logits logits, Targets targets, const float* maximum, const float* factors, Options options,
              void* gradient, Range rows);

}  // namespace masked_log_softmax
