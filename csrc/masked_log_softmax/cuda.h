// The functions of cpu.h on the GPU, and two small functions between them, for all rows (at least one). Arrays are in device
// memory. The work is queued on `stream`, a cudaStream_t. The functions throw std::runtime_error on a CUDA error.
#pragma once

#include "masked_log_softmax/types.h"

namespace masked_log_softmax::cuda {

void extremes(Logits logits, Targets targets, float* extremes, void* stream);

void sums(Logits logits, const float* maximum, Options options, float* sums, void* stream);

// Both functions at once: the second pass over a row then finds a part of the row in the L2 cache.
void extremes_and_sums(Logits logits, Targets targets, Options options, float* extremes, float* sums, void* stream);

// The values of every row, from extremes and sums over the whole vocabulary (row_values.h).
void finish(const int64_t* targets, int64_t rows, int64_t vocabulary, const float* extremes, const float* sums,
            Options options, Values values, void* stream);

// The argument factors [3, T] of gradient.
void factors(const int64_t* targets, int64_t rows, Slopes slopes, float temperature, float* factors, void* stream);

void gradient(Logits logits, Targets targets, const float* maximum, const float* factors, Options options, void* gradient,
              void* stream);

}  // namespace masked_log_softmax::cuda
