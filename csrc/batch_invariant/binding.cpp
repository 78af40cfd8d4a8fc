// Python module megatron_rl.ops._batch_invariant. The caller (megatron_rl/ops/batch_invariant.py) checks the arguments; the
// checks here only protect memory.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "batch_invariant/cpu.h"
#include "parallel.h"

namespace bi = batch_invariant;
using at::Tensor;

namespace {

bi::Matrix view(const Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(x.is_cpu() && x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1), name,
                      " must be a matrix on the CPU with contiguous rows");
    TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, name, " must be fp32 or bf16, not ",
                      x.scalar_type());
    return {x.const_data_ptr(), x.scalar_type() == at::kBFloat16, x.size(0), x.size(1), x.stride(0)};
}

bi::Matrix fp32(const Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, name, " must be fp32, not ", x.scalar_type());
    return view(x, name);
}

const float* column(const Tensor& x, const char* name, int64_t rows) {
    TORCH_CHECK_VALUE(x.is_cpu() && x.is_contiguous() && x.scalar_type() == at::kFloat && x.numel() == rows, name,
                      " must be one fp32 number a row");
    return x.const_data_ptr<float>();
}

bi::Output output(Tensor& out) { return {out.mutable_data_ptr(), out.scalar_type() == at::kBFloat16, out.size(1)}; }

// Calls task(i, scratch) for i in [0, count) on all threads; a thread takes the next task when it has finished one.
template <typename Task>
void run(int64_t count, int64_t scratch_floats, Task task) {
    if (count == 0) return;
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t begin, int64_t end) {
        const size_t bytes = (scratch_floats * sizeof(float) + 63) / 64 * 64;
        const std::unique_ptr<float, decltype(&std::free)> scratch(static_cast<float*>(std::aligned_alloc(64, bytes)),
                                                                   &std::free);
        if (!scratch) throw std::bad_alloc();
        for (; begin < end; ++begin)
            for (int64_t i = next++; i < count; i = next++) task(i, scratch.get());
    });
}

// Splits the rows of a matrix into ranges [begin, end) over all threads; one thread processes a few rows.
template <typename Task>
void run_rows(const bi::Matrix& x, Task task) {
    pybind11::gil_scoped_release release;
    const int64_t least = 1 + 16384 / std::max<int64_t>(1, x.columns);
    at::parallel_for(0, x.rows, least, [&](int64_t begin, int64_t end) { task(begin, end); });
}

Tensor product(const Tensor& x, const std::vector<int64_t>& counts, const std::vector<Tensor>& weights, int64_t parts,
               at::ScalarType type) {
    const bi::Matrix rows = view(x, "x");
    TORCH_CHECK_VALUE(!weights.empty() && weights.size() == counts.size(), "one weight for each count");
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "the result must be fp32 or bf16");
    const bi::Matrix first = view(weights[0], "weight");
    std::vector<bi::Group> groups;
    int64_t row = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
        const bi::Matrix w = view(weights[i], "weight");
        TORCH_CHECK_VALUE(w.rows == first.rows && w.columns == rows.columns && w.bf16 == first.bf16 && w.stride == first.stride,
                          "weight ", i, " is ", weights[i].sizes(), ", not as the first one, [outputs, ", rows.columns, "]");
        TORCH_CHECK_VALUE(counts[i] >= 0, "counts must not be negative");
        if (counts[i]) groups.push_back({row, row + counts[i], w.data});
        row += counts[i];
    }
    TORCH_CHECK_VALUE(row == rows.rows, "counts are of ", row, " rows, x has ", rows.rows);
    TORCH_CHECK_VALUE(parts >= 1 && (parts & (parts - 1)) == 0 && rows.columns % parts == 0, "parts must be a power of two that "
                      "divides ", rows.columns);
    Tensor out = at::empty({rows.rows, first.rows}, x.options().dtype(type));
    const bi::Product call{rows, first.bf16, first.rows, first.stride, parts, output(out)};
    pybind11::gil_scoped_release release;
    const Isa isa = torch_isa();
    int64_t floats = 0;
    const std::vector<bi::Panels> panels = bi::panels_of(isa, call, groups, floats);
    const Tensor packed = at::empty({floats}, x.options().dtype(at::kFloat));
    float* const copy = packed.mutable_data_ptr<float>();
    const int64_t count = panels.size(), blocks = bi::output_blocks(call);
    run(count, 1, [&](int64_t i, float*) { bi::pack(isa, call, panels[i], copy); });
    run(count * blocks, bi::scratch_floats(isa, call), [&](int64_t i, float* scratch) {
        bi::multiply(isa, call, panels[i % count], copy, i / count, scratch);  // one block of weights after another
    });
    return out;
}

Tensor square_sums(const Tensor& x, int64_t parts) {
    const bi::Matrix rows = view(x, "x");
    TORCH_CHECK_VALUE(parts >= 1 && (parts & (parts - 1)) == 0 && rows.columns % parts == 0, "parts must be a power of two that "
                      "divides ", rows.columns);
    Tensor out = at::empty({rows.rows}, x.options().dtype(at::kFloat));
    float* const to = out.mutable_data_ptr<float>();
    run_rows(rows, [&](int64_t begin, int64_t end) { bi::square_sums(torch_isa(), rows, parts, to, begin, end); });
    return out;
}

Tensor scale_rows(const Tensor& x, const Tensor& factors, const Tensor& weight) {
    const bi::Matrix rows = view(x, "x");
    TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == rows.columns && weight.scalar_type() == x.scalar_type() &&
                          weight.is_contiguous() && weight.is_cpu(),
                      "weight must be ", x.scalar_type(), " [", rows.columns, "]");
    const bi::Matrix w{weight.const_data_ptr(), rows.bf16, 1, rows.columns, rows.columns};
    const float* const f = column(factors, "factors", rows.rows);
    Tensor out = at::empty({rows.rows, rows.columns}, x.options());
    const bi::Output to = output(out);
    run_rows(rows, [&](int64_t begin, int64_t end) { bi::scale_rows(torch_isa(), rows, f, w, to, begin, end); });
    return out;
}

