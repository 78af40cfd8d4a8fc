// The CUDA part of masked_log_softmax for ctypes, run by cuda_emulation.h. Each function returns an error's text or null.
#include "masked_log_softmax/cuda.cu"

#include "emulated.h"

using namespace masked_log_softmax;

extern "C" {

const char* extremes(void* logits, bool bf16, int64_t rows, int64_t columns, int64_t* targets, int64_t first_column,
                     float* out) {
    return error_of([&] { cuda::extremes({logits, bf16, rows, columns}, {targets, first_column}, out, nullptr); });
}

const char* sums(void* logits, bool bf16, int64_t rows, int64_t columns, float* maximum, float log_rho, float temperature,
                 bool with_entropy, float* out) {
    return error_of(
        [&] { cuda::sums({logits, bf16, rows, columns}, maximum, {log_rho, temperature, with_entropy}, out, nullptr); });
}

const char* extremes_and_sums(void* logits, bool bf16, int64_t rows, int64_t columns, int64_t* targets, float log_rho,
                              float temperature, bool with_entropy, float* extremes, float* sums) {
    return error_of([&] {
        const Options options{log_rho, temperature, with_entropy};
        cuda::extremes_and_sums({logits, bf16, rows, columns}, {targets, 0}, options, extremes, sums, nullptr);
    });
}

const char* gradient(void* logits, bool bf16, int64_t rows, int64_t columns, int64_t* targets, int64_t first_column,
                     float* maximum, float* factors, float log_rho, float temperature, void* out) {
    return error_of([&] {
        const Options options{log_rho, temperature, false};
        cuda::gradient({logits, bf16, rows, columns}, {targets, first_column}, maximum, factors, options, out, nullptr);
    });
}
}
