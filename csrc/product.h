// C (+)= A B with C in registers, for kernels that are compiled once per instruction set: see for_each_isa.h.
//
// A is read as scalars, in any memory layout; B and C are read row by row as vectors. An element of C is summed from the first
// column of A to the last, with one rounding per step if the processor has fused multiply-add. The order of the sum does not
// depend on the number of rows or vectors.

#define UNROLL _Pragma("GCC unroll 8")  // so that the sums stay in registers

// C [M, N vectors] = (add ? C : 0) + A [M, depth] B [depth, N vectors]
template <int M, int N, bool add>
void product_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row, float* c,
                  int64_t c_row) {
    Float sum[M][N];
    UNROLL for (int m = 0; m < M; ++m)
        UNROLL for (int n = 0; n < N; ++n) sum[m][n] = add ? load(c + m * c_row + n * LANES) : Float{};
    for (int64_t i = 0; i < depth; ++i) {
        Float row[N];
        UNROLL for (int n = 0; n < N; ++n) row[n] = load(b + i * b_row + n * LANES);
        UNROLL for (int m = 0; m < M; ++m) {
            const Float x = splat(a[m * a_row + i * a_column]);
            UNROLL for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(x, row[n], sum[m][n]);
        }
    }
    UNROLL for (int m = 0; m < M; ++m)
        UNROLL for (int n = 0; n < N; ++n) store(c + m * c_row + n * LANES, sum[m][n]);
}

#undef UNROLL

// The same product with any number of rows, M at a time.
template <int M, int N, bool add>
void product_rows(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b,
                  int64_t b_row, float* c, int64_t c_row) {
    for (; rows >= M; rows -= M, a += M * a_row, c += M * c_row)
        product_tile<M, N, add>(depth, a, a_row, a_column, b, b_row, c, c_row);
    if constexpr (M > 1)
        if (rows) product_rows<M - 1, N, add>(rows, depth, a, a_row, a_column, b, b_row, c, c_row);
}
