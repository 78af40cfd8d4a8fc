// The row kernels, compiled once per instruction set: see for_each_isa.h. Inside the kernels d is in units of log 2:
// scale = log2(e) / temperature.

constexpr float LOG2_E = 1.44269504088896341f, LOG_2 = 0.693147180559945309f;
constexpr float LEAST = -150;  // 2^LEAST is 0; used instead of -inf, whose product with 0 would be NaN
constexpr int UNROLL = 4;
constexpr int64_t STRIDE = UNROLL * LANES;
constexpr int64_t BLOCK = 64 * STRIDE;  // number of terms that are added in fp32 before the sum goes into fp64

template <typename T>
float row_maximum(const T* x, int64_t n) {
    Float most[UNROLL];
    Int nan{};
    for (auto& m : most) m = splat(-INFINITY);
    auto take = [&](int u, Float v) __attribute__((always_inline)) {
        most[u] = maximum(v, most[u]);
        nan |= v != v;
    };
    int64_t i = 0;
    for (; i + STRIDE <= n; i += STRIDE)
        for (int u = 0; u < UNROLL; ++u) take(u, load(x + i + u * LANES));
    for (; i + LANES <= n; i += LANES) take(0, load(x + i));
    if (i < n) take(0, load_some(x + i, n - i, -INFINITY));
    for (int u = 1; u < UNROLL; ++u) most[0] = maximum(most[u], most[0]);
    return any(nan) ? INFINITY : largest(most[0]);
}

// The maximum is found on integers with half the instructions, because this pass is a large part of the forward.
inline float row_maximum(const Bf16* x, int64_t n) {
    constexpr int64_t WIDTH = 2 * LANES;
    constexpr int16_t INFINITE = 0x7f80;
    Ordered most[UNROLL], least[UNROLL];
    for (int u = 0; u < UNROLL; ++u) most[u] = least[u] = Ordered{} - (int16_t)(INFINITE + 1);  // -inf
    int64_t i = 0;
    for (; i + UNROLL * WIDTH <= n; i += UNROLL * WIDTH)
        for (int u = 0; u < UNROLL; ++u) {
            const Ordered v = load_ordered(x + i + u * WIDTH);
            most[u] = v > most[u] ? v : most[u];
            least[u] = v < least[u] ? v : least[u];
        }
    int16_t highest = -INFINITE - 1, lowest = highest;
    auto take = [&](int16_t v) {
        highest = v > highest ? v : highest;
        lowest = v < lowest ? v : lowest;
    };
    for (int u = 0; u < UNROLL; ++u)
        for (int lane = 0; lane < WIDTH; ++lane) take(most[u][lane]), take(least[u][lane]);
    for (; i < n; ++i) {
        const int16_t v = (int16_t)x[i].bits;
        take(v ^ ((v >> 15) & 0x7fff));
    }
    if (highest > INFINITE || lowest < -INFINITE - 1) return INFINITY;
    return to_float(Bf16{(uint16_t)(highest ^ ((highest >> 15) & 0x7fff))});
}

struct Sums {
    double safe = 0, pruned = 0, weighted = 0;
};

template <bool masked, bool entropy, typename T>
Sums row_sums(const T* x, int64_t n, float most, float threshold, float scale) {
    Sums total;
    const Float limit = splat(threshold);
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = start + BLOCK < n ? start + BLOCK : n;
        Float safe[UNROLL] = {}, pruned[UNROLL] = {}, weighted[UNROLL] = {};
        auto take = [&](int u, Float v) __attribute__((always_inline)) {
            const Float d = (v - most) * scale;
            const Float e = exp2(d);
            const Float kept = masked ? select(v >= limit, e, Float{}) : e;
            safe[u] += kept;
            if (masked) pruned[u] += e - kept;  // e or 0
            if (entropy) weighted[u] += select(kept > 0.0f, kept * d, Float{});  // 0 * -inf would be NaN
        };
        int64_t i = start;
        for (; i + STRIDE <= end; i += STRIDE) {
            // Prefetch the next row into the second-level cache while this row is processed.
            for (size_t line = 0; line < STRIDE * sizeof(T); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(x + i + n) + line, 0, 2);
            for (int u = 0; u < UNROLL; u += 2) {
                Float v, w;
                load_pair(x + i + u * LANES, v, w);
                take(u, v), take(u + 1, w);
            }
        }
        for (; i + LANES <= end; i += LANES) take(0, load(x + i));
        if (i < end) take(0, load_some(x + i, end - i, -INFINITY));
        for (int u = 0; u < UNROLL; ++u) {
            total.safe += sum(safe[u]);
            if (masked) total.pruned += sum(pruned[u]);
            if (entropy) total.weighted += sum(weighted[u]);
        }
    }
    return total;
}

