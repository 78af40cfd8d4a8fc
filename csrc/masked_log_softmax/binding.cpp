// Python module megatron_rl.ops._masked_log_softmax: the kernels on tensors. Shapes are in masked_log_softmax/cpu.h; the
// caller (megatron_rl/ops/masked_log_softmax.py) checks the arguments; the checks here only protect memory.

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <limits>

#include "masked_log_softmax/cpu.h"
#include "masked_log_softmax/cuda.h"
#include "masked_log_softmax/row_values.h"
#include "parallel.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace msk = masked_log_softmax;
using at::Tensor;

namespace {

msk::Logits view(const Tensor& logits) {
    TORCH_CHECK_VALUE(logits.dim() == 2 && logits.is_contiguous(), "logits must be [T, V] and contiguous");
    TORCH_CHECK_VALUE(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16,
                      "logits must be fp32 or bf16, not ", logits.scalar_type());
    return {logits.const_data_ptr(), logits.scalar_type() == at::kBFloat16, logits.size(0), logits.size(1)};
}

template <typename T>
const T* data(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape, const Tensor& logits) {
    TORCH_CHECK_VALUE(tensor.sizes() == at::IntArrayRef(shape) && tensor.is_contiguous() &&
                          tensor.scalar_type() == c10::CppTypeToScalarType<T>::value && tensor.device() == logits.device(),
                      name, " must be ", c10::CppTypeToScalarType<T>::value, " ", at::IntArrayRef(shape),
                      ", contiguous, on ", logits.device());
    return tensor.const_data_ptr<T>();
}

msk::Targets view(const Tensor& targets, int64_t first_column, const Tensor& logits) {
    return {data<int64_t>(targets, "targets", {logits.size(0)}, logits), first_column};
}

msk::Options options(std::optional<double> log_rho, double temperature, bool with_entropy) {
    const float none = -std::numeric_limits<float>::infinity();
    return {log_rho ? static_cast<float>(*log_rho) : none, static_cast<float>(temperature), with_entropy};
}

Tensor rows_of_floats(int64_t count, const Tensor& logits) {
    return at::empty({count, logits.size(0)}, logits.options().dtype(at::kFloat));
}

// Calls on_cpu(isa, rows) on all threads, or on_cuda(stream) on the device of the logits. on_cuda is a template, so that a
// build without CUDA does not need the functions that it calls.
template <typename OnCpu, typename OnCuda>
void launch(const Tensor& logits, OnCpu on_cpu, [[maybe_unused]] OnCuda on_cuda) {
    pybind11::gil_scoped_release release;
    if (logits.size(0) == 0) return;
#ifdef WITH_CUDA
    if (logits.is_cuda()) {
        const c10::cuda::CUDAGuard guard(logits.device());
        on_cuda(c10::cuda::getCurrentCUDAStream().stream());
        return;
    }
#endif
    TORCH_CHECK_VALUE(logits.is_cpu(), "logits are on ", logits.device(), ", for which these kernels are not built");
    const int64_t rows_per_task = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, logits.numel() / logits.size(0)));
    at::parallel_for(0, logits.size(0), rows_per_task,
                     [&](int64_t begin, int64_t end) { on_cpu(torch_isa(), msk::Range{begin, end}); });
}

Tensor extremes(const Tensor& logits, const Tensor& targets, int64_t first_column) {
    const auto x = view(logits);
    const auto t = view(targets, first_column, logits);
    Tensor out = rows_of_floats(2, logits);
    float* const p = out.mutable_data_ptr<float>();
    launch(
        logits, [&](Isa isa, msk::Range rows) { msk::extremes(isa, x, t, p, rows); },
        [&](auto stream) { msk::cuda::extremes(x, t, p, stream); });
    return out;
}

Tensor sums(const Tensor& logits, const Tensor& maximum, std::optional<double> log_rho, double temperature,
            bool with_entropy) {
    const auto x = view(logits);
    const float* const most = data<float>(maximum, "maximum", {logits.size(0)}, logits);
    const auto o = options(log_rho, temperature, with_entropy);
    Tensor out = rows_of_floats(3, logits);
    float* const p = out.mutable_data_ptr<float>();
    launch(
        logits, [&](Isa isa, msk::Range rows) { msk::sums(isa, x, most, o, p, rows); },
        [&](auto stream) { msk::cuda::sums(x, most, o, p, stream); });
    return out;
}

std::tuple<Tensor, Tensor> extremes_and_sums(const Tensor& logits, const Tensor& targets, std::optional<double> log_rho,
                                             double temperature, bool with_entropy) {
    const auto x = view(logits);
    const auto t = view(targets, 0, logits);
    const auto o = options(log_rho, temperature, with_entropy);
    Tensor first = rows_of_floats(2, logits), second = rows_of_floats(3, logits);
    float* const p = first.mutable_data_ptr<float>();
    float* const q = second.mutable_data_ptr<float>();
    launch(
        logits, [&](Isa isa, msk::Range rows) { msk::extremes_and_sums(isa, x, t, o, p, q, rows); },
        [&](auto stream) { msk::cuda::extremes_and_sums(x, t, o, p, q, stream); });
    return {first, second};
}

// Calls each(row): the CPU version of a kernel with one thread per row.
template <typename Each>
auto of_rows(Each each) {
    return [=](Isa, msk::Range rows) {
        for (int64_t row = rows.begin; row < rows.end; ++row) each(row);
    };
}

