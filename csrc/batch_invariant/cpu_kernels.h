// The kernels, compiled once per instruction set: see for_each_isa.h.
//
// Tokens lie in the lanes of the vectors. The work in a lane does not depend on the other lanes: no sum runs across lanes that
// hold different tokens, and lanes beyond the last token are computed and discarded.

#include "product.h"

constexpr int ROWS = 6;                          // outputs whose sums are in registers
constexpr int COLUMNS = LANES == 16 ? 4 : 2;     // vectors of tokens whose sums are in registers
constexpr int64_t PANEL = COLUMNS * LANES;       // tokens per panel
constexpr int64_t PANELS = 64 / PANEL;           // panels that use a block of weights together
constexpr float LOG2_E = 1.44269504088896341f;

// sums [rows][PANEL] (+)= weights [rows][depth] x [depth][vectors], with tokens in the vectors.
template <bool add, int N = COLUMNS>
void block(int64_t vectors, int64_t rows, int64_t depth, const float* weights, int64_t stride, const float* x, float* sums) {
    if constexpr (N > 1)
        if (vectors < N) return block<add, N - 1>(vectors, rows, depth, weights, stride, x, sums);
    product_rows<ROWS, N, add>(rows, depth, weights, stride, 1, x, N * LANES, sums, PANEL);
}

inline int64_t vectors_of(int64_t tokens) { return (tokens + LANES - 1) / LANES; }

inline int64_t tokens_of(const Panels& p, int64_t panel) {
    const int64_t left = p.end - p.begin - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

inline std::vector<Panels> panels_of(const Product& p, const std::vector<Group>& groups, int64_t& packed_floats) {
    std::vector<Panels> all;
    packed_floats = 0;
    for (const Group& group : groups)
        for (int64_t begin = group.begin; begin < group.end; begin += PANELS * PANEL) {
            const int64_t end = begin + PANELS * PANEL < group.end ? begin + PANELS * PANEL : group.end;
            all.push_back({begin, end, group.weight, packed_floats});
            packed_floats += vectors_of(end - begin) * LANES * p.x.columns;
        }
    return all;
}

template <typename T>
void pack(const Product& p, const Panels& panels, float* packed) {
    float* to = packed + panels.packed;
    for (int64_t panel = 0; panels.begin + panel * PANEL < panels.end; ++panel) {
        const int64_t tokens = tokens_of(panels, panel), width = vectors_of(tokens) * LANES;
        const T* const from = static_cast<const T*>(p.x.data) + (panels.begin + panel * PANEL) * p.x.stride;
        constexpr int64_t STEP = 16;  // columns per step, one cache line per token
        for (int64_t first = 0; first < p.x.columns; first += STEP) {
            const int64_t last = first + STEP < p.x.columns ? first + STEP : p.x.columns;
            for (int64_t token = 0; token < tokens; ++token)
                for (int64_t i = first; i < last; ++i) to[i * width + token] = to_float(from[token * p.x.stride + i]);
            for (int64_t token = tokens; token < width; ++token)
                for (int64_t i = first; i < last; ++i) to[i * width + token] = 0;
        }
        to += width * p.x.columns;
    }
}

inline const float* fp32_weights(const float* from, int64_t, int64_t, int64_t stride, float*, int64_t& out_stride) {
    out_stride = stride;
    return from;
}

inline const float* fp32_weights(const Bf16* from, int64_t rows, int64_t depth, int64_t stride, float* scratch,
                                 int64_t& out_stride) {
    out_stride = (depth + LANES - 1) / LANES * LANES;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t i = 0;
        for (; i + LANES <= depth; i += LANES) store(scratch + row * out_stride + i, load(from + row * stride + i));
        for (; i < depth; ++i) scratch[row * out_stride + i] = to_float(from[row * stride + i]);
    }
    return scratch;
}

