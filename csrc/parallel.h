// Torch's CPU thread pool and instruction set, for kernels that do not depend on torch.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include "isa.h"

// The instruction set that torch uses: the processor's best, or the value of ATEN_CPU_CAPABILITY.
inline Isa torch_isa() {
    static const Isa isa = [] {
        const std::string name = at::get_cpu_capability();
#if defined(__x86_64__)
        if (name.rfind("AVX512", 0) == 0) return Isa::avx512;
        if (name == "AVX2") return Isa::avx2;
#endif
        return Isa::generic;
    }();
    return isa;
}
