// What a flash attention that knows nothing of sinks lacks, on the GPU. With o and lse of plain attention,
//
//     lse' = log(exp(lse) + exp(sink)),    o' = o exp(lse - lse'),
//
// the flash backward given (do, o', lse') yields dq, dk and dv, and dsink = -sum_i exp(sink - lse'_i) (do_i . o'_i).
#pragma once

#include <cstdint>

namespace sink_attention::cuda {

enum class Type { fp32, bf16 };

// Of o and do: [tokens, heads, width], contiguous. lse is fp32 [heads, tokens] with lse_stride numbers from head to head, in
// natural logarithm, -inf where a query has no key. Any count may be 0.
struct Shape {
    Type type;
    int64_t tokens, heads, width, lse_stride;
};

// Arrays are in device memory; the work is queued on `stream`, a cudaStream_t. std::runtime_error where CUDA reports an error.

// o and lse become o' and lse' in place. Where sinks [heads] is -inf both stay as they are, bit by bit.
void apply_sink(void* o, float* lse, const float* sinks, Shape shape, void* stream);

// Rows of `workspace` that sink_gradient needs.
int64_t gradient_blocks(int64_t tokens);

// dsinks [heads] from do, o' and lse'; 0 where the sink is -inf. workspace: fp32 [gradient_blocks(tokens), heads]. Always adds
// up in the same order.
void sink_gradient(const void* grad_o, const void* o, const float* lse, const float* sinks, Shape shape, float* workspace,
                   float* grad_sinks, void* stream);

}  // namespace sink_attention::cuda
