// CUDA declarations and helpers that the kernels share. Compilers other than nvcc get CUDA from tests/csrc/cuda_emulation.h,
// which runs the kernels on the CPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "isa.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define SHARED(type, name) __shared__ type name

// 2^x to 2 ulp; results below FLT_MIN are 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The maximum; NaN if one of the two is NaN.
__device__ inline float maximum_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
#else
#include "cuda_emulation.h"
#endif

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

__device__ inline void round_to(float& y, float x) { y = x; }
__device__ inline void round_to(Bf16& y, float x) { y.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

// The elements that one instruction loads or stores: 16 bytes if the addresses allow it, else one element.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
    T values[N];
};

// Calls each(load(i), i) for this thread's share of i = 0..count-1, which is always the same. GROUP loads are in flight at
// once. end_of_group() allows sums of many terms to be added in two steps.
template <int GROUP, typename Load, typename Each, typename EndOfGroup>
__device__ void for_each_group(int count, Load load, Each each, EndOfGroup end_of_group) {
    const int step = blockDim.x;
    int i = threadIdx.x;
    for (; i + (GROUP - 1) * step < count; i += GROUP * step) {
        decltype(load(0)) group[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) group[g] = load(i + g * step);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) each(group[g], i + g * step);
        end_of_group();
    }
    for (; i < count; i += step) each(load(i), i);
    end_of_group();
}

constexpr int WARP = 32, MOST_WARPS = 32;

template <typename Combine>
__device__ float warp_reduce(float x, Combine combine) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, distance));
    return x;
}

// Combines K numbers of each thread of the block; thread 0 gets the result. `partials` is shared memory for this call only.
template <int K, typename Combine>
__device__ void block_reduce(float (&values)[K], float (&partials)[K][MOST_WARPS], float neutral, Combine combine) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int k = 0; k < K; ++k) {
        values[k] = warp_reduce(values[k], combine);
        if (lane == 0) partials[k][warp] = values[k];
    }
    __syncthreads();
    if (warp > 0) return;
    for (int k = 0; k < K; ++k) values[k] = warp_reduce(lane < warps ? partials[k][lane] : neutral, combine);
}
