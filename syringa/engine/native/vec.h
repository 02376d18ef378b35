// Sixteen lanes of arithmetic on whatever the compiler is told the machine has.
//
// GCC and Clang lower a 64-byte vector to one AVX-512, two AVX2 or four NEON registers, so the kernels are written once.
// Only two things need the instruction set by name: the fused multiply-add (a lane must round the same way in every
// instantiation of a kernel, or a row's bits would depend on its batch) and the dot product of bytes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace syringa {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 splat(float x) { return f32x16{} + x; }
static inline i32x16 splat(int32_t x) { return i32x16{} + x; }

static inline f32x16 load(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// bfloat16 travels as its bits.
static inline f32x16 load(const uint16_t* p) {
    u16x16 half;
    std::memcpy(&half, p, sizeof half);
    u32x16 wide = __builtin_convertvector(half, u32x16) << 16;
    return (f32x16)wide;
}

static inline float to_float(float x) { return x; }
static inline float to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
static inline void from_float(float x, float* out) { *out = x; }
static inline void from_float(float x, uint16_t* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {  // a NaN must stay one: rounding could carry it into infinity
        *out = 0x7fc0;
        return;
    }
    *out = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline f32x16 vmax(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// A fixed tree: lane i meets lane i + 8, then 4, 2, 1.
static inline float sum(f32x16 v) {
    float a[LANES];
    store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}
static inline float max_lane(f32x16 v) {
    float a[LANES];
    store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
}

// exp(x), within two units in the last place; exactly 0 for very negative x (a masked key weighs nothing).
static inline f32x16 vexp(f32x16 x) {
    const f32x16 low = splat(-87.33f), high = splat(88.37f);
    f32x16 c = vmax(x, low);
    c = c > high ? high : c;
    f32x16 n = fma(c, splat(1.44269504f), splat(12582912.f)) - splat(12582912.f);  // round to nearest, by magic number
    f32x16 r = fma(n, splat(-0.693359375f), c);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    i32x16 exponent = (__builtin_convertvector(n, i32x16) + splat(127)) << 23;
    f32x16 y = p * (f32x16)exponent;
    return x < low ? f32x16{} : y;
}

static inline f32x16 silu(f32x16 x) { return x / (splat(1.0f) + vexp(-x)); }

// acc[i] += the dot product of four unsigned bytes w[4i..4i+3] with the four signed bytes packed in `a`.
static inline i32x16 dot4(i32x16 acc, const uint8_t* w, int32_t a) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_loadu_si512(w), _mm512_set1_epi32(a));
#elif defined(__AVX2__)
    // maddubs would saturate: widen even and odd bytes to 16 bits instead, where every product pair fits.
    const __m256i even = _mm256_set1_epi32((int32_t)((uint16_t)(int16_t)(int8_t)a |
                                                     (uint32_t)(uint16_t)(int16_t)(int8_t)(a >> 16) << 16));
    const __m256i odd = _mm256_set1_epi32((int32_t)((uint16_t)(int16_t)(int8_t)(a >> 8) |
                                                    (uint32_t)(uint16_t)(int16_t)(int8_t)(a >> 24) << 16));
    const __m256i low_byte = _mm256_set1_epi16(0x00ff);
    __m256i half[2];
    std::memcpy(half, &acc, sizeof acc);
    for (int h = 0; h < 2; h++) {
        const __m256i v = _mm256_loadu_si256((const __m256i*)(w + 32 * h));
        half[h] = _mm256_add_epi32(half[h], _mm256_madd_epi16(_mm256_and_si256(v, low_byte), even));
        half[h] = _mm256_add_epi32(half[h], _mm256_madd_epi16(_mm256_srli_epi16(v, 8), odd));
    }
    std::memcpy(&acc, half, sizeof acc);
    return acc;
#else
    int8_t b[4];
    std::memcpy(b, &a, sizeof b);
    for (int i = 0; i < LANES; i++)
        acc[i] += w[4 * i] * b[0] + w[4 * i + 1] * b[1] + w[4 * i + 2] * b[2] + w[4 * i + 3] * b[3];
    return acc;
#endif
}

}  // namespace syringa
