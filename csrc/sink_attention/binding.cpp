// Python module megatron_rl.ops._sink_attention. The caller (megatron_rl/ops/sink_attention.py) checks the arguments; the
// checks here only protect memory.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "parallel.h"
#include "sink_attention/cpu.h"

#ifdef WITH_CUDA
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "sink_attention/cuda.h"
#endif

namespace sink = sink_attention;
using at::Tensor;

namespace {

void check(const Tensor& x, const char* name, at::IntArrayRef shape, const Tensor& like, at::ScalarType type) {
    TORCH_CHECK_VALUE(x.sizes() == shape && x.is_contiguous() && x.scalar_type() == type && x.device() == like.device(), name,
                      " must be ", type, " ", shape, ", contiguous, on ", like.device());
}

// Borders of packed sequences: int64 [S + 1] on the CPU, rising from 0 to the number of tokens.
const int64_t* borders(const Tensor& cu_seqlens, const char* name, int64_t tokens) {
    TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0 && cu_seqlens.is_contiguous() &&
                          cu_seqlens.is_cpu() && cu_seqlens.scalar_type() == at::kLong,
                      name, " must be int64 [S + 1] on the CPU");
    const int64_t* const p = cu_seqlens.const_data_ptr<int64_t>();
    for (int64_t s = 1; s < cu_seqlens.numel(); ++s) TORCH_CHECK_VALUE(p[s - 1] <= p[s], name, " must not fall");
    TORCH_CHECK_VALUE(p[0] == 0 && p[cu_seqlens.numel() - 1] == tokens, name, " must run from 0 to ", tokens);
    return p;
}

struct Call {
    sink::Problem problem;
    const int64_t *cu_q, *cu_k;
    int64_t sequences;
};

Call prepare(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& sinks, const Tensor& cu_q,
             const Tensor& cu_k, int64_t window, double scale) {
    const auto type = q.scalar_type();
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "q must be fp32 or bf16, not ", type);
    TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must be [T, H, D]");
    TORCH_CHECK_VALUE(q.is_cpu(), "q is on ", q.device(), ", for which this kernel is not built");
    TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) > 0 && q.size(1) % k.size(1) == 0,
                      "heads of q must be a multiple of those of k");
    check(q, "q", q.sizes(), q, type);
    check(k, "k", {k.size(0), k.size(1), q.size(2)}, q, type);
    check(v, "v", {k.size(0), k.size(1), v.size(2)}, q, type);
    if (sinks) check(*sinks, "sinks", {q.size(1)}, q, at::kFloat);
    TORCH_CHECK_VALUE(cu_q.numel() == cu_k.numel(), "cu_seqlens of queries and keys differ in length");
    const Call call{{q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                     sinks ? sinks->const_data_ptr<float>() : nullptr, type == at::kBFloat16, q.size(0), q.size(1), k.size(1),
                     q.size(2), v.size(2), static_cast<float>(scale), window},
                    borders(cu_q, "cu_seqlens", q.size(0)),
                    borders(cu_k, "cu_seqlens of the keys", k.size(0)),
                    cu_q.numel() - 1};
    for (int64_t s = 0; s < call.sequences; ++s)
        TORCH_CHECK_VALUE(call.cu_q[s + 1] - call.cu_q[s] <= call.cu_k[s + 1] - call.cu_k[s], "sequence ", s,
                          " has more queries than keys");
    return call;
}

// Calls task(i, scratch) for i in [0, count) on all threads; a thread takes the next task when it has finished one.
template <typename Task>
void run(int64_t count, int64_t scratch_floats, Task task) {
    if (count == 0) return;
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t begin, int64_t end) {
        for (; begin < end; ++begin) {  // more than one iteration only if there are fewer threads than requested
            const size_t bytes = (scratch_floats * sizeof(float) + 63) / 64 * 64;
            const std::unique_ptr<float, decltype(&std::free)> scratch(static_cast<float*>(std::aligned_alloc(64, bytes)),
                                                                       &std::free);
            if (!scratch) throw std::bad_alloc();
            for (int64_t i = next++; i < count; i = next++) task(i, scratch.get());
        }
    });
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& sinks,
                                   const Tensor& cu_q, const Tensor& cu_k, int64_t window, double scale) {
    const Call call = prepare(q, k, v, sinks, cu_q, cu_k, window, scale);
    const sink::Problem& problem = call.problem;
    Tensor out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
    Tensor lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
    pybind11::gil_scoped_release release;
    const auto blocks = sink::query_blocks(problem, call.cu_q, call.cu_k, call.sequences);
    void* const out_data = out.mutable_data_ptr();
    float* const lse_data = lse.mutable_data_ptr<float>();
    run(blocks.size(), sink::scratch_floats(problem), [&](int64_t i, float* scratch) {
        sink::forward(torch_isa(), problem, blocks[i], out_data, lse_data, scratch);
    });
    return {out, lse};
}

