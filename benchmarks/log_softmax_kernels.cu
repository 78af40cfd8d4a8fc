// The log-softmax kernels alone, without torch: milliseconds of each at 8,192 rows of bf16 logits, medians of 11 launches.
//
//   nvcc -std=c++17 -O3 -Icsrc -gencode=arch=compute_90a,code=sm_90a benchmarks/log_softmax_kernels.cu -o kernels && ./kernels
#include <algorithm>
#include <cstdio>
#include <vector>

#include "launch.cuh"
#include "masked_log_softmax/kernels.cuh"

using namespace masked_log_softmax;
using namespace masked_log_softmax::cuda;

// Normal numbers of standard deviation 2.
__global__ void fill(uint16_t* p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 20) * 40503u;
        h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
        const float a = (h & 0xffff) / 65536.f, b = (h >> 16) / 65536.f;
        p[i] = __bfloat16_as_ushort(__float2bfloat16_rn(2 * sqrtf(-2 * logf(a + 1e-6f)) * cospif(2 * b)));
    }
}

int main() {
    constexpr int64_t rows = 8192;
    uint16_t* x;
    float *extremes, *sums, *factors;
    int64_t* ids;
    check(cudaMalloc(&x, rows * 201088 * 2), "logits");
    check(cudaMalloc(&extremes, rows * 8), "extremes");
    check(cudaMalloc(&sums, rows * 12), "sums");
    check(cudaMalloc(&factors, rows * 12), "factors");
    check(cudaMalloc(&ids, rows * 8), "targets");
    check(cudaMemset(ids, 0, rows * 8), "targets");
    const std::vector<float> half(rows * 3, 0.5f);
    check(cudaMemcpy(factors, half.data(), rows * 12, cudaMemcpyHostToDevice), "factors");
    for (const int64_t columns : {201088, 151936, 50304}) {
        fill<<<2640, 256>>>(x, rows * columns);
        const Logits logits{x, true, rows, columns};
        const Targets targets{ids, 0};
        const Options options{-13.0f, 1.0f, false};
        const Grid grid{rows, THREADS};
        auto time = [&](const char* name, auto run) {
            std::vector<float> times;
            for (int k = 0; k < 13; ++k) {
                cudaEvent_t start, end;
                check(cudaEventCreate(&start), name), check(cudaEventCreate(&end), name);
                check(cudaEventRecord(start), name);
                run();
                check(cudaEventRecord(end), name), check(cudaEventSynchronize(end), name);
                float ms;
                check(cudaEventElapsedTime(&ms, start, end), name);
                if (k > 1) times.push_back(ms);
            }
            std::sort(times.begin(), times.end());
            printf("%-18s %7lld columns: %.3f ms\n", name, (long long)columns, times[times.size() / 2]);
        };
        time("extremes_and_sums", [&] {
            launch("both", grid, nullptr, extremes_and_sums_kernel<Bf16, 8>, logits, targets, options, extremes, sums);
        });
        time("extremes", [&] { launch("extremes", grid, nullptr, extremes_kernel<Bf16, 8>, logits, targets, extremes); });
        time("sums", [&] {
            launch("sums", grid, nullptr, sums_kernel<Bf16, 8>, logits, (const float*)extremes, options, sums);
        });
        time("gradient", [&] {
            launch("gradient", grid, nullptr, gradient_kernel<Bf16, 8>, logits, targets, (const float*)extremes,
                   (const float*)factors, options, (void*)x);
        });
    }
}
