// The row kernels on the GPU: one block per row. The kernels read a row twice, the second time from its end, which is still in
// the L2 cache. This is faster than holding the row in the shared memory of a cluster of blocks, whose barriers separate loads
// and sums (H200: docs/results.md). Inside the kernels d is in units of log 2: scale = log2(e) / temperature.
#pragma once

#include "device.cuh"
#include "masked_log_softmax/row_values.h"
#include "masked_log_softmax/threshold.h"
#include "masked_log_softmax/types.h"

namespace masked_log_softmax::cuda {

constexpr float LOG2_E = 1.44269504088896341f, LOG_2 = 0.693147180559945309f;
constexpr float LOWEST = -150.0f;  // replaces d = -inf: 2^d is 0, and 0 * d is 0
constexpr int THREADS = 512;       // largest number per block
constexpr int ROWS = 128;          // rows per block, for kernels with one thread per row
template <int N>
constexpr int GROUP = N == 1 ? 16 : 4;  // packs of N logits

// Data that the threads of a block share.
struct Scratch {
    float maxima[1][MOST_WARPS], sums[3][MOST_WARPS];
    float maximum, threshold;
};

template <typename T, int N>
__device__ const Pack<T, N>* packs_of(const Logits& logits, int64_t row) {
    return reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(logits.data) + row * logits.columns);
}

// Column of the row's target on this rank, -1 if the target is on another rank or ignored.
__device__ inline int64_t column_of(const Targets& targets, const Logits& logits, int64_t row) {
    const int64_t column = targets.ids[row] - targets.first_column;
    return column >= 0 && column < logits.columns ? column : -1;
}

template <typename T>
__device__ float target_logit(const Targets& targets, const Logits& logits, int64_t row) {
    const int64_t column = column_of(targets, logits, row);
    return column < 0 ? -INFINITY : to_float(static_cast<const T*>(logits.data)[row * logits.columns + column]);
}

// The largest logit, or NaN if the row has one; thread 0 gets the result.
template <typename T, int N>
__device__ float maximum_of(const Pack<T, N>* packs, int count, Scratch& scratch) {
    float most[1] = {-INFINITY};
    for_each_group<GROUP<N>>(
        count, [&](int i) { return packs[i]; },
        [&](const Pack<T, N>& pack, int) {
#pragma unroll
            for (int n = 0; n < N; ++n) most[0] = maximum_or_nan(most[0], to_float(pack.values[n]));
        },
        [] {});
    block_reduce(most, scratch.maxima, -INFINITY, maximum_or_nan);
    return most[0];
}

// Sums of e^d over the safe set, e^d outside of it, and d e^d over the safe set, from the end of the row. Thread 0 gets the
// result.
template <typename T, int N>
__device__ void add_up(const Pack<T, N>* packs, int count, float scale, Scratch& scratch, float (&total)[3]) {
    const float most = scratch.maximum, threshold = scratch.threshold;
    float group[3] = {};
    for_each_group<GROUP<N>>(
        count, [&](int i) { return packs[count - 1 - i]; },
        [&](const Pack<T, N>& pack, int) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float v = to_float(pack.values[n]);
                const float d = fmaxf((v - most) * scale, LOWEST), e = exp2_approx(d);
                const float kept = v >= threshold ? e : 0.0f;
                group[0] += kept;
                group[1] += e - kept;  // e or 0
                group[2] += kept * d;
            }
        },
        [&] {
            for (int k = 0; k < 3; ++k) total[k] += group[k], group[k] = 0;
        });
    block_reduce(total, scratch.sums, 0.0f, [](float a, float b) { return a + b; });
}

__device__ inline void write_extremes(float* extremes, int64_t rows, int64_t row, float maximum, float at_target) {
    extremes[row] = maximum == maximum ? maximum : INFINITY;
    extremes[rows + row] = at_target;
}

