// CUDA for kernels that are compiled for the CPU: csrc/device.cuh includes this file where nvcc does not compile.
//
// Every thread of a block is a fiber that runs until a barrier or a shuffle makes it wait. Then warps go on in an
// order that a seed draws, so that what is right only in one order differs between seeds. Shared memory is NaN before a block
// starts. Divergent barriers, deadlocks and launches that CUDA would refuse are errors of the launch. Not emulated: dynamic
// shared memory, clusters, the memory model between barriers, and time.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define SHARED(type, name) type& name = *emulation::shared<type>(__LINE__)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int WARP_SIZE = 32;
constexpr size_t STACK = 64 << 10;

// Knuth's MMIX generator.
struct Random {
    uint64_t state;
    unsigned operator()() { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; }
};

struct Barrier {
    int arrived = 0, line = 0;
    unsigned generation = 0;
};

struct Warp {
    Barrier barrier;
    uint32_t values[2][WARP_SIZE];
    unsigned priority;
};

struct Block {
    Barrier barrier;
    std::vector<Warp> warps;
    std::map<int, std::vector<unsigned char>> variables;  // shared ones, by the line of their declaration
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    int thread;
    bool done;
    const Barrier* waits_for;
    unsigned generation;

    bool runnable() const { return !done && !(waits_for && waits_for->generation == generation); }
};

inline struct {
    unsigned seed = 0;  // draws the order of the warps; tests set it
    // The launch.
    std::vector<std::unique_ptr<Fiber>> fibers;
    Block block;
    std::function<void()> kernel;
    Fiber* self;
    ucontext_t scheduler;
    std::string error;
} state;

inline void leave() { swapcontext(&state.self->context, &state.scheduler); }

inline void fail(const std::string& what) {
    state.error = what;
    leave();  // for ever
}

// What g++ calls with -fsanitize=alignment,bounds; the processor would let the first pass.
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(void*, void*) { fail("misaligned address"); }
extern "C" inline __attribute__((used)) void __ubsan_handle_out_of_bounds(void*, void*) { fail("index beyond an array"); }

inline void arrive(Barrier& barrier, int expected, int line) {
    if (barrier.arrived == 0) barrier.line = line;
    if (barrier.line != line) fail("threads wait at different barriers");
    state.self->waits_for = &barrier;
    state.self->generation = barrier.generation;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    leave();
}

inline int threads() { return blockDim.x; }

template <typename T>
T* shared(int line) {
    auto& memory = state.block.variables[line];
    if (memory.empty()) memory.assign(sizeof(T), 0xff);
    return reinterpret_cast<T*>(memory.data());
}

inline void run_fiber() {
    state.kernel();
    state.self->done = true;
    leave();
}

inline void run_block(int index, Random& random) {
    state.block = {};
    state.block.warps.resize(threads() / WARP_SIZE);
    blockIdx = dim3(index);
    while (int(state.fibers.size()) < threads()) state.fibers.push_back(std::make_unique<Fiber>());
    for (int t = 0; t < threads(); ++t) {
        Fiber& fiber = *state.fibers[t];
        fiber.thread = t;
        fiber.done = false;
        fiber.waits_for = nullptr;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, run_fiber, 0);
    }
    auto& warps = state.block.warps;
    auto draw_priorities = [&] {
        for (Warp& warp : warps) warp.priority = random();
    };
    for (draw_priorities(); state.error.empty();) {
        if (random() % 8 == 0) draw_priorities();
        int next = -1;
        bool all_done = true;
        for (int w = 0; w < int(warps.size()); ++w) {
            const auto fiber = state.fibers.begin() + w * WARP_SIZE;
            auto is = [&](auto what) { return std::any_of(fiber, fiber + WARP_SIZE, what); };
            all_done &= !is([](auto& f) { return !f->done; });
            if (is([](auto& f) { return f->runnable(); }) && (next < 0 || warps[w].priority > warps[next].priority)) next = w;
        }
        if (all_done) return;
        if (next < 0) {
            state.error = "deadlock: threads wait at a barrier that others have passed by";
            return;
        }
        for (int lane = 0; lane < WARP_SIZE && state.error.empty(); ++lane) {
            Fiber& fiber = *state.fibers[next * WARP_SIZE + lane];
            if (!fiber.runnable()) continue;
            fiber.waits_for = nullptr;
            state.self = &fiber;
            threadIdx = dim3(fiber.thread);
            swapcontext(&state.scheduler, &fiber.context);
        }
    }
}

}  // namespace emulation

// In kernels.

inline void __syncthreads(int line = __builtin_LINE()) {
    emulation::arrive(emulation::state.block.barrier, emulation::threads(), line);
}

template <typename To, typename From>
To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float __shfl_xor_sync(unsigned mask, float value, int distance, int line = __builtin_LINE()) {
    using namespace emulation;
    if (mask != 0xffffffff) fail("only whole warps shuffle here");
    const int lane = state.self->thread % WARP_SIZE;
    Warp& warp = state.block.warps[state.self->thread / WARP_SIZE];
    // A warp gets no further than one shuffle ahead of its slowest lane: two sets of slots are enough.
    uint32_t* const slots = warp.values[warp.barrier.generation % 2];
    slots[lane] = bits_as<uint32_t>(value);
    arrive(warp.barrier, WARP_SIZE, line);
    return bits_as<float>(slots[(lane ^ distance) % WARP_SIZE]);
}

using std::max;
using std::min;
inline float maximum_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline float exp2_approx(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
struct Bfloat16 {
    uint16_t bits;
};
inline Bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return {uint16_t(x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(Bfloat16 x) { return x.bits; }

// On the host.

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorLaunchFailure };
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return emulation::state.error.c_str(); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
    using namespace emulation;
    gridDim = config->gridDim;
    blockDim = config->blockDim;
    state.error = "invalid launch";
    if (gridDim.x == 0 || blockDim.x == 0 || blockDim.x % WARP_SIZE || blockDim.x > 1024) return cudaErrorInvalidValue;
    state.error.clear();
    state.kernel = [=] { kernel(arguments...); };
    Random random{state.seed};
    for (unsigned x = 0; x < gridDim.x && state.error.empty(); ++x) run_block(x, random);
    return state.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