// -sum over tokens of exp(sink - lse) delta, per head in a fixed order. The order of torch's sum depends on the thread count.
Tensor sink_gradient(const Tensor& sinks, const Tensor& lse, const Tensor& delta) {
    Tensor grad = at::empty_like(sinks);
    const float *const s = sinks.const_data_ptr<float>(), *const l = lse.const_data_ptr<float>();
    const float* const d = delta.const_data_ptr<float>();
    float* const out = grad.mutable_data_ptr<float>();
    const int64_t tokens = lse.size(1);
    at::parallel_for(0, sinks.numel(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) {
            double total = 0;
            for (int64_t t = head * tokens; t < (head + 1) * tokens; ++t) total += std::exp(s[head] - l[t]) * d[t];
            out[head] = static_cast<float>(-total);
        }
    });
    return grad;
}

// Returns (grad_q, grad_k, grad_v) in the type of q, and grad_sinks in fp32 (None without sinks).
std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>> backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                                   const Tensor& v, const std::optional<Tensor>& sinks,
                                                                   const Tensor& out, const Tensor& lse, const Tensor& cu_q,
                                                                   const Tensor& cu_k, int64_t window, double scale) {
    const Call call = prepare(q, k, v, sinks, cu_q, cu_k, window, scale);
    const sink::Problem& problem = call.problem;
    check(out, "out", {q.size(0), q.size(1), v.size(2)}, q, q.scalar_type());
    check(grad, "grad", out.sizes(), q, q.scalar_type());
    check(lse, "lse", {q.size(1), q.size(0)}, q, at::kFloat);
    const auto floats = q.options().dtype(at::kFloat);
    Tensor delta = at::empty(lse.sizes(), floats);
    Tensor grad_q = at::zeros(q.sizes(), floats), grad_k = at::zeros(k.sizes(), floats), grad_v = at::zeros(v.sizes(), floats);
    std::optional<Tensor> grad_sinks;
    {
        pybind11::gil_scoped_release release;
        const int64_t tokens = q.size(0), step = 64;
        float *const dq = grad_q.mutable_data_ptr<float>(), *const dk = grad_k.mutable_data_ptr<float>();
        float *const dv = grad_v.mutable_data_ptr<float>(), *const d = delta.mutable_data_ptr<float>();
        const void *const g = grad.const_data_ptr(), *const o = out.const_data_ptr();
        const float* const l = lse.const_data_ptr<float>();
        at::parallel_for(0, tokens, step, [&](int64_t begin, int64_t end) {
            sink::delta(torch_isa(), problem, g, o, d, begin, end);
        });
        for (const auto& round : sink::backward_rounds(problem, call.cu_q, call.cu_k, call.sequences))
            run(round.size(), sink::scratch_floats(problem), [&](int64_t i, float* scratch) {
                for (const sink::Tile& tile : round[i])
                    sink::backward(torch_isa(), problem, tile, g, l, d, dq, dk, dv, scratch);
            });
        if (sinks) grad_sinks = sink_gradient(*sinks, lse, delta);
    }
    const auto type = q.scalar_type();
    return {grad_q.to(type), grad_k.to(type), grad_v.to(type), grad_sinks};
}

#ifdef WITH_CUDA
// On CUDA torch's flash attention does the work (or the implementation set by activate_flash_attention_impl of
// torch.nn.attention). It does not support sinks; sink_attention/cuda.h describes what is added for them. Borders are int32
// [S + 1] on the device.

struct Flash {
    sink::cuda::Shape shape;
    std::optional<int64_t> left, right;  // size of the window
    int64_t padding;                     // columns to add to v: the kernel requires the width of q
};

Flash prepare_flash(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& sinks, const Tensor& cu_q,
                    const Tensor& cu_k, int64_t window) {
    const auto type = q.scalar_type();
    TORCH_CHECK_VALUE(q.is_cuda() && type == at::kBFloat16, "q must be bf16 on a GPU");
    TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must be [T, H, D]");
    TORCH_CHECK_VALUE(v.size(2) <= q.size(2) && q.size(2) % 8 == 0, "widths of q and v are not those of a flash attention");
    check(q, "q", q.sizes(), q, type);
    check(k, "k", {k.size(0), k.size(1), q.size(2)}, q, type);
    check(v, "v", {k.size(0), k.size(1), v.size(2)}, q, type);
    if (sinks) check(*sinks, "sinks", {q.size(1)}, q, at::kFloat);
    check(cu_q, "cu_seqlens", {cu_q.numel()}, q, at::kInt);
    check(cu_k, "cu_seqlens of the keys", {cu_q.numel()}, q, at::kInt);
    return {{sink::cuda::Type::bf16, q.size(0), q.size(1), q.size(2), q.size(0)},
            window ? std::optional<int64_t>(window - 1) : std::nullopt,
            window ? std::optional<int64_t>(0) : std::nullopt,
            q.size(2) - v.size(2)};
}

Tensor pad(const Tensor& x, int64_t columns) { return columns ? at::constant_pad_nd(x, {0, columns}) : x; }