template <typename T>
void write(const float* sums, int64_t tokens, int64_t outputs, T* out, int64_t stride) {  // sums [outputs][PANEL]
    for (int64_t token = 0; token < tokens; ++token) {
        T* const to = out + token * stride;
        int64_t i = 0;
        for (; i < outputs; i += LANES) {
            const int64_t count = outputs - i < LANES ? outputs - i : LANES;
            Float x{};
            for (int64_t j = 0; j < count; ++j) x[j] = sums[(i + j) * PANEL + token];
            if (count == LANES)
                store(to + i, x);
            else
                store_some(to + i, x, count);
        }
    }
}

template <typename T>
void multiply(const Product& p, const Panels& panels, const float* packed, int64_t output_block, float* scratch) {
    const int64_t first = output_block * OUTPUTS, left = p.outputs - first, outputs = left < OUTPUTS ? left : OUTPUTS;
    constexpr int64_t SUMS = OUTPUTS * PANEL;
    float* const converted = scratch;
    float* const level = scratch + OUTPUTS * DEPTH;  // [levels][PANELS][OUTPUTS][PANEL]
    const T* const weights = static_cast<const T*>(panels.weight) + first * p.weight_stride;
    const int64_t inputs = p.x.columns, part_inputs = inputs / p.parts;
    const int64_t count = (panels.end - panels.begin + PANEL - 1) / PANEL;
    int64_t depth = 0;  // depth of the stack of the pairwise sum
    for (int64_t part = 0; part < p.parts; ++part) {
        float* const sums = level + depth * PANELS * SUMS;
        for (int64_t begin = 0; begin < part_inputs; begin += DEPTH) {
            const int64_t n = part_inputs - begin < DEPTH ? part_inputs - begin : DEPTH, at = part * part_inputs + begin;
            int64_t stride = 0;
            const float* const w = fp32_weights(weights + at, outputs, n, p.weight_stride, converted, stride);
            const float* x = packed + panels.packed;
            for (int64_t panel = 0; panel < count; ++panel) {
                const int64_t vectors = vectors_of(tokens_of(panels, panel)), width = vectors * LANES;
                const auto add = begin ? block<true, COLUMNS> : block<false, COLUMNS>;
                add(vectors, outputs, n, w, stride, x + at * width, sums + panel * SUMS);
                x += width * inputs;
            }
        }
        for (int64_t i = part; i & 1; i >>= 1) {  // second of two neighbors: their sum replaces the first
            float* const right = level + depth * PANELS * SUMS;
            float* const left_sum = right - PANELS * SUMS;
            for (int64_t j = 0; j < count * SUMS; j += LANES) store(left_sum + j, load(left_sum + j) + load(right + j));
            --depth;
        }
        ++depth;
    }
    for (int64_t panel = 0; panel < count; ++panel) {
        const int64_t tokens = tokens_of(panels, panel), at = (panels.begin + panel * PANEL) * p.out.stride + first;
        if (p.out.bf16)
            write(level + panel * SUMS, tokens, outputs, static_cast<Bf16*>(p.out.data) + at, p.out.stride);
        else
            write(level + panel * SUMS, tokens, outputs, static_cast<float*>(p.out.data) + at, p.out.stride);
    }
}

inline int64_t scratch_floats(const Product& p) {
    int64_t levels = 1;
    for (int64_t parts = p.parts; parts > 1; parts /= 2) ++levels;
    return OUTPUTS * DEPTH + levels * PANELS * OUTPUTS * PANEL;
}

template <typename T>
const T* row_of(const Matrix& x, int64_t row) {
    return static_cast<const T*>(x.data) + row * x.stride;
}

template <typename T>
float part_square_sum(const T* x, int64_t n) {
    Float total{};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Float v = load(x + i);
        total = multiply_add(v, v, total);
    }
    if (i < n) {
        const Float v = load_some(x + i, n - i, 0.0f);
        total = multiply_add(v, v, total);
    }
    return sum(total);
}

template <typename T>
float square_sum(const T* x, int64_t width, int64_t parts) {
    if (parts == 1) return part_square_sum(x, width);
    return square_sum(x, width / 2, parts / 2) + square_sum(x + width / 2, width / 2, parts / 2);
}

