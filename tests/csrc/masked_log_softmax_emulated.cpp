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

const char* finish(int64_t* targets, int64_t rows, int64_t vocabulary, float* extremes, float* sums, float log_rho,
                   float temperature, float* log_probs, float* coverage, float* entropy, float* margin, float* pruned,
                   bool* in_support, bool* bad_logits, bool* outside) {
    return error_of([&] {
        const Values values{log_probs, coverage, entropy, margin, pruned, in_support, bad_logits, outside};
        const Options options{log_rho, temperature, true};
        cuda::finish(targets, rows, vocabulary, extremes, sums, options, values, nullptr);
    });
}

const char* factors(int64_t* targets, int64_t rows, bool* in_support, float* safe, float* entropy, float* grad_log_probs,
                    float* grad_entropy, float temperature, float* out) {
    return error_of([&] {
        cuda::factors(targets, rows, {in_support, safe, entropy, grad_log_probs, grad_entropy}, temperature, out, nullptr);
    });
}
}