// Returns out, lse [H, Tq], and two tensors for the backward.
std::tuple<Tensor, Tensor, Tensor, Tensor> flash_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const std::optional<Tensor>& sinks, const Tensor& cu_q,
                                                         const Tensor& cu_k, int64_t max_q, int64_t max_k, int64_t window,
                                                         double scale) {
    Flash flash = prepare_flash(q, k, v, sinks, cu_q, cu_k, window);
    const pybind11::gil_scoped_release release;
    const c10::cuda::CUDAGuard guard(q.device());
    if (q.size(0) == 0) {
        const Tensor none = at::empty({0}, q.options().dtype(at::kFloat));
        return {at::empty({0, q.size(1), v.size(2)}, q.options()), none.view({q.size(1), 0}), none, none};
    }
    // If the longest length is 1, FlashAttention 2 uses its decoding path, in which each sequence has exactly one query.
    max_q = std::max<int64_t>(max_q, 2);
    auto [out, lse, rng_state, unused, debug] =
        at::_flash_attention_forward(q, k, pad(v, flash.padding), cu_q, cu_k, max_q, max_k, /*dropout_p=*/0.0,
                                     /*is_causal=*/true, /*return_debug_mask=*/false, scale, flash.left, flash.right);
    TORCH_CHECK(lse.dim() == 2 && lse.size(0) == q.size(1) && lse.size(1) >= q.size(0) && lse.stride(1) == 1,
                "this flash attention's lse has shape ", lse.sizes(), ", expected [H, T]");
    if (sinks) {
        out = out.contiguous();
        flash.shape.lse_stride = lse.stride(0);
        sink::cuda::apply_sink(out.mutable_data_ptr(), lse.mutable_data_ptr<float>(), sinks->const_data_ptr<float>(),
                               flash.shape, c10::cuda::getCurrentCUDAStream().stream());
    }
    if (flash.padding) out = out.narrow(2, 0, v.size(2)).contiguous();
    return {out, lse, rng_state, unused};
}

std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& sinks,
    const Tensor& out, const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k, int64_t max_q, int64_t max_k,
    int64_t window, double scale, const Tensor& rng_state, const Tensor& unused) {
    Flash flash = prepare_flash(q, k, v, sinks, cu_q, cu_k, window);
    check(out, "out", {q.size(0), q.size(1), v.size(2)}, q, q.scalar_type());
    check(grad, "grad", out.sizes(), q, q.scalar_type());
    const pybind11::gil_scoped_release release;
    const c10::cuda::CUDAGuard guard(q.device());
    if (q.size(0) == 0) {
        const auto grad_sinks = sinks ? std::optional<Tensor>(at::zeros(sinks->sizes(), sinks->options())) : std::nullopt;
        return {at::empty_like(q), at::zeros(k.sizes(), k.options()), at::zeros(v.sizes(), v.options()), grad_sinks};
    }
    max_q = std::max<int64_t>(max_q, 2);
    auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
        pad(grad, flash.padding), q, k, pad(v, flash.padding), pad(out, flash.padding), lse, cu_q, cu_k, max_q, max_k,
        /*dropout_p=*/0.0, /*is_causal=*/true, rng_state, unused, scale, flash.left, flash.right);
    std::optional<Tensor> grad_sinks;
    if (sinks) {
        grad_sinks = at::empty_like(*sinks);
        flash.shape.width = v.size(2);
        flash.shape.lse_stride = lse.stride(0);
        const Tensor workspace = at::empty({sink::cuda::gradient_blocks(q.size(0)), q.size(1)}, sinks->options());
        sink::cuda::sink_gradient(grad.const_data_ptr(), out.const_data_ptr(), lse.const_data_ptr<float>(),
                                  sinks->const_data_ptr<float>(), flash.shape, workspace.mutable_data_ptr<float>(),
                                  grad_sinks->mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream().stream());
    }
    if (flash.padding) grad_v = grad_v.narrow(2, 0, v.size(2)).contiguous();
    return {grad_q, grad_k, grad_v, grad_sinks};
}
#endif

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.attr("torch") = TORCH_VERSION; // another release may lay its classes out otherwise
    using namespace pybind11::literals;
#ifdef WITH_CUDA
    module.attr("cuda") = true;
    module.def("flash_forward", &flash_forward, "q"_a, "k"_a, "v"_a, "sinks"_a, "cu_q"_a, "cu_k"_a, "max_q"_a, "max_k"_a,
               "window"_a, "scale"_a);
    module.def("flash_backward", &flash_backward, "grad"_a, "q"_a, "k"_a, "v"_a, "sinks"_a, "out"_a, "lse"_a, "cu_q"_a,
               "cu_k"_a, "max_q"_a, "max_k"_a, "window"_a, "scale"_a, "rng_state"_a, "unused"_a);
#else
    module.attr("cuda") = false;
#endif
    module.def("forward", &forward, "q"_a, "k"_a, "v"_a, "sinks"_a, "cu_q"_a, "cu_k"_a, "window"_a, "scale"_a);
    module.def("backward", &backward, "grad"_a, "q"_a, "k"_a, "v"_a, "sinks"_a, "out"_a, "lse"_a, "cu_q"_a, "cu_k"_a,
               "window"_a, "scale"_a);
}
