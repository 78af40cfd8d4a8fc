// Operators on the CPU whose result for a row depends only on this row, bit for bit, and not on other rows or on the number of
// threads. megatron_rl/ops/batch_invariant.py describes what each operator computes.
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

// Rows [begin, end) of x, and the weight [outputs, inputs] of these rows.
struct Group {
    int64_t begin, end;
    const void* weight;
};

// out = x W^T, group by group. Each output consists of `parts` partial sums over equal parts of the inputs, added pairwise. The
// products of a part are added one after another.
struct Product {
    Matrix x;
    bool bf16_weights;
    int64_t outputs;
    int64_t weight_stride;
    int64_t parts;
    Output out;
};

// Tokens of one group that are processed together. packed: index of their first element in the packed copy of x.
struct Panels {
    int64_t begin, end;
    const void* weight;
    int64_t packed;
};

// Number of floats of the packed copy of x: panels [inputs][tokens of a panel] in fp32.
std::vector<Panels> panels_of(Isa isa, const Product& product, const std::vector<Group>& groups, int64_t& packed_floats);
void pack(Isa isa, const Product& product, const Panels& panels, float* packed);

int64_t output_blocks(const Product& product);
int64_t scratch_floats(Isa isa, const Product& product);
void multiply(Isa isa, const Product& product, const Panels& panels, const float* packed, int64_t output_block, float* scratch);

// Each function processes the rows [begin, end).
void square_sums(Isa isa, const Matrix& x, int64_t parts, float* out, int64_t begin, int64_t end);
void scale_rows(Isa isa, const Matrix& x, const float* factors, const Matrix& weight, const Output& out, int64_t begin,
                int64_t end);
void swish(Isa isa, const Matrix& x, float slope, bool gate_alone, const Output& out, int64_t begin, int64_t end);
void softmax(Isa isa, const Matrix& x, const Output& out, int64_t begin, int64_t end);
void combine(Isa isa, const Matrix& x, const int64_t* places, int64_t places_per_row, const Output& out, int64_t begin,
             int64_t end);

// The sum of exp(x - most) over the columns of a row, with terms rounded to multiples of 2^-FRACTION. Sums of integers do not
// depend on the order, so a row may be split at any column.
constexpr int FRACTION = 42;
void exponential_sums(Isa isa, const Matrix& x, const float* most, int64_t* out, int64_t begin, int64_t end);

}  // namespace batch_invariant
