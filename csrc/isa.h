#pragma once

#include <cstdint>

struct Bf16 {
    uint16_t bits;
};

// Instruction sets for which the CPU kernels are compiled; every processor of the architecture supports generic.
enum class Isa { generic, avx2, avx512 };
