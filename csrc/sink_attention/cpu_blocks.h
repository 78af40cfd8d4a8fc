// The block kernels, compiled once per instruction set: see for_each_isa.h.
//
// Queries lie in the lanes of the vectors: lane i * G + g is query i of the block with head g of the G heads that share a key
// head. Scores S^T [keys][lanes] and outputs O^T [D][lanes] then need no sums across lanes. Every product has the form
// C += A B, with A read as scalars in any memory layout, and B and C read row by row as vectors.

#include "product.h"

constexpr int ROWS = 4;                              // rows of C in registers
constexpr int COLUMNS = LANES == 16 ? 4 : 2;         // columns of C in registers, in vectors
constexpr float LOG2_E = 1.44269504088896341f, LOG_2 = 0.693147180559945309f;

// C [rows, columns] = (add ? C : 0) + A [rows, depth] B [depth, columns]; columns is a multiple of LANES.
template <bool add, int N = COLUMNS>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b,
             int64_t b_row, float* c, int64_t c_row) {
    constexpr int64_t WIDTH = N * LANES;
    for (; columns >= WIDTH; columns -= WIDTH, b += WIDTH, c += WIDTH)
        product_rows<ROWS, N, add>(rows, depth, a, a_row, a_column, b, b_row, c, c_row);
    if constexpr (N > 1)
        if (columns) product<add, N - 1>(rows, columns, depth, a, a_row, a_column, b, b_row, c, c_row);
}

// Returns keys or values as fp32 rows: in place, or converted into `scratch` [count, dim].
struct Rows {
    const float* data;
    int64_t stride;
};

inline Rows fp32_rows(const float* x, int64_t count, int64_t stride, int64_t dim, float* scratch) {
    (void)count, (void)dim, (void)scratch;
    return {x, stride};
}

inline Rows fp32_rows(const Bf16* x, int64_t count, int64_t stride, int64_t dim, float* scratch) {
    for (int64_t i = 0; i < count; ++i) {
        const Bf16* from = x + i * stride;
        float* to = scratch + i * dim;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
        for (; d < dim; ++d) to[d] = to_float(from[d]);
    }
    return {scratch, dim};
}

// Mapping from the lanes of a block of queries to rows of [Tq, H, *].
struct Lanes {
    int64_t used, padded, groups, heads, first_row;  // first_row: row of [Tq * H]
    int64_t row(int64_t lane) const { return first_row + lane / groups * heads + lane % groups; }
};

inline Lanes lanes_of(const Problem& p, const QueryBlock& block) {
    const int64_t groups = p.heads / p.kv_heads, used = block.count * groups;
    return {used, (used + LANES - 1) / LANES * LANES, groups, p.heads, block.query * p.heads + block.kv_head * groups};
}

// Writes rows [used][dim] of x, times factor, as columns: out [dim][padded], with zeros in unused lanes.
template <typename T>
void to_columns(const T* x, const Lanes& lanes, int64_t dim, float factor, float* out) {
    for (int64_t lane = 0; lane < lanes.padded; ++lane) {
        const T* from = x + lanes.row(lane) * dim;
        for (int64_t d = 0; d < dim; ++d)
            out[d * lanes.padded + lane] = lane < lanes.used ? to_float(from[d]) * factor : 0.0f;
    }
}

// Writes the same rows as rows: out [padded][width], with zeros beyond dim and in unused lanes.
template <typename T>
void to_rows(const T* x, const Lanes& lanes, int64_t dim, int64_t width, float* out) {
    for (int64_t lane = 0; lane < lanes.padded; ++lane) {
        const T* from = x + lanes.row(lane) * dim;
        float* to = out + lane * width;
        int64_t d = 0;
        if (lane < lanes.used) {
            for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
            for (; d < dim; ++d) to[d] = to_float(from[d]);
        }
        for (; d < width; ++d) to[d] = 0.0f;
    }
}

