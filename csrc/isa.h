#pragma once

#include <cstdint>

struct Bf16 {
    uint16_t bits;
};

// Instruction sets that the CPU kernels are compiled for; generic is what every processor of the architecture has.
enum class Isa { generic, avx2, avx512 };
