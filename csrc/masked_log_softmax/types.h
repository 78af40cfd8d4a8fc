// Arguments of the CPU and the CUDA kernels. Rows are contiguous and have `columns` logits each (this rank's share of the
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
    const int64_t* ids;    // [T], ids of the whole vocabulary
    int64_t first_column;  // the id of this rank's first column
};

// Options that all rows of a call share.
struct Options {
    float log_rho;  // -inf: the whole vocabulary
    float temperature;
    bool with_entropy;
};

// Outputs of all rows, [T] each; null: not requested.
struct Values {
    float *log_probs, *coverage, *entropy, *margin, *pruned;
    bool *in_support, *bad_logits, *outside;
};

// Inputs for the factors of the gradient, [T] each; null: missing, or no gradient.
struct Slopes {
    const bool* in_support;
    const float *safe, *entropy, *grad_log_probs, *grad_entropy;
};

}  // namespace masked_log_softmax
