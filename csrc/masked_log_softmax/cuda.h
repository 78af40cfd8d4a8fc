// The functions of cpu.h on the GPU, for all rows (at least one). Arrays are in device memory; the work is queued on
// `stream`, a cudaStream_t. They throw std::runtime_error where CUDA reports an error.
#pragma once

#include "masked_log_softmax/types.h"

namespace masked_log_softmax::cuda {

void extremes(Logits logits, Targets targets, float* extremes, void* stream);

void sums(Logits logits, const float* maximum, Options options, float* sums, void* stream);

// Both at once: what the second reading of a row finds in the L2 cache is not read from memory again.
void extremes_and_sums(Logits logits, Targets targets, Options options, float* extremes, float* sums, void* stream);

void gradient(Logits logits, Targets targets, const float* maximum, const float* factors, Options options, void* gradient,
              void* stream);

}  // namespace masked_log_softmax::cuda
