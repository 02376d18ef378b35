// Vectors of the native register width, by the compiler's vector extension, so that kernels are written once.
//
// Few operations need intrinsics: the fused multiply-add (rounding must be the same in every instantiation of a kernel,
// or a row's bits would depend on its batch), the byte dot products, and conversions of halves.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace syringa {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t quads __attribute__((vector_size(4 * LANES)));    // four bytes for each lane
typedef uint16_t shorts __attribute__((vector_size(4 * LANES)));  // the same, to be shifted

static inline floats splat(float x) { return floats{} + x; }
static inline ints splat(int32_t x) { return ints{} + x; }

static inline floats load(const float* p) {
    floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, floats v) { std::memcpy(p, &v, sizeof v); }
static inline floats broadcast(const float* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_set1_ps(*p);
#elif defined(__AVX2__)
    return (floats)_mm256_set1_ps(*p);
#else
    return splat(*p);
#endif
}
static inline ints broadcast(const int32_t* p) {
#if defined(__AVX512F__)
    return (ints)_mm512_set1_epi32(*p);
#elif defined(__AVX2__)
    return (ints)_mm256_set1_epi32(*p);
#else
    return splat(*p);
#endif
}

// bfloat16 is stored as uint16_t.
static inline floats load(const uint16_t* p) {
    halves half;
    std::memcpy(&half, p, sizeof half);
    words wide = __builtin_convertvector(half, words) << 16;
    return (floats)wide;
}