std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>, Tensor, Tensor, Tensor, std::optional<Tensor>> finish(
    const Tensor& targets, const Tensor& extremes, const Tensor& sums, std::optional<double> log_rho, double temperature,
    bool with_entropy, std::optional<int64_t> vocabulary) {
    const int64_t rows = targets.size(0);
    const int64_t* const ids = data<int64_t>(targets, "targets", {rows}, targets);
    const float* const p = data<float>(extremes, "extremes", {2, rows}, targets);
    const float* const q = data<float>(sums, "sums", {3, rows}, targets);
    const auto o = options(log_rho, temperature, with_entropy);
    const auto make = [&](at::ScalarType type) { return at::empty({rows}, targets.options().dtype(type)); };
    Tensor log_probs = make(at::kFloat), coverage = make(at::kFloat), margin = make(at::kFloat), pruned = make(at::kFloat);
    Tensor in_support = make(at::kBool), bad_logits = make(at::kBool);
    std::optional<Tensor> entropy, outside;
    if (with_entropy) entropy = make(at::kFloat);
    if (vocabulary) outside = make(at::kBool);
    const auto floats = [](const Tensor& tensor) { return tensor.mutable_data_ptr<float>(); };
    const auto flags = [](const Tensor& tensor) { return tensor.mutable_data_ptr<bool>(); };
    const msk::Values values{floats(log_probs),  floats(coverage),  entropy ? floats(*entropy) : nullptr,
                             floats(margin),     floats(pruned),    flags(in_support),
                             flags(bad_logits), outside ? flags(*outside) : nullptr};
    const int64_t size = vocabulary.value_or(0);
    launch(
        targets, of_rows([=](int64_t row) { msk::finish_row(row, ids, rows, size, p, q, o, values); }),
        [&](auto stream) { msk::cuda::finish(ids, rows, size, p, q, o, values, stream); });
    return {log_probs, in_support, coverage, entropy, margin, pruned, bad_logits, outside};
}

Tensor factors(const Tensor& targets, const Tensor& in_support, const Tensor& safe_sum, const std::optional<Tensor>& entropy,
               const std::optional<Tensor>& grad_log_probs, const std::optional<Tensor>& grad_entropy, double temperature) {
    const int64_t rows = targets.size(0);
    const auto floats = [&](const std::optional<Tensor>& tensor, const char* name) {
        return tensor ? data<float>(*tensor, name, {rows}, targets) : nullptr;
    };
    const int64_t* const ids = data<int64_t>(targets, "targets", {rows}, targets);
    const msk::Slopes slopes{data<bool>(in_support, "in_support", {rows}, targets), floats(safe_sum, "safe_sum"),
                             floats(entropy, "entropy"), floats(grad_log_probs, "grad_log_probs"),
                             floats(grad_entropy, "grad_entropy")};
    Tensor out = at::empty({3, rows}, targets.options().dtype(at::kFloat));
    float* const p = out.mutable_data_ptr<float>();
    const float t = static_cast<float>(temperature);
    launch(
        targets, of_rows([=](int64_t row) { msk::factors_row(row, ids, rows, slopes, t, p); }),
        [&](auto stream) { msk::cuda::factors(ids, rows, slopes, t, p, stream); });
    return out;
}

void gradient(const Tensor& logits, const Tensor& targets, int64_t first_column, const Tensor& maximum,
              const Tensor& factors, std::optional<double> log_rho, double temperature, const Tensor& out) {
    const auto x = view(logits);
    const auto t = view(targets, first_column, logits);
    const float* const most = data<float>(maximum, "maximum", {logits.size(0)}, logits);
    const float* const f = data<float>(factors, "factors", {3, logits.size(0)}, logits);
    const auto o = options(log_rho, temperature, false);
    TORCH_CHECK_VALUE(out.sizes() == logits.sizes() && out.is_contiguous() && out.scalar_type() == logits.scalar_type() &&
                          out.device() == logits.device(),
                      "out must be like logits");
    void* const p = out.mutable_data_ptr();
    launch(
        logits, [&](Isa isa, msk::Range rows) { msk::gradient(isa, x, t, most, f, o, p, rows); },
        [&](auto stream) { msk::cuda::gradient(x, t, most, f, o, p, stream); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.attr("torch") = TORCH_VERSION; // another release may lay its classes out otherwise
    using namespace pybind11::literals;
#ifdef WITH_CUDA
    module.attr("cuda") = true;
#else
    module.attr("cuda") = false;
#endif
    module.def("extremes", &extremes, "logits"_a, "targets"_a, "first_column"_a);
    module.def("sums", &sums, "logits"_a, "maximum"_a, "log_rho"_a, "temperature"_a, "with_entropy"_a);
    module.def("extremes_and_sums", &extremes_and_sums, "logits"_a, "targets"_a, "log_rho"_a, "temperature"_a,
               "with_entropy"_a);
    module.def("finish", &finish, "targets"_a, "extremes"_a, "sums"_a, "log_rho"_a, "temperature"_a, "with_entropy"_a,
               "vocabulary"_a);
    module.def("factors", &factors, "targets"_a, "in_support"_a, "safe_sum"_a, "entropy"_a, "grad_log_probs"_a,
               "grad_entropy"_a, "temperature"_a);
    module.def("gradient", &gradient, "logits"_a, "targets"_a, "first_column"_a, "maximum"_a, "factors"_a, "log_rho"_a,
               "temperature"_a, "out"_a);
}