// Position of the query of each lane. Unused lanes have the position of the last query.
inline void positions_of(const QueryBlock& block, const Lanes& lanes, int32_t* positions) {
    for (int64_t lane = 0; lane < lanes.padded; ++lane)
        positions[lane] = block.position + (lane < lanes.used ? lane : lanes.used - 1) / lanes.groups;
}

INLINE Int load_positions(const int32_t* p) {
    Int x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// -1 in each lane whose query at `position` sees `key`, else 0.
INLINE Int sees(Int position, int64_t key, int64_t window) {
    const Int j = (int32_t)key - Int{};
    const Int causal = j <= position;
    return window ? causal & (j > position - (int32_t)window) : causal;
}

// True if any query of the block does not see any one key of [begin, end).
inline bool needs_mask(const Problem& p, const QueryBlock& block, int64_t begin, int64_t end) {
    return end - 1 > block.position || (p.window && begin <= block.position + block.count - 1 - p.window);
}

// Blocks of keys begin at multiples of KEY_BLOCK for every window. The sums of a query are then cut at the same keys, whatever
// other queries are in the block, and have the same bits in a prefill, in a decode and in the trainer.
inline int64_t first_key(const Problem& p, const QueryBlock& block) {
    return p.window && block.position >= p.window ? (block.position - p.window + 1) / KEY_BLOCK * KEY_BLOCK : 0;
}

struct Cut {  // hands out pieces of the scratch memory, each 64-byte aligned
    float* next;
    float* take(int64_t count) {
        float* piece = next;
        next += (count + 15) / 16 * 16;
        return piece;
    }
};

template <typename T>
void forward(const Problem& p, const QueryBlock& block, void* out, float* lse, float* scratch) {
    const Lanes lanes = lanes_of(p, block);
    const int64_t n = lanes.padded, key_stride = p.kv_heads * p.dim, value_stride = p.kv_heads * p.value_dim;
    Cut cut{scratch};
    float* const queries = cut.take(p.dim * n);        // [D][n], in units of log 2
    float* const scores = cut.take(KEY_BLOCK * n);     // [keys][n]
    float* const sum_out = cut.take(p.value_dim * n);  // [Dv][n]
    float* const most = cut.take(n);
    float* const total = cut.take(n);
    float* const shrink = cut.take(n);
    float* const key_rows = cut.take(KEY_BLOCK * p.dim);
    float* const value_rows = cut.take(KEY_BLOCK * p.value_dim);
    auto* const positions = reinterpret_cast<int32_t*>(cut.take(n));

    to_columns(static_cast<const T*>(p.q), lanes, p.dim, p.scale * LOG2_E, queries);
    positions_of(block, lanes, positions);
    const T* const keys = static_cast<const T*>(p.k) + block.key * key_stride + block.kv_head * p.dim;
    const T* const values = static_cast<const T*>(p.v) + block.key * value_stride + block.kv_head * p.value_dim;
    for (int64_t i = 0; i < n; ++i) most[i] = -INFINITY, total[i] = 0;
    std::memset(sum_out, 0, p.value_dim * n * sizeof(float));

    const int64_t last = block.position + block.count;
    for (int64_t begin = first_key(p, block); begin < last; begin += KEY_BLOCK) {
        const int64_t end = begin + KEY_BLOCK < last ? begin + KEY_BLOCK : last, count = end - begin;
        const Rows k = fp32_rows(keys + begin * key_stride, count, key_stride, p.dim, key_rows);
        const Rows v = fp32_rows(values + begin * value_stride, count, value_stride, p.value_dim, value_rows);
        product<false>(count, n, p.dim, k.data, k.stride, 1, queries, n, scores, n);
        const bool masked = needs_mask(p, block, begin, end);
        for (int64_t lane = 0; lane < n; lane += LANES) {
            const Int position = load_positions(positions + lane);
            const Float before = load(most + lane);
            Float now = before;
            for (int64_t j = 0; j < count; ++j) {
                Float s = load(scores + j * n + lane);
                if (masked) {
                    s = select(sees(position, begin + j, p.window), s, splat(-INFINITY));
                    store(scores + j * n + lane, s);
                }
                now = maximum(s, now);
            }
            // A query may see none of these keys and none before them; avoid -inf minus -inf in this case.
            const Float origin = select(now == -INFINITY, Float{}, now);
            const Float factor = exp2(before - origin);
            Float sum = load(total + lane) * factor;
            for (int64_t j = 0; j < count; ++j) {
                const Float e = exp2(load(scores + j * n + lane) - origin);
                store(scores + j * n + lane, e);
                sum += e;
            }
            store(most + lane, now);
            store(total + lane, sum);
            store(shrink + lane, factor);
        }
        for (int64_t d = 0; d < p.value_dim; ++d)
            for (int64_t lane = 0; lane < n; lane += LANES)
                store(sum_out + d * n + lane, load(sum_out + d * n + lane) * load(shrink + lane));
        product<true>(p.value_dim, n, count, v.data, 1, v.stride, scores, n, sum_out, n);
    }

    for (int64_t lane = 0; lane < lanes.used; ++lane) {
        const int64_t row = lanes.row(lane), head = row % p.heads, token = row / p.heads;
        const float sink = p.sinks ? p.sinks[head] * LOG2_E : -INFINITY;
        const float origin = sink > most[lane] ? sink : most[lane];
        const float shrunk = std::exp2(most[lane] - origin);
        const float denominator = total[lane] * shrunk + std::exp2(sink - origin);
        lse[head * p.q_tokens + token] = (origin + std::log2(denominator)) * LOG_2;
        const float factor = shrunk / denominator;
        T* const to = static_cast<T*>(out) + row * p.value_dim;
        for (int64_t d = 0; d < p.value_dim; d += LANES) {
            const int64_t width = p.value_dim - d < LANES ? p.value_dim - d : LANES;
            Float x{};
            for (int64_t i = 0; i < width; ++i) x[i] = sum_out[(d + i) * n + lane] * factor;
            store_some(to + d, x, width);
        }
    }
}

template <typename T>
void delta(const Problem& p, const void* grad, const void* out, float* delta, int64_t begin, int64_t end) {
    for (int64_t row = begin * p.heads; row < end * p.heads; ++row) {
        const T* const a = static_cast<const T*>(grad) + row * p.value_dim;
        const T* const b = static_cast<const T*>(out) + row * p.value_dim;
        Float total{};
        int64_t d = 0;
        for (; d + LANES <= p.value_dim; d += LANES) total += load(a + d) * load(b + d);
        if (d < p.value_dim)
            total += load_some(a + d, p.value_dim - d, 0.0f) * load_some(b + d, p.value_dim - d, 0.0f);
        delta[row % p.heads * p.q_tokens + row / p.heads] = sum(total);
    }
}

// C [rows, dim] += A [rows, depth] B [depth, width]. The rows of C (`dim` floats) need not be a multiple of a vector.
inline void add_product(int64_t rows, int64_t dim, int64_t width, int64_t depth, const float* a, int64_t a_row,
                        const float* b, float* c, int64_t c_row, float* scratch) {
    if (width == dim) {
        product<true>(rows, dim, depth, a, a_row, 1, b, width, c, c_row);
        return;
    }
    product<false>(rows, width, depth, a, a_row, 1, b, width, scratch, width);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < dim; ++d) c[i * c_row + d] += scratch[i * width + d];
}