Tensor swish(const Tensor& x, double slope, bool gate_alone) {
    const bi::Matrix rows = view(x, "x");
    Tensor out = at::empty({rows.rows, rows.columns}, x.options());
    const bi::Output to = output(out);
    run_rows(rows, [&](int64_t begin, int64_t end) {
        bi::swish(torch_isa(), rows, static_cast<float>(slope), gate_alone, to, begin, end);
    });
    return out;
}

Tensor softmax(const Tensor& x) {
    const bi::Matrix rows = fp32(x, "x");
    Tensor out = at::empty({rows.rows, rows.columns}, x.options());
    const bi::Output to = output(out);
    run_rows(rows, [&](int64_t begin, int64_t end) { bi::softmax(torch_isa(), rows, to, begin, end); });
    return out;
}

// The k largest values of each row, largest first; among equal values the first index comes first. NaNs come last.
Tensor topk(const Tensor& x, int64_t k) {
    const bi::Matrix rows = fp32(x, "x");
    TORCH_CHECK_VALUE(0 <= k && k <= rows.columns, "k must be at most ", rows.columns);
    Tensor out = at::empty({rows.rows, k}, x.options().dtype(at::kLong));
    int64_t* const to = out.mutable_data_ptr<int64_t>();
    run_rows(rows, [&](int64_t begin, int64_t end) {
        std::vector<int64_t> order(rows.columns);
        for (int64_t row = begin; row < end; ++row) {
            const float* const v = static_cast<const float*>(rows.data) + row * rows.stride;
            for (int64_t i = 0; i < rows.columns; ++i) order[i] = i;
            const auto before = [v](int64_t a, int64_t b) {
                const bool number_a = v[a] == v[a], number_b = v[b] == v[b];
                if (number_a != number_b) return number_a;
                return number_a && v[a] != v[b] ? v[a] > v[b] : a < b;
            };
            std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
            std::copy_n(order.begin(), k, to + row * k);
        }
    });
    return out;
}

Tensor combine(const Tensor& x, const Tensor& places) {
    const bi::Matrix rows = view(x, "x");
    TORCH_CHECK_VALUE(places.is_cpu() && places.dim() == 2 && places.is_contiguous() && places.scalar_type() == at::kLong,
                      "places must be int64 [T, k]");
    const int64_t* const p = places.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < places.numel(); ++i)
        TORCH_CHECK_VALUE(0 <= p[i] && p[i] < rows.rows, "places must be rows of x");
    Tensor out = at::empty({places.size(0), rows.columns}, x.options());
    const bi::Output to = output(out);
    const bi::Matrix result{nullptr, rows.bf16, places.size(0), rows.columns, rows.columns};
    run_rows(result, [&](int64_t begin, int64_t end) {
        bi::combine(torch_isa(), rows, p, places.size(1), to, begin, end);
    });
    return out;
}

Tensor exponential_sums(const Tensor& x, const Tensor& most) {
    const bi::Matrix rows = fp32(x, "x");
    const float* const m = column(most, "most", rows.rows);
    Tensor out = at::empty({rows.rows}, x.options().dtype(at::kLong));
    int64_t* const to = out.mutable_data_ptr<int64_t>();
    run_rows(rows, [&](int64_t begin, int64_t end) { bi::exponential_sums(torch_isa(), rows, m, to, begin, end); });
    return out;
}

// Natural logarithm of a number in units of 2^-FRACTION.
Tensor log_of_sums(const Tensor& sums) {
    TORCH_CHECK_VALUE(sums.is_cpu() && sums.is_contiguous() && sums.scalar_type() == at::kLong, "sums must be int64");
    Tensor out = at::empty(sums.sizes(), sums.options().dtype(at::kDouble));
    double* const to = out.mutable_data_ptr<double>();
    const int64_t* const from = sums.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < sums.numel(); ++i)
        to[i] = std::log(std::ldexp(static_cast<double>(from[i]), -bi::FRACTION));
    return out;
}

// Cosines and sines [positions, n] of fp32 angles (position times frequency), computed one by one with the C library.
// Vectorized functions give other bits at the end of an array than in its middle.
std::tuple<Tensor, Tensor> rotary(int64_t positions, const Tensor& frequencies) {
    const int64_t n = frequencies.numel();
    const float* const f = column(frequencies, "frequencies", n);
    Tensor cosines = at::empty({positions, n}, frequencies.options()), sines = at::empty_like(cosines);
    float *const c = cosines.mutable_data_ptr<float>(), *const s = sines.mutable_data_ptr<float>();
    pybind11::gil_scoped_release release;
    at::parallel_for(0, positions * n, 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const double angle = static_cast<float>(i / n) * f[i % n];
            c[i] = static_cast<float>(std::cos(angle)), s[i] = static_cast<float>(std::sin(angle));
        }
    });
    return {cosines, sines};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch") = TORCH_VERSION; // another release may lay its classes out otherwise
    m.def("product", &product);
    m.def("square_sums", &square_sums);
    m.def("scale_rows", &scale_rows);
    m.def("swish", &swish);
    m.def("softmax", &softmax);
    m.def("topk", &topk);
    m.def("combine", &combine);
    m.def("exponential_sums", &exponential_sums);
    m.def("log_of_sums", &log_of_sums);
    m.def("rotary", &rotary);
}
