#include "batch_invariant/cpu.h"

namespace {

constexpr int64_t OUTPUTS = 96;  // outputs per block, a multiple of ROWS of the kernels
constexpr int64_t DEPTH = 256;   // inputs processed at a time, so that a block of weights stays in the second-level cache

}  // namespace

using batch_invariant::FRACTION;
using batch_invariant::Group;
using batch_invariant::Matrix;
using batch_invariant::Output;
using batch_invariant::Panels;
using batch_invariant::Product;

#define KERNELS "batch_invariant/cpu_kernels.h"
#include "for_each_isa.h"

namespace batch_invariant {

#define CALL(is_bf16, function, ...) \
    ((is_bf16) ? FOR_ISA(isa, function<Bf16>)(__VA_ARGS__) : FOR_ISA(isa, function<float>)(__VA_ARGS__))

std::vector<Panels> panels_of([[maybe_unused]] Isa isa, const Product& product, const std::vector<Group>& groups,
                              int64_t& packed_floats) {
    return FOR_ISA(isa, panels_of)(product, groups, packed_floats);
}

void pack([[maybe_unused]] Isa isa, const Product& product, const Panels& panels, float* packed) {
    CALL(product.x.bf16, pack, product, panels, packed);
}

int64_t output_blocks(const Product& product) { return (product.outputs + OUTPUTS - 1) / OUTPUTS; }

int64_t scratch_floats([[maybe_unused]] Isa isa, const Product& product) { return FOR_ISA(isa, scratch_floats)(product); }

void multiply([[maybe_unused]] Isa isa, const Product& product, const Panels& panels, const float* packed, int64_t output_block,
              float* scratch) {
    CALL(product.bf16_weights, multiply, product, panels, packed, output_block, scratch);
}

void square_sums([[maybe_unused]] Isa isa, const Matrix& x, int64_t parts, float* out, int64_t begin, int64_t end) {
    CALL(x.bf16, square_sums, x, parts, out, begin, end);
}

void scale_rows([[maybe_unused]] Isa isa, const Matrix& x, const float* factors, const Matrix& weight, const Output& out,
                int64_t begin, int64_t end) {
    CALL(x.bf16, scale_rows, x, factors, weight, out, begin, end);
}

void swish([[maybe_unused]] Isa isa, const Matrix& x, float slope, bool gate_alone, const Output& out, int64_t begin,
           int64_t end) {
    CALL(x.bf16, swish, x, slope, gate_alone, out, begin, end);
}

void softmax([[maybe_unused]] Isa isa, const Matrix& x, const Output& out, int64_t begin, int64_t end) {
    FOR_ISA(isa, softmax)(x, out, begin, end);
}

void combine([[maybe_unused]] Isa isa, const Matrix& x, const int64_t* places, int64_t places_per_row, const Output& out,
             int64_t begin, int64_t end) {
    CALL(x.bf16, combine, x, places, places_per_row, out, begin, end);
}

void exponential_sums([[maybe_unused]] Isa isa, const Matrix& x, const float* most, int64_t* out, int64_t begin,
                      int64_t end) {
    FOR_ISA(isa, exponential_sums)(x, most, out, begin, end);
}

}  // namespace batch_invariant
