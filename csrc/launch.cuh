// Launches of kernels whose failures are exceptions.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "device.cuh"

inline void check(cudaError_t error, const char* launcher) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // so that torch does not find it
    throw std::runtime_error(std::string(launcher) + ": " + cudaGetErrorString(error));
}

inline int device_attribute(cudaDeviceAttr attribute, const char* launcher) {
    int device, value;
    check(cudaGetDevice(&device), launcher);
    check(cudaDeviceGetAttribute(&value, attribute, device), launcher);
    return value;
}

struct Grid {
    int64_t blocks;
    int threads;        // of a block, whole warps
    int cluster = 1;    // so many blocks in a row are one
    size_t shared = 0;  // bytes of dynamic shared memory per block
};

template <typename... Parameters, typename... Arguments>
void launch(const char* launcher, const Grid& grid, void* stream, void (*kernel)(Parameters...), Arguments... arguments) {
    if (grid.blocks > std::numeric_limits<int>::max())
        throw std::runtime_error(std::string(launcher) + ": more rows than a grid can have blocks");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = grid.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid.blocks);
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = grid.cluster > 1;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), launcher);
    check(cudaGetLastError(), launcher);
}
