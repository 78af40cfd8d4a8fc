#include "sink_attention/cuda.h"

#include <type_traits>

#include "launch.cuh"
#include "sink_attention/kernels.cuh"

namespace sink_attention::cuda {
namespace {

// Calls body(T{}, N) with the element type and the pack size that the addresses and the width allow.
template <typename Body>
void with_packs(const Shape& shape, const void* a, const void* b, Body body) {
    auto with_size = [&](auto type) {
        const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | shape.width * sizeof type;
        if (bits % 16 == 0)
            body(type, std::integral_constant<int, 16 / sizeof type>{});
        else
            body(type, std::integral_constant<int, 1>{});
    };
    switch (shape.type) {
        case Type::fp32: return with_size(float{});
        case Type::bf16: return with_size(Bf16{});
    }
}

}  // namespace

void apply_sink(void* o, float* lse, const float* sinks, Shape shape, void* stream) {
    if (shape.tokens == 0 || shape.heads == 0) return;
    with_packs(shape, o, nullptr, [&](auto type, auto n) {
        using T = decltype(type);
        launch("apply_sink", {gradient_blocks(shape.tokens) * shape.heads, THREADS}, stream, apply_sink_kernel<T, n()>,
               static_cast<Pack<T, n()>*>(o), lse, sinks, shape.tokens, int(shape.heads), int(shape.width), shape.lse_stride);
    });
}

int64_t gradient_blocks(int64_t tokens) { return (tokens + TOKENS - 1) / TOKENS; }

void sink_gradient(const void* grad_o, const void* o, const float* lse, const float* sinks, Shape shape, float* workspace,
                   float* grad_sinks, void* stream) {
    if (shape.heads == 0) return;
    const int64_t blocks = gradient_blocks(shape.tokens);
    if (blocks > 0)
        with_packs(shape, grad_o, o, [&](auto type, auto n) {
            using P = const Pack<decltype(type), n()>*;
            launch("sink_gradient", {blocks * shape.heads, THREADS}, stream, partial_gradient_kernel<decltype(type), n()>,
                   static_cast<P>(grad_o), static_cast<P>(o), lse, sinks, shape.tokens, int(shape.heads), int(shape.width),
                   shape.lse_stride, workspace);
        });
    launch("sink_gradient", {shape.heads, THREADS}, stream, total_gradient_kernel, workspace, int(blocks), int(shape.heads),
           grad_sinks);
}

}  // namespace sink_attention::cuda
