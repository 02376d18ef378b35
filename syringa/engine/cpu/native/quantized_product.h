// Products of rows of int8 activations with chunks of quantized weights: the layout of a chunk, activations, and the
// kernel that multiplies a few rows with a chunk. quantized_linear.h loops over chunks and rows.
//
// A panel holds PANEL channels, as in int8_linear.h, chunk by chunk of 64 or 256 inputs. A chunk has its scales
// (gguf_blocks.h), then its numbers, for each 32 inputs and vector BITS vectors (`pack_numbers`), and is read
// sequentially. Activations have one scale for each group of 64 or 128 inputs of a row; a chunk has one or two groups.
//
// A row's bits depend on that row alone. The byte products of a sub-block are added as integers. If its scale is an
// integer with a common factor, sub-blocks are added as integers too, and a group takes one multiplication by floats;
// otherwise sub-blocks are added as floats, in the order of the inputs. So are groups.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "gguf_blocks.h"
#include "panels.h"
#include "simd.h"
#include "thread_pool.h"

namespace syringa {

constexpr int QUADS = 4 * LANES;  // bytes of a vector
constexpr int STRIP = 32;         // inputs that are unpacked at a time: STEPS vectors of four inputs
constexpr int STEPS = STRIP / 4;

// --- Packing

template <class Format>
struct ChunkLayout {  // in bytes
    static constexpr size_t SCALES = (size_t)LANES * Format::Scales::BYTES;  // of one vector of channels
    static constexpr size_t NUMBERS = VECTORS * SCALES;                      // where they begin
    static constexpr size_t STRIP_SIZE = (size_t)VECTORS * Format::BITS * QUADS;
    static constexpr size_t SIZE = NUMBERS + STRIP_SIZE * (Format::Scales::CHUNK / STRIP);
};

// Where a strip has its vectors, in the order in which they are read. Each holds four inputs (a step) of LANES channels
// in the four bytes of a lane: the lower nibbles of steps 2i and 2i + 1 share a vector; the upper bits of all steps (5
// bits) or of four steps (6 bits) come before them.
template <int BITS>
constexpr int low_vector(int i, int v) {
    return BITS == 5 ? (1 + i) * VECTORS + v : BITS == 6 ? (i / 2 * 3 + 1 + i % 2) * VECTORS + v : i * VECTORS + v;
}
template <int BITS>
constexpr int high_vector(int i, int v) {
    return BITS == 6 ? i / 2 * 3 * VECTORS + v : v;
}
constexpr int byte_vector(int step, int v) { return (step / 2 * VECTORS + v) * 2 + step % 2; }

// Store the numbers of STRIP inputs of a channel.
template <int BITS>
void pack_numbers(const uint8_t* u, uint8_t* strip, int v, int lane) {
    uint32_t step[STEPS];
    std::memcpy(step, u, sizeof step);
    const auto put = [&](int vector, uint32_t word) { std::memcpy(strip + vector * QUADS + lane * 4, &word, 4); };
    if constexpr (BITS == 8) {
        for (int t = 0; t < STEPS; t++) put(byte_vector(t, v), step[t]);
    } else {
        for (int i = 0; i < STEPS / 2; i++)
            put(low_vector<BITS>(i, v), (step[2 * i] & 0x0f0f0f0fu) | (step[2 * i + 1] & 0x0f0f0f0fu) << 4);
        uint32_t high[2] = {};
        for (int t = 0; t < STEPS; t++) {
            if (BITS == 5) high[0] |= (step[t] >> 4 & 0x01010101u) << t;
            if (BITS == 6) high[t / 4] |= (step[t] >> 4 & 0x03030303u) << (t % 4 * 2);
        }
        for (int i = 0; i < BITS - 4; i++) put(high_vector<BITS>(2 * i, v), high[i]);
    }
}

static inline quads shifted(quads v, int left) {
    return left >= 0 ? (quads)((shorts)v << left) : (quads)((shorts)v >> -left);
}

// Steps 2i and 2i + 1 of vector v of a strip, as unsigned bytes.
template <class Format>
inline __attribute__((always_inline)) void unpack_numbers(const uint8_t* strip, int v, int i, quads* u) {
    constexpr int BITS = Format::BITS;
    if constexpr (BITS == 8) {
        for (int t = 0; t < 2; t++) u[t] = load_quads(strip + byte_vector(2 * i + t, v) * QUADS);
    } else {
        const quads low = quads{} + (uint8_t)0x0f, both = load_quads(strip + low_vector<BITS>(i, v) * QUADS);
        u[0] = both & low, u[1] = shifted(both, -4) & low;
        if constexpr (BITS == 5) {
            const quads high = load_quads(strip + high_vector<5>(i, v) * QUADS), mask = quads{} + (uint8_t)0x10;
            u[0] |= shifted(high, 4 - 2 * i) & mask, u[1] |= shifted(high, 3 - 2 * i) & mask;
        }
        if constexpr (BITS == 6) {
            const quads high = load_quads(strip + high_vector<6>(i, v) * QUADS), mask = quads{} + (uint8_t)0x30;
            u[0] |= shifted(high, 4 - i % 2 * 4) & mask, u[1] |= shifted(high, 2 - i % 2 * 4) & mask;
        }
        if constexpr (Format::HAS_TABLE) {
            uint8_t table[16];
            for (int n = 0; n < 16; n++) table[n] = (uint8_t)(Format::TABLE[n] + Format::ZERO);
            u[0] = lookup(table, u[0]), u[1] = lookup(table, u[1]);
        }
    }
}

// --- Activations

constexpr int ZERO_16 = 32;  // ZERO of the format with sub-blocks of 16: products begin with a number from memory

// Signed bytes with one scale per row and group, and their sums.
template <int GROUP>
struct alignas(16) ActivationGroup {
    int8_t values[GROUP];
    int32_t zeros[GROUP / 16];  // −ZERO_16 · the sums of 16 values
    int16_t sums[GROUP / 32];   // the negative sums of 32
    float scale;

