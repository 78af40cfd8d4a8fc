// Threshold of the safe set of a row, in terms of the unscaled logits; shared by the CPU and the CUDA kernels.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// Finite floats as integers in the same order, and back.
HOST_DEVICE inline int32_t ordered(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

HOST_DEVICE inline float from_ordered(int32_t i) {
    const int32_t bits = i ^ ((i >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The smallest float x with fl(x / temperature) >= fl(fl(maximum / temperature) + log_rho), for log_rho <= 0. Rounded division
// keeps the order, so {x >= threshold} is exactly the set defined on the scaled logits, without a division per logit. The
// threshold is never -inf, because a logit of -inf is in no set. It is FLT_MAX if maximum / temperature is not finite.
HOST_DEVICE inline float raw_threshold(float maximum, float log_rho, float temperature) {
    const float most = maximum / temperature;
    if (!(fabsf(most) <= FLT_MAX)) return FLT_MAX;
    const float bound = most + log_rho;
    if (!(-FLT_MAX / temperature < bound)) return -FLT_MAX;
    if (temperature == 1.0f) return bound;
    // The threshold is in (low, high]: first try a few steps around its estimate, then the whole range.
    const float estimate = fminf(fmaxf(bound * temperature, -FLT_MAX), maximum);
    int32_t low = ordered(estimate) - 8, high = ordered(estimate) + 8;
    if (low < ordered(-FLT_MAX) || from_ordered(low) / temperature >= bound) low = ordered(-FLT_MAX);
    if (high > ordered(maximum) || from_ordered(high) / temperature < bound) high = ordered(maximum);
    while ((int64_t)high - low > 1) {
        const int32_t middle = (int32_t)(((int64_t)low + high) >> 1);
        if (from_ordered(middle) / temperature >= bound)
            high = middle;
        else
            low = middle;
    }
    return from_ordered(high);
}
