// What the CPU and the CUDA kernels are given. Rows are contiguous, `columns` logits each (this rank's share of the
// vocabulary).
#pragma once

#include <cstdint>

namespace masked_log_softmax {

struct Logits {
    const void* data;
    bool bf16;  // else fp32
    int64_t rows, columns;
};

struct Targets {
    const int64_t* ids;    // [T], of the whole vocabulary
    int64_t first_column;  // the id of this rank's first column
};

// What all rows of a call have in common.
struct Options {
    float log_rho;  // -inf: the whole vocabulary
    float temperature;
    bool with_entropy;
};

// Where a row's values go, [T] each; null: not asked for.
struct Values {
    float *log_probs, *coverage, *entropy, *margin, *pruned;
    bool *in_support, *bad_logits, *outside;
};

// What the gradient's factors are made of, [T] each; null: not there, or no gradient.
struct Slopes {
    const bool* in_support;
    const float *safe, *entropy, *grad_log_probs, *grad_entropy;
};

}  // namespace masked_log_softmax
