// Adds sinks to a flash attention without sinks, on the GPU. With o and lse of plain attention,
//
//     lse' = log(exp(lse) + exp(sink)),    o' = o exp(lse - lse'),
//
// the flash backward of (do, o', lse') gives dq, dk and dv, and dsink = -sum_i exp(sink - lse'_i) (do_i . o'_i).
#pragma once

#include <cstdint>

namespace sink_attention::cuda {

enum class Type { fp32, bf16 };

// Sizes: o and do are [tokens, heads, width], contiguous. lse is fp32 [heads, tokens], with lse_stride elements from head to
// head, in natural logarithm, -inf for a query without keys. Any count may be 0.
struct Shape {
    Type type;
    int64_t tokens, heads, width, lse_stride;
};

// Arrays are in device memory. The work is queued on `stream`, a cudaStream_t. Throws std::runtime_error on a CUDA error.

// Changes o and lse to o' and lse' in place. For heads whose sink is -inf both stay unchanged, bit for bit.
void apply_sink(void* o, float* lse, const float* sinks, Shape shape, void* stream);

// Number of rows of `workspace` that sink_gradient needs.
int64_t gradient_blocks(int64_t tokens);

// Computes dsinks [heads] from do, o' and lse'; 0 for sinks of -inf. workspace: fp32 [gradient_blocks(tokens), heads]. The
// order of the sums is fixed.
void sink_gradient(const void* grad_o, const void* o, const float* lse, const float* sinks, Shape shape, float* workspace,
                   float* grad_sinks, void* stream);

}  // namespace sink_attention::cuda