static inline quads load_quads(const uint8_t* p) {
    quads v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// LANES unsigned bytes.
static inline ints load_wide(const uint8_t* p) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    ints v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

// LANES finite IEEE halves.
static inline floats load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    halves half;
    std::memcpy(&half, p, sizeof half);
    const words wide = __builtin_convertvector(half, words);
    const floats magnitude = (floats)((wide & 0x7fffu) << 13) * splat(5.192296858534828e33f);  // 2^112
    return (floats)((words)magnitude | (wide & 0x8000u) << 16);
#endif
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
    if ((bits & 0x7fffffffu) > 0x7f800000u) {  // keep NaN: rounding could turn it into infinity
        *out = 0x7fc0;
        return;
    }
    *out = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// LANES numbers, rounded to bfloat16 like `from_float`, in the lower halves of the lanes.
static inline words half_bits(floats v) {
    const words bits = (words)v, one = words{} + 1u, nan = words{} + 0x7fc0u;
    const words near = (bits + 0x7fffu + ((bits >> 16) & one)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : near;
}
static inline void store(uint16_t* p, floats v) {
    const halves half = __builtin_convertvector(half_bits(v), halves);
    std::memcpy(p, &half, sizeof half);
}

// Two vectors as pairs: even[0], odd[0], even[1], odd[1], …
static inline void store_pairs(float* p, floats even, floats odd) {
    for (int i = 0; i < LANES; i++) p[2 * i] = even[i], p[2 * i + 1] = odd[i];
}
static inline void store_pairs(uint16_t* p, floats even, floats odd) {
    const words both = half_bits(even) | half_bits(odd) << 16;
    std::memcpy(p, &both, sizeof both);
}

// A product that the compiler must not fuse with an addition: rounded before it is added.
static inline floats rounded(floats product) {
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

static inline floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline floats vmax(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

#if defined(__AVX512F__)
static inline float sum(floats v) { return _mm512_reduce_add_ps((__m512)v); }
static inline int32_t sum(ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
static inline float max_lane(floats v) { return _mm512_reduce_max_ps((__m512)v); }
static inline int32_t max_lane(ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
#elif defined(__AVX2__)
// The same trees as below, in registers.
static inline float sum(floats v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline int32_t sum(ints v) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}
static inline float max_lane(floats v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static inline int32_t max_lane(ints v) {
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}
#else
// Reduce in a fixed tree: add the upper half to the lower one until one lane is left.
static inline float sum(floats v) {
    float a[LANES];
    store(a, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}
static inline int32_t sum(ints v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
static inline float max_lane(floats v) {
    float a[LANES];
    store(a, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
}
static inline int32_t max_lane(ints v) {
    int32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
#endif

// 2^x for x up to slightly above 0, within a few units in the last place.
static inline floats vexp2(floats x) {
    x = vmax(x, splat(-126.f));
#if defined(__AVX512F__)
    const floats n = (floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const floats magic = splat(12582912.f);  // adding it rounds to an integer
    const floats n = (x + magic) - magic;
#endif
    const floats r = x - n;
    floats p = splat(1.33335581e-3f);
    p = fma(p, r, splat(9.61812911e-3f));
    p = fma(p, r, splat(5.55041087e-2f));
    p = fma(p, r, splat(2.40226507e-1f));
    p = fma(p, r, splat(6.93147181e-1f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (floats)((__builtin_convertvector(n, ints) + splat(127)) << 23);
#endif
}

// exp(x), within two units in the last place; exactly 0 for very negative x (masked keys).
static inline floats vexp(floats x) {
    const floats low = splat(-87.33f), high = splat(88.37f);
    floats c = vmax(x, low);
    c = c > high ? high : c;
    floats n = fma(c, splat(1.44269504f), splat(12582912.f)) - splat(12582912.f);  // round to nearest
    floats r = fma(n, splat(-0.693359375f), c);
    r = fma(n, splat(2.12194440e-4f), r);
    floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    ints exponent = (__builtin_convertvector(n, ints) + splat(127)) << 23;
    floats y = p * (floats)exponent;
    return x < low ? floats{} : y;
}

static inline floats sigmoid(floats x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }
static inline floats silu(floats x) { return x / (splat(1.0f) + vexp(-x)); }

// x · Φ(x) with the approximation of Φ by tanh, which is that of Gemma.
static inline floats gelu_tanh(floats x) {
    return x * sigmoid(splat(1.5957691216f) * fma(splat(0.044715f) * x * x, x, x));  // 2 √(2 / π)
}

// x · Φ(x) with the normal distribution function Φ, within 2e-6. Φ(x) − ½ is x times a polynomial of x², which was fitted
// for |x| ≤ 5; beyond that, Φ is 0 or 1. A polynomial takes neither an exponential nor a division.
static inline floats gelu(floats x) {
    const floats low = splat(-5.f), high = splat(5.f);
    floats c = vmax(x, low);
    c = c > high ? high : c;
    const floats s = fma(c * c, splat(0.08f), splat(-1.f));  // in [−1, 1], where the polynomial is well conditioned
    floats p = splat(4.929572974035996e-4f);
    p = fma(p, s, splat(-1.5141430571997169e-3f));
    p = fma(p, s, splat(2.0018890995430086e-3f));
    p = fma(p, s, splat(-2.915697637466921e-3f));
    p = fma(p, s, splat(6.165405748317769e-3f));
    p = fma(p, s, splat(-1.097321170514791e-2f));
    p = fma(p, s, splat(1.6497665693963576e-2f));
    p = fma(p, s, splat(-2.333673798676306e-2f));
    p = fma(p, s, splat(3.142622801898814e-2f));
    p = fma(p, s, splat(-4.043294851244485e-2f));
    p = fma(p, s, splat(5.1521420949875524e-2f));
    p = fma(p, s, splat(-7.029665241936772e-2f));
    p = fma(p, s, splat(1.4136378045862122e-1f));
    return x < low ? floats{} : x * fma(c, p, splat(0.5f));  // for a NaN, the latter
}

static inline ints lane_numbers() {
    ints v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// Adjacent numbers in pairs: `Pair` is one pair of a query, `Pairs` are LANES pairs of the cache. Processors with
// bfloat16 dot products multiply them directly; others widen them first.
template <class T>
struct Pair {
    float a, b;
};
template <class T>
struct Pairs {
    floats even, odd;
};

template <class T>
static inline floats dot2(floats acc, const Pairs<T>& v, const Pair<T>& p) {
    return fma(splat(p.b), v.odd, fma(splat(p.a), v.even, acc));
}

static inline Pairs<float> load_pairs(const float* p) {
    Pairs<float> v;
    for (int i = 0; i < LANES; i++) v.even[i] = p[2 * i], v.odd[i] = p[2 * i + 1];
    return v;
}

#if defined(__AVX512BF16__)
template <>
struct Pair<uint16_t> {
    int32_t bits;
};
template <>
struct Pairs<uint16_t> {
    __m512i bits;
};
static inline Pairs<uint16_t> load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
template <>
inline floats dot2(floats acc, const Pairs<uint16_t>& v, const Pair<uint16_t>& p) {
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)v.bits, (__m512bh)_mm512_set1_epi32(p.bits));
}
static inline void to_pairs(const float* from, int count, Pair<uint16_t>* to) {
    for (int i = 0; i < count; i += LANES) {
        const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
        std::memcpy(to + i / 2, &narrow, sizeof narrow);
    }
}
#else
static inline Pairs<uint16_t> load_pairs(const uint16_t* p) {
    words both;
    std::memcpy(&both, p, sizeof both);
    return {(floats)(both << 16), (floats)(both & 0xffff0000u)};
}
static inline void to_pairs(const float* from, int count, Pair<uint16_t>* to) {
    std::memcpy(to, from, sizeof(float) * count);
}
#endif
static inline void to_pairs(const float* from, int count, Pair<float>* to) {
    std::memcpy(to, from, sizeof(float) * count);
}

// A quantized activation. With VNNI, signed bytes; otherwise 16-bit numbers, each four in the order 0, 2, 1, 3, because
// even and odd weights are multiplied separately.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define SYRINGA_VNNI 1
typedef int8_t activation_t;
#else
typedef int16_t activation_t;
#endif

// Numbers that fit in a byte.
static inline void store_activations(activation_t* to, ints from) {
#if defined(SYRINGA_VNNI)
    const bytes narrow = __builtin_convertvector(from, bytes);
    std::memcpy(to, &narrow, sizeof narrow);
#elif defined(__AVX2__)
    const __m256i ordered = _mm256_shuffle_epi32((__m256i)from, _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i twice = _mm256_packs_epi32(ordered, ordered);  // each half of four numbers, twice
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, _MM_SHUFFLE(0, 0, 2, 0))));
#else
    for (int i = 0; i < LANES; i += 4)
        to[i] = from[i], to[i + 1] = from[i + 2], to[i + 2] = from[i + 1], to[i + 3] = from[i + 3];
#endif
}

static inline int32_t load_int32(const void* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// VNNI: in each lane, acc += the dot product of four unsigned bytes with four signed ones, or of two 16-bit numbers with
// two; neither saturates. `four_bytes`: the same four bytes, or two numbers, in all lanes. Client processors have it in
// 256 bits, most of them without AVX-512.
#if defined(__AVX512VNNI__)
static inline ints four_bytes(const void* p) { return (ints)_mm512_set1_epi32(load_int32(p)); }
static inline ints dot_bytes(ints acc, quads u, ints a) {
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)a);
}
static inline ints dot_shorts(ints acc, ints u, ints a) {
    return (ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)u, (__m512i)a);
}
#elif defined(__AVXVNNI__)
static inline ints four_bytes(const void* p) { return (ints)_mm256_set1_epi32(load_int32(p)); }
static inline ints dot_bytes(ints acc, quads u, ints a) {
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)a);
}
static inline ints dot_shorts(ints acc, ints u, ints a) {
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)a);
}
#endif

// acc[i] += the dot product of four unsigned bytes w[4i .. 4i+3] with the four activations at `a`.
static inline ints dot4(ints acc, const uint8_t* w, const activation_t* a) {
#if defined(SYRINGA_VNNI)
    return dot_bytes(acc, load_quads(w), four_bytes(a));
#elif defined(__AVX2__)
    // maddubs would saturate; 16-bit products of bytes cannot.
    const __m256i v = _mm256_loadu_si256((const __m256i*)w);
    const __m256i even = _mm256_and_si256(v, _mm256_set1_epi16(0x00ff)), odd = _mm256_srli_epi16(v, 8);
    const __m256i low = _mm256_madd_epi16(even, _mm256_set1_epi32(load_int32(a)));
    const __m256i high = _mm256_madd_epi16(odd, _mm256_set1_epi32(load_int32(a + 2)));
    return (ints)_mm256_add_epi32((__m256i)acc, _mm256_add_epi32(low, high));
#elif defined(__SSE2__)
    const __m128i v = _mm_loadu_si128((const __m128i*)w);
    const __m128i even = _mm_and_si128(v, _mm_set1_epi16(0x00ff)), odd = _mm_srli_epi16(v, 8);
    const __m128i low = _mm_madd_epi16(even, _mm_set1_epi32(load_int32(a)));
    const __m128i high = _mm_madd_epi16(odd, _mm_set1_epi32(load_int32(a + 2)));
    return (ints)_mm_add_epi32((__m128i)acc, _mm_add_epi32(low, high));
#else
    for (int i = 0; i < LANES; i++)
        acc[i] += w[4 * i] * a[0] + w[4 * i + 2] * a[1] + w[4 * i + 1] * a[2] + w[4 * i + 3] * a[3];
    return acc;
#endif
}

// acc[i] += the dot product of the two 16-bit numbers of lane i with the two at `pair`.
static inline ints dot2(ints acc, ints pairs, const int16_t* pair) {
#if defined(SYRINGA_VNNI)
    return dot_shorts(acc, pairs, four_bytes(pair));
#elif defined(__AVX2__)
    return acc + (ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(load_int32(pair)));
#else
    return acc + (pairs << 16 >> 16) * splat((int32_t)pair[0]) + (pairs >> 16) * splat((int32_t)pair[1]);
#endif
}

// table[index], for each byte of an index below 16.
static inline quads lookup(const uint8_t* table, quads index) {
#if defined(__AVX512BW__)
    const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (quads)_mm512_shuffle_epi8(entries, (__m512i)index);
#elif defined(__AVX2__)
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (quads)_mm256_shuffle_epi8(entries, (__m256i)index);
#else
    for (int i = 0; i < 4 * LANES; i++) index[i] = table[index[i]];
    return index;
#endif
}

// A sum of dot products of four unsigned bytes per lane, at most MOST, with four activations. Where the processor
// cannot multiply unsigned bytes above 127 without saturation, those bytes count from 128, and `zero` of their zero is
// 0.
#if defined(SYRINGA_VNNI)
typedef ints four_activations;
static inline four_activations load_four(const int8_t* a) { return four_bytes(a); }

template <int MOST>
struct DotSum {
    ints total;

    static constexpr int zero(int value) { return value; }
    inline __attribute__((always_inline)) void add(int, quads u, four_activations a) {
        total = dot_bytes(total, u, a);
    }
    ints end(int) const { return total; }
};
#elif defined(__AVX2__)
typedef __m256i four_activations;
static inline four_activations load_four(const int8_t* a) { return _mm256_set1_epi32(load_int32(a)); }

template <int MOST>
struct DotSum {
    ints total;
    __m256i narrow = _mm256_setzero_si256();

    // So many sums of two products fit in 16 bits.
    static constexpr int RUN = MOST > 127 ? 1 : 32767 / (2 * 127 * MOST);

    static constexpr int zero(int value) { return MOST > 127 ? value - 128 : value; }
    inline __attribute__((always_inline)) void add(int step, quads u, four_activations a) {
        __m256i weights = (__m256i)u;
        if (MOST > 127) {  // |w| · (a with the sign of w)
            weights = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
            a = _mm256_sign_epi8(a, weights);
            weights = _mm256_abs_epi8(weights);
        }
        const __m256i products = _mm256_maddubs_epi16(weights, a);
        narrow = step % RUN == 0 ? products : _mm256_add_epi16(narrow, products);
        if (step % RUN == RUN - 1) widen();
    }
    inline __attribute__((always_inline)) ints end(int steps) {
        if (steps % RUN) widen();
        return total;
    }
    inline __attribute__((always_inline)) void widen() {
        total = (ints)_mm256_add_epi32((__m256i)total, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
    }
};
#else
struct four_activations {
    int32_t each[4];
};
static inline four_activations load_four(const int8_t* a) { return {{a[0], a[1], a[2], a[3]}}; }

template <int MOST>
struct DotSum {
    ints total;

    static constexpr int zero(int value) { return value; }
    void add(int, quads u, const four_activations& a) {
        for (int b = 0; b < 4; b++) total += (ints)((words)u >> (8 * b) & 0xffu) * splat(a.each[b]);
    }
    ints end(int) const { return total; }
};
#endif

}  // namespace syringa