template <typename T>
void row_gradient(const T* x, T* out, int64_t n, float most, float threshold, float scale, float factor, float slope) {
    const Float limit = splat(threshold), least = splat(LEAST);
    auto value = [&](Float v) __attribute__((always_inline)) {
        const Float d = maximum((v - most) * scale, least);
        return select(v >= limit, exp2(d) * (d * slope + factor), Float{});
    };
    int64_t i = 0;
    for (; i + STRIDE <= n; i += STRIDE) {
        Float v[UNROLL];
        Int inside{};
        for (int u = 0; u < UNROLL; u += 2) load_pair(x + i + u * LANES, v[u], v[u + 1]);
        for (int u = 0; u < UNROLL; ++u) inside |= v[u] >= limit;
        if (any(inside))
            for (int u = 0; u < UNROLL; u += 2) store_pair(out + i + u * LANES, value(v[u]), value(v[u + 1]));
        else
            for (int u = 0; u < UNROLL; u += 2) store_pair(out + i + u * LANES, Float{}, Float{});
    }
    for (; i + LANES <= n; i += LANES) store(out + i, value(load(x + i)));
    if (i < n) store_some(out + i, value(load_some(x + i, n - i, -INFINITY)), n - i);
}

inline float canonical(float x) { return x == x ? x : NAN; }

template <typename T>
const T* row_of(const Logits& logits, int64_t row) {
    return static_cast<const T*>(logits.data) + row * logits.columns;
}

// Column of the row's target on this rank, -1 if the target is on another rank or ignored.
inline int64_t column_of(const Targets& targets, const Logits& logits, int64_t row) {
    const int64_t column = targets.ids[row] - targets.first_column;
    return column >= 0 && column < logits.columns ? column : -1;
}

template <typename T>
void extremes_of_row(const Logits& logits, const Targets& targets, float* out, int64_t row) {
    const T* x = row_of<T>(logits, row);
    const int64_t target = column_of(targets, logits, row);
    out[row] = row_maximum(x, logits.columns);
    out[logits.rows + row] = target < 0 ? -INFINITY : to_float(x[target]);
}

template <typename T>
void sums_of_row(const Logits& logits, float most, const Options& options, float* out, int64_t row) {
    const float threshold = raw_threshold(most, options.log_rho, options.temperature);
    const auto kernel = options.log_rho != -INFINITY
                            ? (options.with_entropy ? row_sums<true, true, T> : row_sums<true, false, T>)
                            : (options.with_entropy ? row_sums<false, true, T> : row_sums<false, false, T>);
    const Sums total = kernel(row_of<T>(logits, row), logits.columns, most, threshold, LOG2_E / options.temperature);
    out[row] = total.safe;
    out[logits.rows + row] = total.pruned;
    out[2 * logits.rows + row] = total.weighted * LOG_2;
}

template <typename T>
void extremes(const Logits& logits, const Targets& targets, float* out, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) extremes_of_row<T>(logits, targets, out, row);
}

template <typename T>
void sums(const Logits& logits, const float* most, const Options& options, float* out, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) sums_of_row<T>(logits, most[row], options, out, row);
}

template <typename T>
void extremes_and_sums(const Logits& logits, const Targets& targets, const Options& options, float* extremes, float* sums,
                       Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        extremes_of_row<T>(logits, targets, extremes, row);
        if (std::isfinite(extremes[row]))
            sums_of_row<T>(logits, extremes[row], options, sums, row);
        else
            for (int i = 0; i < 3; ++i) sums[i * logits.rows + row] = 0;
    }
}

template <typename T>
void gradient(const Logits& logits, const Targets& targets, const float* maxima, const float* factors,
              const Options& options, void* gradient, Range rows) {
    const float scale = LOG2_E / options.temperature;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const T* x = row_of<T>(logits, row);
        T* out = static_cast<T*>(gradient) + row * logits.columns;
        const float factor = canonical(factors[row]), slope = canonical(factors[logits.rows + row] * LOG_2);
        const float at_target = canonical(factors[2 * logits.rows + row]);
        if (factor == 0 && slope == 0 && at_target == 0) {
            std::memset(out, 0, logits.columns * sizeof(T));
            continue;
        }
        const float most = maxima[row], threshold = raw_threshold(most, options.log_rho, options.temperature);
        const int64_t target = column_of(targets, logits, row);
        Float correct{};
        if (target >= 0) {  // computed in fp32, before the row is overwritten
            const Float v = splat(to_float(x[target])), d = maximum((v - most) * scale, splat(LEAST));
            correct = select(v >= threshold, exp2(d) * (d * slope + factor) + at_target, Float{});
        }
        row_gradient(x, out, logits.columns, most, threshold, scale, factor, slope);
        if (target >= 0) store_some(out + target, correct, 1);
    }
}
