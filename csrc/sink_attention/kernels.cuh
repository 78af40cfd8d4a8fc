// A block processes TOKENS tokens of one head: first one number per token, then the vectors of the tokens in packs. The head is
// the fastest block index, so that blocks that run at the same time use neighboring memory.
#pragma once

#include "device.cuh"

namespace sink_attention::cuda {

constexpr int THREADS = 256, TOKENS = 128;
template <int N>
constexpr int GROUP = N == 1 ? 16 : 4;  // packs of N elements

// The packs of the tokens of a block, and the token to which pack i belongs.
template <int N, typename T>
struct Tile {
    int64_t head, first_token;
    int tokens, packs_per_token;
    int64_t stride, begin;  // in packs; stride: from token to token

    __device__ Tile(int64_t all_tokens, int heads, int width)
        : head(blockIdx.x % heads),
          first_token(int64_t(blockIdx.x / heads) * TOKENS),
          tokens(int(all_tokens - first_token < TOKENS ? all_tokens - first_token : TOKENS)),
          packs_per_token(width / N),
          stride(int64_t(heads) * packs_per_token),
          begin(first_token * stride + head * packs_per_token) {}

    __device__ int count() const { return tokens * packs_per_token; }
    __device__ int token(int i) const { return i / packs_per_token; }
    __device__ int64_t position(int i) const { return begin + token(i) * stride + i % packs_per_token; }
};

struct PerToken {
    float values[TOKENS];
};

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    apply_sink_kernel(Pack<T, N>* o, float* lse, const float* sinks, int64_t tokens, int heads, int width, int64_t lse_stride) {
    SHARED(PerToken, factors);
    const Tile<N, T> tile(tokens, heads, width);
    const float sink = sinks[tile.head];
    if (sink == -INFINITY) return;
    for (int t = threadIdx.x; t < tile.tokens; t += blockDim.x) {
        float& sum = lse[tile.head * lse_stride + tile.first_token + t];
        const float plain = sum;
        sum = fmaxf(plain, sink) + log1pf(expf(-fabsf(plain - sink)));
        factors.values[t] = 1.0f / (1.0f + expf(sink - plain));  // exp(lse - lse'), without the rounding of lse'
    }
    __syncthreads();
    for_each_group<GROUP<N>>(
        tile.count(), [&](int i) { return o[tile.position(i)]; },
        [&](Pack<T, N> pack, int i) {
            const float factor = factors.values[tile.token(i)];
#pragma unroll
            for (int n = 0; n < N; ++n) round_to(pack.values[n], factor == 0 ? 0.0f : to_float(pack.values[n]) * factor);
            o[tile.position(i)] = pack;
        },
        [] {});
}

// workspace [blocks, heads]: sums over the tokens of each block.
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    partial_gradient_kernel(const Pack<T, N>* grad_o, const Pack<T, N>* o, const float* lse, const float* sinks, int64_t tokens,
                            int heads, int width, int64_t lse_stride, float* workspace) {
    struct Scratch {
        float weights[TOKENS], partials[1][MOST_WARPS];
    };
    SHARED(Scratch, scratch);
    const Tile<N, T> tile(tokens, heads, width);
    const float sink = sinks[tile.head];
    float total[1] = {};
    if (sink != -INFINITY) {
        for (int t = threadIdx.x; t < tile.tokens; t += blockDim.x)
            scratch.weights[t] = -expf(sink - lse[tile.head * lse_stride + tile.first_token + t]);
        __syncthreads();
        struct Pair {
            Pack<T, N> grad_o, o;
        };
        for_each_group<GROUP<N>>(
            tile.count(), [&](int i) { return Pair{grad_o[tile.position(i)], o[tile.position(i)]}; },
            [&](const Pair& pair, int i) {
                float product = 0;
#pragma unroll
                for (int n = 0; n < N; ++n) product += to_float(pair.grad_o.values[n]) * to_float(pair.o.values[n]);
                total[0] += scratch.weights[tile.token(i)] * product;
            },
            [] {});
        block_reduce(total, scratch.partials, 0.0f, [](float a, float b) { return a + b; });
    }
    if (threadIdx.x == 0) workspace[blockIdx.x] = total[0];
}

// One block per head.
__global__ void __launch_bounds__(THREADS)
    total_gradient_kernel(const float* workspace, int blocks, int heads, float* grad_sinks) {
    struct Scratch {
        float partials[1][MOST_WARPS];
    };
    SHARED(Scratch, scratch);
    float total[1] = {};
    for (int b = threadIdx.x; b < blocks; b += blockDim.x) total[0] += workspace[int64_t(b) * heads + blockIdx.x];
    block_reduce(total, scratch.partials, 0.0f, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) grad_sinks[blockIdx.x] = total[0];
}

}  // namespace sink_attention::cuda
