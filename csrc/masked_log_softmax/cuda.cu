#include "masked_log_softmax/cuda.h"

#include <algorithm>
#include <type_traits>

#include "launch.cuh"
#include "masked_log_softmax/kernels.cuh"

namespace masked_log_softmax::cuda {
namespace {

constexpr int64_t MOST_COLUMNS = int64_t{1} << 30;  // indices inside a row are 32-bit

// Calls body(T{}, N) with the type of the logits and the pack size that the addresses of all arrays allow.
template <typename Body>
void with_packs(const char* launcher, const Logits& logits, const void* like_logits, Body body) {
    if (logits.columns > MOST_COLUMNS) throw std::runtime_error(std::string(launcher) + ": rows of more than 2^30 logits");
    const auto addresses = reinterpret_cast<uintptr_t>(logits.data) | reinterpret_cast<uintptr_t>(like_logits);
    const bool aligned = (addresses | logits.columns * (logits.bf16 ? 2 : 4)) % 16 == 0;
    auto with_size = [&](auto type) {
        if (aligned)
            body(type, std::integral_constant<int, 16 / sizeof type>{});
        else
            body(type, std::integral_constant<int, 1>{});
    };
    logits.bf16 ? with_size(Bf16{}) : with_size(float{});
}

// Number of threads if each processes a group of packs, in whole warps.
template <int N>
int threads_for(int64_t packs) {
    constexpr int packs_per_warp = GROUP<N> * WARP;
    return WARP * std::clamp<int64_t>((packs + packs_per_warp - 1) / packs_per_warp, 1, THREADS / WARP);
}

template <int N>
Grid one_block_per_row(const Logits& logits) {
    return {logits.rows, threads_for<N>(logits.columns / N)};
}

Grid a_thread_per_row(int64_t rows) { return {(rows + ROWS - 1) / ROWS, ROWS}; }

}  // namespace

void extremes(Logits logits, Targets targets, float* extremes, void* stream) {
    with_packs("extremes", logits, nullptr, [&](auto type, auto n) {
        const auto kernel = extremes_kernel<decltype(type), n()>;
        launch("extremes", one_block_per_row<n()>(logits), stream, kernel, logits, targets, extremes);
    });
}

void sums(Logits logits, const float* maximum, Options options, float* sums, void* stream) {
    with_packs("sums", logits, nullptr, [&](auto type, auto n) {
        const auto kernel = sums_kernel<decltype(type), n()>;
        launch("sums", one_block_per_row<n()>(logits), stream, kernel, logits, maximum, options, sums);
    });
}

void extremes_and_sums(Logits logits, Targets targets, Options options, float* extremes, float* sums, void* stream) {
    with_packs("extremes_and_sums", logits, nullptr, [&](auto type, auto n) {
        const auto kernel = extremes_and_sums_kernel<decltype(type), n()>;
        launch("extremes_and_sums", one_block_per_row<n()>(logits), stream, kernel, logits, targets, options, extremes, sums);
    });
}

void finish(const int64_t* targets, int64_t rows, int64_t vocabulary, const float* extremes, const float* sums,
            Options options, Values values, void* stream) {
    launch("finish", a_thread_per_row(rows), stream, finish_kernel, targets, rows, vocabulary, extremes, sums, options, values);
}

void factors(const int64_t* targets, int64_t rows, Slopes slopes, float temperature, float* factors, void* stream) {
    launch("factors", a_thread_per_row(rows), stream, factors_kernel, targets, rows, slopes, temperature, factors);
}

void gradient(Logits logits, Targets targets, const float* maximum, const float* factors, Options options, void* gradient,
              void* stream) {
    with_packs("gradient", logits, gradient, [&](auto type, auto n) {
        const auto kernel = gradient_kernel<decltype(type), n()>;
        launch("gradient", one_block_per_row<n()>(logits), stream, kernel, logits, targets, maximum, factors, options,
               gradient);
    });
}

}  // namespace masked_log_softmax::cuda
