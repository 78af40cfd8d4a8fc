// Compiles the file KERNELS (defined by the including .cpp) once per instruction set, each in a separate namespace.
// FOR_ISA(isa, f)(...) then calls the copy of f that is compiled for `isa`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa.h"

#define LANES 4
namespace generic {
#include "simd.h"
#include KERNELS
}  // namespace generic
#undef LANES

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LANES 8
namespace avx2 {
#include "simd.h"
#include KERNELS
}  // namespace avx2
#undef LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LANES 16
namespace avx512 {
#include "simd.h"
#include KERNELS
}  // namespace avx512
#undef LANES
#pragma GCC pop_options

#define FOR_ISA(isa, function) \
    ((isa) == Isa::avx512 ? avx512::function : (isa) == Isa::avx2 ? avx2::function : generic::function)
#else
#define FOR_ISA(isa, function) (generic::function)
#endif