template <typename T>
void square_sums(const Matrix& x, int64_t parts, float* out, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) out[row] = square_sum(row_of<T>(x, row), x.columns, parts);
}

// Calls f(vector of the row of x, its first index) -> vector of the row of out.
template <typename T, typename F>
INLINE void map_row(const Matrix& x, const Output& out, int64_t row, F f) {
    const T* const from = row_of<T>(x, row);
    T* const to = static_cast<T*>(out.data) + row * out.stride;
    int64_t i = 0;
    for (; i + LANES <= x.columns; i += LANES) store(to + i, f(load(from + i), i));
    if (i < x.columns) store_some(to + i, f(load_some(from + i, x.columns - i, 0.0f), i), x.columns - i);
}

template <typename T>
void scale_rows(const Matrix& x, const float* factors, const Matrix& weight, const Output& out, int64_t begin, int64_t end) {
    const T* const w = static_cast<const T*>(weight.data);
    for (int64_t row = begin; row < end; ++row)
        map_row<T>(x, out, row, [&](Float v, int64_t i) __attribute__((always_inline)) {
            const Float scaled = v * splat(factors[row]);
            return scaled * (i + LANES <= x.columns ? load(w + i) : load_some(w + i, x.columns - i, 0.0f));
        });
}

INLINE Float sigmoid(Float x) {  // for x below -88 exp(-x) is infinite, and 1 / infinity is 0
    const Float e = exp2(maximum(x, splat(-88.0f)) * -LOG2_E);
    return 1.0f / (1.0f + e);
}

template <typename T>
void swish(const Matrix& x, float slope, bool gate_alone, const Output& out, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        map_row<T>(x, out, row, [&](Float v, int64_t) __attribute__((always_inline)) {
            const Float gate = sigmoid(v * splat(slope));
            return gate_alone ? gate : v * gate;
        });
}

inline void softmax(const Matrix& x, const Output& out, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* const from = row_of<float>(x, row);
        float* const to = static_cast<float*>(out.data) + row * out.stride;
        float most = -INFINITY, total = 0;
        for (int64_t i = 0; i < x.columns; ++i) most = from[i] > most ? from[i] : most;
        map_row<float>(x, out, row, [&](Float v, int64_t) __attribute__((always_inline)) {
            return exp2((v - most) * LOG2_E);
        });
        for (int64_t i = 0; i < x.columns; ++i) total += to[i];
        for (int64_t i = 0; i < x.columns; ++i) to[i] = to[i] / total;
    }
}

template <typename T>
void combine(const Matrix& x, const int64_t* places, int64_t per_row, const Output& out, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        T* const to = static_cast<T*>(out.data) + row * out.stride;
        for (int64_t i = 0; i < x.columns; i += LANES) {
            const int64_t count = x.columns - i < LANES ? x.columns - i : LANES;
            Float total{};
            for (int64_t j = 0; j < per_row; ++j) {
                const T* const from = row_of<T>(x, places[row * per_row + j]) + i;
                total += count == LANES ? load(from) : load_some(from, count, 0.0f);
            }
            if (count == LANES)
                store(to + i, total);
            else
                store_some(to + i, total, count);
        }
    }
}

inline void exponential_sums(const Matrix& x, const float* most, int64_t* out, int64_t begin, int64_t end) {
    constexpr float UNIT = 1 << (FRACTION / 2);  // its square is 2^FRACTION
    for (int64_t row = begin; row < end; ++row) {
        const float* const from = row_of<float>(x, row);
        int64_t total = 0;
        for (int64_t i = 0; i < x.columns; i += LANES) {
            const int64_t count = x.columns - i < LANES ? x.columns - i : LANES;
            const Float v = count == LANES ? load(from + i) : load_some(from + i, count, -INFINITY);
            const Float e = exp2((v - most[row]) * LOG2_E);
            for (int64_t lane = 0; lane < LANES; ++lane)
                total += static_cast<int64_t>(static_cast<double>(e[lane]) * UNIT * UNIT + 0.5);
        }
        out[row] = total;
    }
}