__device__ inline void write_sums(float* sums, int64_t rows, int64_t row, const float (&total)[3], const Options& options) {
    sums[row] = total[0];
    sums[rows + row] = total[1];
    sums[2 * rows + row] = options.with_entropy ? total[2] * LOG_2 : 0.0f;
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 2) extremes_kernel(Logits logits, Targets targets, float* extremes) {
    SHARED(Scratch, scratch);
    const int64_t row = blockIdx.x;
    const float most = maximum_of(packs_of<T, N>(logits, row), logits.columns / N, scratch);
    if (threadIdx.x == 0) write_extremes(extremes, logits.rows, row, most, target_logit<T>(targets, logits, row));
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 2) sums_kernel(Logits logits, const float* maximum, Options options, float* sums) {
    SHARED(Scratch, scratch);
    const int64_t row = blockIdx.x;
    if (threadIdx.x == 0) {
        scratch.maximum = maximum[row];
        scratch.threshold = raw_threshold(scratch.maximum, options.log_rho, options.temperature);
    }
    __syncthreads();
    float total[3] = {};
    add_up(packs_of<T, N>(logits, row), logits.columns / N, LOG2_E / options.temperature, scratch, total);
    if (threadIdx.x == 0) write_sums(sums, logits.rows, row, total, options);
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 2)
    extremes_and_sums_kernel(Logits logits, Targets targets, Options options, float* extremes, float* sums) {
    SHARED(Scratch, scratch);
    const int64_t row = blockIdx.x;
    const int count = logits.columns / N;
    const Pack<T, N>* const packs = packs_of<T, N>(logits, row);
    const float most = maximum_of(packs, count, scratch);
    if (threadIdx.x == 0) {
        write_extremes(extremes, logits.rows, row, most, target_logit<T>(targets, logits, row));
        scratch.maximum = most;
        scratch.threshold = raw_threshold(most, options.log_rho, options.temperature);
    }
    __syncthreads();
    float total[3] = {};
    add_up(packs, count, LOG2_E / options.temperature, scratch, total);
    if (threadIdx.x == 0) {
        if (!(fabsf(most) <= FLT_MAX)) total[0] = total[1] = total[2] = 0;
        write_sums(sums, logits.rows, row, total, options);
    }
}

// One thread per row.
__global__ void finish_kernel(const int64_t* ids, int64_t rows, int64_t vocabulary, const float* extremes, const float* sums,
                              Options options, Values values) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < rows) finish_row(row, ids, rows, vocabulary, extremes, sums, options, values);
}

__global__ void factors_kernel(const int64_t* ids, int64_t rows, Slopes slopes, float temperature, float* factors) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < rows) factors_row(row, ids, rows, slopes, temperature, factors);
}

// `gradient` may be the logits: a thread writes a pack only after it has read the pack.
template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 2)
    gradient_kernel(Logits logits, Targets targets, const float* maximum, const float* factors, Options options,
                    void* gradient) {
    SHARED(float, shared_threshold);
    const int64_t row = blockIdx.x;
    const int count = logits.columns / N;
    const float factor = factors[row], slope = factors[logits.rows + row] * LOG_2, at_target = factors[2 * logits.rows + row];
    Pack<T, N>* const out = reinterpret_cast<Pack<T, N>*>(static_cast<T*>(gradient) + row * logits.columns);
    if (factor == 0 && slope == 0 && at_target == 0) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = Pack<T, N>{};
        return;
    }
    const float most = maximum[row], scale = LOG2_E / options.temperature;
    if (threadIdx.x == 0) shared_threshold = raw_threshold(most, options.log_rho, options.temperature);
    __syncthreads();
    const float threshold = shared_threshold;
    const int target = column_of(targets, logits, row);
    const Pack<T, N>* const x = packs_of<T, N>(logits, row);
    for_each_group<GROUP<N>>(
        count, [&](int i) { return x[i]; },
        [&](const Pack<T, N>& pack, int i) {
            Pack<T, N> result{};
            bool any = false;
#pragma unroll
            for (int n = 0; n < N; ++n) any |= to_float(pack.values[n]) >= threshold;
            if (any) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const float v = to_float(pack.values[n]), d = fmaxf((v - most) * scale, LOWEST);
                    const float value = exp2_approx(d) * (d * slope + factor) + (i * N + n == target ? at_target : 0.0f);
                    round_to(result.values[n], v >= threshold ? value : 0.0f);
                }
            }
            out[i] = result;
        },
        [] {});
}

}  // namespace masked_log_softmax::cuda