    void quantize(const float* x) {  // GROUP numbers
        const float peak = group_peak<GROUP>(x), inverse = peak > 0.f ? 127.f / peak : 0.f;
        scale = peak / 127.f;
        for (int i = 0; i < GROUP; i += 16) {
            ints total{};
            for (int j = i; j < i + 16; j += LANES) {
                const ints q = round_scaled(load(x + j), inverse);
                const bytes narrow = __builtin_convertvector(q, bytes);
                std::memcpy(values + j, &narrow, sizeof narrow);
                total += q;
            }
            const int32_t sixteen = -sum(total);
            zeros[i / 16] = sixteen * ZERO_16;
            sums[i / 32] = (int16_t)(i % 32 ? sums[i / 32] + sixteen : sixteen);
        }
    }
};

template <class Format>
constexpr int GROUP_OF = std::min(Format::Scales::CHUNK, 128);
template <class Format>
using ActivationsOf = ActivationGroup<GROUP_OF<Format>>;

// Groups of all rows: those of the same inputs are adjacent.
template <int GROUP>
struct QuantizedRows {
    typedef ActivationGroup<GROUP> Group;
    std::vector<Group> groups;  // [inputs / GROUP][rows]
    size_t rows;

    const Group* at(int k, size_t row) const { return groups.data() + k / GROUP * rows + row; }

