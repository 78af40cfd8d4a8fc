// Vectors of LANES floats with GCC's vector extensions: one source for every instruction set.
//
// No include guard: for_each_isa.h includes this file once per instruction set, inside a separate namespace and under
// `#pragma GCC target`, so that each copy is compiled for its processor. Everything is inlined into the kernels.

using Float = float __attribute__((vector_size(LANES * 4)));
using Int = int32_t __attribute__((vector_size(LANES * 4)));
using UInt = uint32_t __attribute__((vector_size(LANES * 4)));
using Half = uint16_t __attribute__((vector_size(LANES * 2)));

#undef INLINE
#define INLINE inline __attribute__((always_inline))

INLINE Float splat(float x) { return x - Float{}; }  // not 0 + x, which would turn -0 into 0

INLINE Float multiply_add(Float a, Float b, Float c) {  // a b + c, rounded once if the processor supports it
#if LANES == 16
    return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE Float select(Int mask, Float yes, Float no) { return mask ? yes : no; }

// a > b ? a : b; this is b if one of them is NaN.
INLINE Float maximum(Float a, Float b) {
#if LANES == 16
    return (Float)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (Float)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

INLINE Float load(const float* p) {
    Float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

INLINE Float load(const Bf16* p) {
#if LANES == 16
    return (Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    Half x;
    std::memcpy(&x, p, sizeof x);
    return (Float)(__builtin_convertvector(x, UInt) << 16);
#endif
}

INLINE void store(float* p, Float x) { std::memcpy(p, &x, sizeof x); }

INLINE void store(Bf16* p, Float x) {  // rounds to nearest even; only NaNs with few bits set, like NAN, stay NaN
    const UInt bits = (UInt)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if LANES == 16
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
    const Half half = __builtin_convertvector(rounded, Half);
    std::memcpy(p, &half, sizeof half);
#endif
}

INLINE float to_float(float x) { return x; }

INLINE float to_float(Bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// The last, partial vector of a row; elements beyond the end of the row are `fill`.
template <typename T>
INLINE Float load_some(const T* p, int64_t count, float fill) {
    Float x = splat(fill);
    for (int64_t i = 0; i < count; ++i) x[i] = to_float(p[i]);
    return x;
}

template <typename T>
INLINE void store_some(T* p, Float x, int64_t count) {
    T values[LANES];
    store(values, x);
    std::memcpy(p, values, count * sizeof(T));
}

INLINE float sum(Float x) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += x[i];
    return total;
}

// Two vectors at once, for work that treats all elements alike: even and odd elements, if this is cheaper.
INLINE void load_pair(const float* p, Float& a, Float& b) { a = load(p), b = load(p + LANES); }

INLINE void load_pair(const Bf16* p, Float& a, Float& b) {
    UInt x;
    std::memcpy(&x, p, sizeof x);
    a = (Float)(x << 16);
    b = (Float)(x & 0xffff0000);
}

INLINE void store_pair(float* p, Float a, Float b) { store(p, a), store(p + LANES, b); }

INLINE void store_pair(Bf16* p, Float a, Float b) {  // rounds like store
    const UInt x = (UInt)a, y = (UInt)b;
    const UInt low = x + 0x7fff + ((x >> 16) & 1), high = y + 0x7fff + ((y >> 16) & 1);
    const UInt both = (low >> 16) | (high & 0xffff0000);
    std::memcpy(p, &both, sizeof both);
}

// Bf16 numbers as integers in the same order, with NaNs beyond the infinities. The operation is its own inverse.
using Ordered = int16_t __attribute__((vector_size(LANES * 4)));

INLINE Ordered load_ordered(const Bf16* p) {
    Ordered x;
    std::memcpy(&x, p, sizeof x);
    return x ^ ((x >> 15) & 0x7fff);
}

INLINE float largest(Float x) {
    float result = x[0];
    for (int i = 1; i < LANES; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

INLINE bool any(Int mask) {
#if LANES == 16
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
    int32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= mask[i];
    return bits != 0;
#endif
}

// 2^x for x <= 127, to 2e-7 of itself; 0 below -126 (or -149 with AVX512), also for -inf; NaN for NaN. The polynomial is
// the minimax one of its degree on [-1/2, 1/2] that is exact at 0.
INLINE Float exp2(Float x) {
#if LANES == 16
    x = maximum(splat(-200.0f), x);
    const Float n = (Float)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Float clamped = maximum(splat(-126.0f), x);
    const Float shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the last bits of the sum are the rounded integer
    const Float n = shifted - 12582912.0f, below = x;
    x = clamped;
#endif
    const Float f = x - n;
    Float p = splat(1.3264727270e-3f);
    p = p * f + 9.6715127277e-3f;
    p = p * f + 5.5507337439e-2f;
    p = p * f + 2.4022242084e-1f;
    p = p * f + 6.9314697760e-1f;
    p = p * f + 1.0f;
#if LANES == 16
    return (Float)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return select(below < -126.0f, Float{}, p * (Float)(((UInt)shifted << 23) + 0x3f800000));
#endif
}
