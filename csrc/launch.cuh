// Kernel launches that throw an exception on failure.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "device.cuh"

inline void check(cudaError_t error, const char* launcher) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that torch does not report it
    throw std::runtime_error(std::string(launcher) + ": " + cudaGetErrorString(error));
}

struct Grid {
    int64_t blocks;
    int threads;  // per block, a multiple of the warp size
};

template <typename... Parameters, typename... Arguments>
void launch(const char* launcher, const Grid& grid, void* stream, void (*kernel)(Parameters...), Arguments... arguments) {
    if (grid.blocks > std::numeric_limits<int>::max())
        throw std::runtime_error(std::string(launcher) + ": more rows than a grid can have blocks");
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid.blocks);
    config.blockDim = dim3(grid.threads);
    config.stream = static_cast<cudaStream_t>(stream);
    check(cudaLaunchKernelEx(&config, kernel, arguments...), launcher);
    check(cudaGetLastError(), launcher);
}