inline int64_t padded_width(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

template <typename T>
void backward(const Problem& p, const Tile& tile, const void* grad, const float* lse, const float* delta, float* grad_q,
              float* grad_k, float* grad_v, float* scratch) {
    const QueryBlock& block = tile.queries;
    const Lanes lanes = lanes_of(p, block);
    const int64_t n = lanes.padded, key_stride = p.kv_heads * p.dim, value_stride = p.kv_heads * p.value_dim;
    const int64_t width = padded_width(p.dim), value_width = padded_width(p.value_dim);
    Cut cut{scratch};
    float* const queries = cut.take(p.dim * n);              // [D][n], in units of log 2
    float* const grads = cut.take(p.value_dim * n);          // [Dv][n]
    float* const query_rows = cut.take(n * width);           // [n][D]
    float* const grad_rows = cut.take(n * value_width);      // [n][Dv]
    float* const sum_q = cut.take(p.dim * n);                // [D][n]
    float* const weights = cut.take(KEY_BLOCK * n);          // [keys][n]
    float* const grad_scores = cut.take(KEY_BLOCK * n);      // [keys][n]
    float* const key_rows = cut.take(KEY_BLOCK * p.dim);
    float* const value_rows = cut.take(KEY_BLOCK * p.value_dim);
    float* const spare = cut.take(KEY_BLOCK * (width > value_width ? width : value_width));
    float* const lane_lse = cut.take(n);
    float* const lane_delta = cut.take(n);
    auto* const positions = reinterpret_cast<int32_t*>(cut.take(n));

    to_columns(static_cast<const T*>(p.q), lanes, p.dim, p.scale * LOG2_E, queries);
    to_columns(static_cast<const T*>(grad), lanes, p.value_dim, 1.0f, grads);
    to_rows(static_cast<const T*>(p.q), lanes, p.dim, width, query_rows);
    to_rows(static_cast<const T*>(grad), lanes, p.value_dim, value_width, grad_rows);
    positions_of(block, lanes, positions);
    for (int64_t lane = 0; lane < n; ++lane) {
        const int64_t row = lanes.row(lane), at = row % p.heads * p.q_tokens + row / p.heads;
        lane_lse[lane] = lane < lanes.used ? lse[at] * LOG2_E : INFINITY;  // the weights of an unused lane are 0
        lane_delta[lane] = lane < lanes.used ? delta[at] : 0.0f;
    }
    std::memset(sum_q, 0, p.dim * n * sizeof(float));
    const T* const keys = static_cast<const T*>(p.k) + block.key * key_stride + block.kv_head * p.dim;
    const T* const values = static_cast<const T*>(p.v) + block.key * value_stride + block.kv_head * p.value_dim;

    for (int64_t begin = tile.key_begin; begin < tile.key_end; begin += KEY_BLOCK) {
        const int64_t end = begin + KEY_BLOCK < tile.key_end ? begin + KEY_BLOCK : tile.key_end, count = end - begin;
        const Rows k = fp32_rows(keys + begin * key_stride, count, key_stride, p.dim, key_rows);
        const Rows v = fp32_rows(values + begin * value_stride, count, value_stride, p.value_dim, value_rows);
        product<false>(count, n, p.dim, k.data, k.stride, 1, queries, n, weights, n);
        product<false>(count, n, p.value_dim, v.data, v.stride, 1, grads, n, grad_scores, n);
        const bool masked = needs_mask(p, block, begin, end);
        for (int64_t lane = 0; lane < n; lane += LANES) {
            const Int position = load_positions(positions + lane);
            const Float log_sum = load(lane_lse + lane), mean = load(lane_delta + lane);
            for (int64_t j = 0; j < count; ++j) {
                Float w = exp2(load(weights + j * n + lane) - log_sum);
                if (masked) w = select(sees(position, begin + j, p.window), w, Float{});
                store(weights + j * n + lane, w);
                store(grad_scores + j * n + lane, w * (load(grad_scores + j * n + lane) - mean) * p.scale);
            }
        }
        const int64_t first = block.key + begin;
        product<true>(p.dim, n, count, k.data, 1, k.stride, grad_scores, n, sum_q, n);
        add_product(count, p.dim, width, n, grad_scores, n, query_rows,
                    grad_k + first * key_stride + block.kv_head * p.dim, key_stride, spare);
        add_product(count, p.value_dim, value_width, n, weights, n, grad_rows,
                    grad_v + first * value_stride + block.kv_head * p.value_dim, value_stride, spare);
    }
    for (int64_t lane = 0; lane < lanes.used; ++lane) {
        float* const to = grad_q + lanes.row(lane) * p.dim;
        for (int64_t d = 0; d < p.dim; ++d) to[d] += sum_q[d * n + lane];
    }
}
