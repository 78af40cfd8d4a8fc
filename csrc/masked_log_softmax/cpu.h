// Row kernels on the CPU.
#pragma once

#include "isa.h"
#include "masked_log_softmax/types.h"

namespace masked_log_softmax {

struct Range {
    int64_t begin, end;
};

// extremes [2, T]: largest logit of the row (+inf if it has a NaN), and the target's logit (-inf if it is on another rank).
void extremes(Isa isa, Logits logits, Targets targets, float* extremes, Range rows);

// sums [3, T], with d = (x - maximum) / temperature and maximum [T] over the whole vocabulary: e^d over the safe set, e^d
// outside of it, and d e^d over the safe set (0 without entropy). The second is summed separately, because 1 - safe / all would
// round it away.
void sums(Isa isa, Logits logits, const float* maximum, Options options, float* sums, Range rows);

// Both functions at once while a row is in the cache, if this rank has the whole vocabulary. Rows without a finite maximum get
// sums of 0.
void extremes_and_sums(Isa isa, Logits logits, Targets targets, Options options, float* extremes, float* sums, Range rows);

// gradient = (factor + slope d) e^d inside of the safe set, 0 outside, plus at_target at the target. factors [3, T] holds
// factor, slope and at_target; a row with three zeros gets zeros. `gradient` has the type of the logits and may be the logits
// themselves.
void gradient(Isa isa, Logits logits, Targets targets, const float* maximum, const float* factors, Options options,
              void* gradient, Range rows);

}  // namespace masked_log_softmax
