// Operators of which a row's result depends on that row alone, bit for bit, on the CPU: not on the rows beside it, nor on the
// number of threads. What each computes is said in megatron_rl/ops/batch_invariant.py.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace batch_invariant {

// A matrix of fp32 or bf16, rows contiguous and `stride` elements apart.
struct Matrix {
    const void* data;
    bool bf16;
    int64_t rows, columns, stride;
};

struct Output {
    void* data;
    bool bf16;
    int64_t stride;
};

// Rows [begin, end) of x, and the weight [outputs, inputs] that they are multiplied with.
struct Group {
    int64_t begin, end;
    const void* weight;
};

// out = x W^T, group by group. Each output is the sum of `parts` sums over equal parts of the inputs, added up pairwise;
// a part's products are added one after the other.
struct Product {
    Matrix x;
    bool bf16_weights;
    int64_t outputs;
    int64_t weight_stride;
    int64_t parts;
    Output out;
};

// Tokens that are worked on together: some of one group. packed: where they begin in the packed copy of x.
struct Panels {
    int64_t begin, end;
    const void* weight;
    int64_t packed;
};

// A copy of x by panels, [inputs][tokens of a panel] in fp32, is made first: so many floats.
std::vector<Panels> panels_of(Isa isa, const Product& product, const std::vector<Group>& groups, int64_t& packed_floats);
void pack(Isa isa, const Product& product, const Panels& panels, float* packed);

int64_t output_blocks(const Product& product);
int64_t scratch_floats(Isa isa, const Product& product);
void multiply(Isa isa, const Product& product, const Panels& panels, const float* packed, int64_t output_block, float* scratch);

// Rows [begin, end) each.
void square_sums(Isa isa, const Matrix& x, int64_t parts, float* out, int64_t begin, int64_t end);
void scale_rows(Isa isa, const Matrix& x, const float* factors, const Matrix& weight, const Output& out, int64_t begin,
                int64_t end);
void swish(Isa isa, const Matrix& x, float slope, bool gate_alone, const Output& out, int64_t begin, int64_t end);
void softmax(Isa isa, const Matrix& x, const Output& out, int64_t begin, int64_t end);
void combine(Isa isa, const Matrix& x, const int64_t* places, int64_t places_per_row, const Output& out, int64_t begin,
             int64_t end);

// The sum of exp(x - most) over a row's columns, whose terms are rounded to multiples of 2^-FRACTION: sums of integers are the
// same in any order, and so over any cut of a row.
constexpr int FRACTION = 42;
void exponential_sums(Isa isa, const Matrix& x, const float* most, int64_t* out, int64_t begin, int64_t end);

}  // namespace batch_invariant
