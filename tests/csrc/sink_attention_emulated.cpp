// The CUDA part of sink_attention for ctypes, run by cuda_emulation.h. Each function returns an error's text or null.
#include "sink_attention/cuda.cu"

#include "emulated.h"

using namespace sink_attention::cuda;

extern "C" {

int gradient_rows(int64_t tokens) { return gradient_blocks(tokens); }

const char* apply(void* o, float* lse, float* sinks, int64_t type, int64_t tokens, int64_t heads, int64_t width,
                  int64_t lse_stride) {
    return error_of([&] { apply_sink(o, lse, sinks, {Type(type), tokens, heads, width, lse_stride}, nullptr); });
}

const char* gradient(void* grad_o, void* o, float* lse, float* sinks, int64_t type, int64_t tokens, int64_t heads,
                     int64_t width, int64_t lse_stride, float* workspace, float* grad_sinks) {
    return error_of([&] {
        const Shape shape{Type(type), tokens, heads, width, lse_stride};
        sink_gradient(grad_o, o, lse, sinks, shape, workspace, grad_sinks, nullptr);
    });
}
}