    void quantize(const float* x, int inputs, int rows) {
        this->rows = rows;
        const int count = (inputs + GROUP - 1) / GROUP;
        if (groups.size() < (size_t)count * rows) groups.resize((size_t)count * rows);
        for_rows(rows, inputs, [&](int r) {
            const float* row = x + (size_t)r * inputs;
            for (int g = 0; g < count; g++) {
                float copy[GROUP];
                groups[g * this->rows + r].quantize(group_of<GROUP>(row, inputs, g, copy));
            }
        });
    }
};

// --- Products

// The scale and minimum of sub-block j, as floats.
template <class Format>
floats float_scale(const uint8_t* packed, int j) {
    typedef typename Format::Scales Scales;
    if constexpr (Scales::INTEGER)
        return Scales::scale(packed) * __builtin_convertvector(Scales::number(packed, j), floats);
    else
        return Scales::scale(packed, j);
}
template <class Format>
floats float_minimum(const uint8_t* packed, int j) {
    typedef typename Format::Scales Scales;
    if constexpr (Scales::INTEGER)
        return Scales::minimum(packed) * __builtin_convertvector(Scales::minimum_number(packed, j), floats);
    else
        return Scales::minimum(packed, j);
}

// The scales of a chunk, ready for products.
template <class Format>
struct ChunkScales {
    typedef typename Format::Scales Scales;
    static constexpr int SUBS = Scales::CHUNK / Scales::SUB;
    typedef std::conditional_t<Scales::INTEGER, ints, floats> Number;
    Number scales[SUBS][VECTORS];                                 // of sub-blocks
    Number minimums[Scales::INTEGER ? SUBS / 2 : SUBS][VECTORS];  // integers: two 16-bit numbers in each lane
    floats scale[VECTORS], minimum[VECTORS];                      // common factors of integers

    inline __attribute__((always_inline)) explicit ChunkScales(const uint8_t* chunk) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++, chunk += ChunkLayout<Format>::SCALES) {
            if constexpr (Scales::INTEGER) {
                scale[v] = Scales::scale(chunk);
#pragma GCC unroll 16
                for (int j = 0; j < SUBS; j++) scales[j][v] = Scales::number(chunk, j);
                if constexpr (Format::MINS) {
                    minimum[v] = Scales::minimum(chunk);
#pragma GCC unroll 8
                    for (int j = 0; j < SUBS; j += 2)
                        minimums[j / 2][v] =
                            Scales::minimum_number(chunk, j) | Scales::minimum_number(chunk, j + 1) << 16;
                }
            } else {
                for (int j = 0; j < SUBS; j++) {
                    scales[j][v] = Scales::scale(chunk, j);
                    if constexpr (Format::MINS) minimums[j][v] = Scales::minimum(chunk, j);
                }
            }
        }
    }
};

// Write the numbers of a chunk as bytes, in the order in which products read them.
template <class Format>
inline void unpack_chunk(const uint8_t* chunk, uint8_t* bytes) {
    const uint8_t* strip = chunk + ChunkLayout<Format>::NUMBERS;
    for (int s = 0; s < Format::Scales::CHUNK / STRIP; s++, strip += ChunkLayout<Format>::STRIP_SIZE)
#pragma GCC unroll 4
        for (int i = 0; i < STEPS / 2; i++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++, bytes += 2 * QUADS) {
                quads u[2];
                unpack_numbers<Format>(strip, v, i, u);
                std::memcpy(bytes, u, sizeof u);
            }
}

// Multiply M rows with sub-block s of a group. `numbers`: of the group; WIDE: unpacked to bytes.
template <class Format, int M, bool WIDE>
inline __attribute__((always_inline)) void sub_block_product(const uint8_t* numbers, const ActivationsOf<Format>* x,
                                                             int s, ints (*result)[VECTORS]) {
    typedef DotSum<Format::MOST> Dot;
    constexpr int SUB = Format::Scales::SUB, SUBS = STRIP / SUB, PAIRS = STEPS / SUBS / 2;
    constexpr int ZERO = Dot::zero(Format::ZERO);
    static_assert(SUB != 16 || ZERO == ZERO_16);
    const uint8_t* strip = numbers + s / SUBS * (WIDE ? STEPS * VECTORS * QUADS : ChunkLayout<Format>::STRIP_SIZE);
    Dot dot[M][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        ints begin{};
        if constexpr (ZERO != 0) begin = SUB == 16 ? broadcast(x[m].zeros + s) : splat(x[m].sums[s] * ZERO);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) dot[m][v].total = begin;
    }
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; i++) {
        quads u[VECTORS][2];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            if constexpr (WIDE)
                unpack_numbers<Bytes32>(strip, v, s % SUBS * PAIRS + i, u[v]);
            else
                unpack_numbers<Format>(strip, v, s % SUBS * PAIRS + i, u[v]);
#pragma GCC unroll 2
        for (int t = 0; t < 2; t++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const auto four = load_four(x[m].values + s * SUB + (2 * i + t) * 4);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) dot[m][v].add(2 * i + t, u[v][t], four);
            }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) result[m][v] = dot[m][v].end(2 * PAIRS);
}

// Cache lines of a later chunk to prefetch, so many for each strip: to the L1 cache if the task has a single row, which
// takes no longer with a chunk than memory does, otherwise to the L2 cache.
struct LinesAhead {
    const uint8_t* next;
    int per_strip;
    bool single;

    template <int M>
    inline __attribute__((always_inline)) void prefetch() {
        if (M == 1 && single)
            for (int line = 0; line < per_strip; line++, next += 64) __builtin_prefetch(next, 0, 3);
        else
            for (int line = 0; line < per_strip; line++, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// Add the products of M rows with GROUPS groups of inputs of a chunk, beginning with its sub-block `first`. The order
// of sums does not depend on M. `stride`: from the activations of one group to those of the next.
template <class Format, int M, bool WIDE, int GROUPS>
__attribute__((noinline)) void add_groups(const uint8_t* numbers, const ChunkScales<Format>& scales, int first,
                                          const ActivationsOf<Format>* x, size_t stride, LinesAhead ahead,
                                          floats (*sums)[VECTORS]) {
    typedef typename ChunkScales<Format>::Number Number;
    constexpr int SUB = Format::Scales::SUB, SUBS = GROUP_OF<Format> / SUB, PER_STRIP = STRIP / SUB;
    constexpr size_t GROUP_SIZE =
        SUBS / PER_STRIP * (WIDE ? STEPS * VECTORS * QUADS : ChunkLayout<Format>::STRIP_SIZE);
    for (int end = first + GROUPS * SUBS; first < end; first += SUBS, x += stride, numbers += GROUP_SIZE) {
        Number total[M][VECTORS] = {};
        for (int strip = 0; strip < SUBS / PER_STRIP; strip++) {
            ahead.prefetch<M>();
#pragma GCC unroll 2
            for (int half = 0; half < PER_STRIP; half++) {
                const int s = strip * PER_STRIP + half;
                ints dot[M][VECTORS];
                sub_block_product<Format, M, WIDE>(numbers, x, s, dot);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        const Number scale = scales.scales[first + s][v];
                        if constexpr (Format::Scales::INTEGER)
                            total[m][v] += dot[m][v] * scale;
                        else
                            total[m][v] = fma(__builtin_convertvector(dot[m][v], floats), scale, total[m][v]);
                    }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                floats result;
                if constexpr (Format::Scales::INTEGER) {
                    result = __builtin_convertvector(total[m][v], floats) * scales.scale[v];
                    if constexpr (Format::MINS) {
                        ints minimum{};
#pragma GCC unroll 8
                        for (int j = 0; j < SUBS / 2; j++)
                            minimum = dot2(minimum, scales.minimums[first / 2 + j][v], x[m].sums + 2 * j);
                        result = fma(__builtin_convertvector(minimum, floats), scales.minimum[v], result);
                    }
                } else {
                    result = total[m][v];
                    if constexpr (Format::MINS)
                        for (int j = 0; j < SUBS; j++)
                            result = fma(scales.minimums[first + j][v], splat((float)x[m].sums[j]), result);
                }
                sums[m][v] = fma(result, splat(x[m].scale), sums[m][v]);
            }
    }
}

}  // namespace syringa
