// The quantized block formats of GGUF files.
//
// All have one form: a block holds small unsigned numbers u, and each sub-block of SUB inputs a scale and, in some
// formats, a minimum. A weight is scale · (u − ZERO) − minimum, or scale · TABLE[u] for formats with a table. Packed
// scales are those that quantized_product.h stores: of LANES channels side by side.
#pragma once

#include "simd.h"

namespace syringa {

static inline float half_to_float(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f;  // 2^112: the difference of the exponents' biases, exact for subnormal halves too
    return half & 0x8000 ? -value : value;
}

static inline bool half_is_finite(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

// Numbers of the tensor types in GGUF files. The first three have no blocks; see dequantize.h.
enum class BlockType : int32_t {
    F32 = 0, F16 = 1, BF16 = 30,
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
};

constexpr int MAX_BLOCK = 256, MAX_SUBS = 16;  // inputs and sub-blocks of a block

// --- Scales of one block: `read` them from the file, `pack` them for a lane, and read those of LANES channels: `scale`
// and `minimum` of sub-block j, or if INTEGER, common factors of all, and `number` and `minimum_number` of sub-block j,
// by which they are multiplied.

// A half per block of 32 inputs; with MIN, another one for the minimum, which the file adds.
template <bool MIN>
struct HalfScales {
    static constexpr int CHUNK = 64, SUB = 32, BYTES = MIN ? 8 : 4;  // of a chunk and channel
    static constexpr bool INTEGER = false;

    static bool finite(const uint8_t* block) { return half_is_finite(block) && (!MIN || half_is_finite(block + 2)); }
    static void read(const uint8_t* block, float* scales, float* minimums) {
        scales[0] = half_to_float(block);
        minimums[0] = MIN ? -half_to_float(block + 2) : 0.f;
    }
    static void pack(const uint8_t* block, int index, uint8_t* packed, int lane) {
        std::memcpy(packed + (index * LANES + lane) * 2, block, 2);
        if constexpr (MIN) std::memcpy(packed + ((2 + index) * LANES + lane) * 2, block + 2, 2);
    }
    static floats scale(const uint8_t* packed, int j) { return load_halves(packed + j * LANES * 2); }
    static floats minimum(const uint8_t* packed, int j) { return -load_halves(packed + (2 + j) * LANES * 2); }
};

// Q4_K and Q5_K: eight scales and eight minimums of six bits, each with a half as common factor. Packed: number i < 15
// in bits 6 · (i mod 5) of word i / 5; the last one in the words' two upper bits.
struct SuperScales {
    static constexpr int CHUNK = 256, SUB = 32, BYTES = 16;
    static constexpr bool INTEGER = true;

    static bool finite(const uint8_t* block) { return half_is_finite(block) && half_is_finite(block + 2); }
    static void sixes(const uint8_t* block, uint8_t* out) {  // 8 scales, then 8 minimums
        const uint8_t* b = block + 4;
        for (int j = 0; j < 4; j++) {
            out[j] = b[j] & 63, out[8 + j] = b[4 + j] & 63;
            out[4 + j] = (b[8 + j] & 15) | (b[j] >> 6 << 4);
            out[12 + j] = (b[8 + j] >> 4) | (b[4 + j] >> 6 << 4);
        }
    }
    static void read(const uint8_t* block, float* scales, float* minimums) {
        const float scale = half_to_float(block), minimum = half_to_float(block + 2);
        uint8_t six[16];
        sixes(block, six);
        for (int j = 0; j < 8; j++) scales[j] = scale * six[j], minimums[j] = minimum * six[8 + j];
    }
    static void pack(const uint8_t* block, int, uint8_t* packed, int lane) {
        std::memcpy(packed + lane * 2, block, 2);
        std::memcpy(packed + (LANES + lane) * 2, block + 2, 2);
        uint8_t six[16];
        sixes(block, six);
        for (int w = 0; w < 3; w++) {
            uint32_t word = (uint32_t)(six[15] >> (2 * w) & 3) << 30;
            for (int i = 0; i < 5; i++) word |= (uint32_t)six[5 * w + i] << (6 * i);
            std::memcpy(packed + ((1 + w) * LANES + lane) * 4, &word, sizeof word);
        }
    }
    static floats scale(const uint8_t* packed) { return load_halves(packed); }
    static floats minimum(const uint8_t* packed) { return load_halves(packed + LANES * 2); }
    static ints number(const uint8_t* packed, int j) { return six(packed, j); }
    static ints minimum_number(const uint8_t* packed, int j) { return six(packed, 8 + j); }
    static inline __attribute__((always_inline)) ints six(const uint8_t* packed, int i) {
        words word[3];
        std::memcpy(word, packed + LANES * 4, sizeof word);
        if (i < 15) return (ints)(word[i / 5] >> (6 * (i % 5)) & 63u);
        return (ints)(word[0] >> 30 | (word[1] >> 30) << 2 | (word[2] >> 30) << 4);
    }
};

// Q6_K (16 scales for 16 inputs each) and IQ4_XS (8 for 32 each): signed bytes with a half as common factor. Packed
// with 128 added.
template <int SUB_>
struct ByteScales {
    static constexpr int CHUNK = 256, SUB = SUB_, COUNT = CHUNK / SUB, BYTES = 2 + COUNT;
    static constexpr bool INTEGER = true;

    static const uint8_t* half(const uint8_t* block) { return SUB == 16 ? block + 208 : block; }
    static bool finite(const uint8_t* block) { return half_is_finite(half(block)); }
    static int read_number(const uint8_t* block, int j) {
        if (SUB == 16) return (int8_t)block[192 + j];
        const int low = block[4 + j / 2] >> (j % 2 * 4) & 15, high = block[2 + j / 4] >> (j % 4 * 2) & 3;
        return (low | high << 4) - 32;
    }
    static void read(const uint8_t* block, float* scales, float* minimums) {
        const float scale = half_to_float(half(block));
        for (int j = 0; j < COUNT; j++) scales[j] = scale * read_number(block, j), minimums[j] = 0.f;
    }
    static void pack(const uint8_t* block, int, uint8_t* packed, int lane) {
        std::memcpy(packed + lane * 2, half(block), 2);
        for (int j = 0; j < COUNT; j++) packed[(2 + j) * LANES + lane] = (uint8_t)(read_number(block, j) + 128);
    }
    static floats scale(const uint8_t* packed) { return load_halves(packed); }
    static ints number(const uint8_t* packed, int j) { return load_wide(packed + (2 + j) * LANES) - splat(128); }
};

// MXFP4: an exponent per block of 32 inputs. Half of the power of two, because the table holds doubled numbers.
struct ExponentScales {
    static constexpr int CHUNK = 64, SUB = 32, BYTES = 2;
    static constexpr bool INTEGER = false;

    static bool finite(const uint8_t* block) { return block[0] < 250; }  // products with the table stay finite
    static float value(uint8_t exponent) {
        const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static void read(const uint8_t* block, float* scales, float* minimums) {
        scales[0] = value(block[0]), minimums[0] = 0.f;
    }
    static void pack(const uint8_t* block, int index, uint8_t* packed, int lane) {
        packed[index * LANES + lane] = block[0];
    }
    static floats scale(const uint8_t* packed, int j) {
        const ints exponent = load_wide(packed + j * LANES);
        const ints tiny = splat(0x00200000) << exponent, normal = (exponent - splat(1)) << 23;
        return (floats)(exponent < splat(2) ? tiny : normal);
    }
};

// --- Numbers of a block. `numbers` writes them in the order of the inputs, one byte each.

static inline void split_nibbles(const uint8_t* from, int half, uint8_t* to) {
    for (int i = 0; i < half; i++) to[i] = from[i] & 15, to[half + i] = from[i] >> 4;
}

constexpr int8_t NO_TABLE[16] = {};
constexpr int8_t NL_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FP4_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// BITS: stored per number. ZERO: subtracted from the number, which is at most MOST; with a table, added to its entries.
template <int BYTES_, int BITS_, int ZERO_, int MOST_, bool MINS_, class Scales_, bool TABLE_ = false>
struct BlockTraits {
    static constexpr int BYTES = BYTES_, BITS = BITS_, ZERO = ZERO_, MOST = MOST_;
    static constexpr bool MINS = MINS_, HAS_TABLE = TABLE_;
    static constexpr const int8_t* TABLE = NO_TABLE;
    typedef Scales_ Scales;
};

template <bool MIN>  // Q4_0, Q4_1
struct Nibbles32 : BlockTraits<MIN ? 20 : 18, 4, MIN ? 0 : 8, 15, MIN, HalfScales<MIN>> {
    static constexpr int INPUTS = 32;
    static void numbers(const uint8_t* block, uint8_t* u) { split_nibbles(block + (MIN ? 4 : 2), 16, u); }
};

template <bool MIN>  // Q5_0, Q5_1
struct Fives32 : BlockTraits<MIN ? 24 : 22, 5, MIN ? 0 : 16, 31, MIN, HalfScales<MIN>> {
    static constexpr int INPUTS = 32;
    static void numbers(const uint8_t* block, uint8_t* u) {
        const uint8_t* high = block + (MIN ? 4 : 2);
        split_nibbles(high + 4, 16, u);
        for (int i = 0; i < 32; i++) u[i] |= (high[i / 8] >> (i % 8) & 1) << 4;
    }
};

struct Bytes32 : BlockTraits<34, 8, 128, 255, false, HalfScales<false>> {  // Q8_0
    static constexpr int INPUTS = 32;
    static void numbers(const uint8_t* block, uint8_t* u) {
        for (int i = 0; i < 32; i++) u[i] = block[2 + i] ^ 0x80;
    }
};

struct Nibbles256 : BlockTraits<144, 4, 0, 15, true, SuperScales> {  // Q4_K
    static constexpr int INPUTS = 256;
    static void numbers(const uint8_t* block, uint8_t* u) {
        for (int part = 0; part < 4; part++) split_nibbles(block + 16 + part * 32, 32, u + part * 64);
    }
};

struct Fives256 : BlockTraits<176, 5, 0, 31, true, SuperScales> {  // Q5_K
    static constexpr int INPUTS = 256;
    static void numbers(const uint8_t* block, uint8_t* u) {
        for (int part = 0; part < 4; part++) split_nibbles(block + 48 + part * 32, 32, u + part * 64);
        for (int sub = 0; sub < 8; sub++)
            for (int i = 0; i < 32; i++) u[sub * 32 + i] |= (block[16 + i] >> sub & 1) << 4;
    }
};

struct Sixes256 : BlockTraits<210, 6, 32, 63, false, ByteScales<16>> {  // Q6_K
    static constexpr int INPUTS = 256;
    static void numbers(const uint8_t* block, uint8_t* u) {
        for (int part = 0; part < 2; part++, u += 128) {
            const uint8_t *low = block + part * 64, *high = block + 128 + part * 32;
            split_nibbles(low, 64, u);
            for (int sub = 0; sub < 4; sub++)
                for (int i = 0; i < 32; i++) u[sub * 32 + i] |= (high[i] >> (2 * sub) & 3) << 4;
        }
    }
};

struct Table32 : BlockTraits<18, 4, 128, 255, false, HalfScales<false>, true> {  // IQ4_NL
    static constexpr int INPUTS = 32;
    static constexpr const int8_t* TABLE = NL_TABLE;
    static void numbers(const uint8_t* block, uint8_t* u) { split_nibbles(block + 2, 16, u); }
};

struct Table256 : BlockTraits<136, 4, 128, 255, false, ByteScales<32>, true> {  // IQ4_XS
    static constexpr int INPUTS = 256;
    static constexpr const int8_t* TABLE = NL_TABLE;
    static void numbers(const uint8_t* block, uint8_t* u) {
        for (int sub = 0; sub < 8; sub++) split_nibbles(block + 8 + sub * 16, 16, u + sub * 32);
    }
};

struct Floats32 : BlockTraits<17, 4, 16, 28, false, ExponentScales, true> {  // MXFP4
    static constexpr int INPUTS = 32;
    static constexpr const int8_t* TABLE = FP4_TABLE;
    static void numbers(const uint8_t* block, uint8_t* u) { split_nibbles(block + 1, 16, u); }
};

// Call body(format) with the format of a type; return false for other types.
template <class Body>
bool with_format(BlockType type, Body&& body) {
    switch (type) {
        case BlockType::Q4_0: body(Nibbles32<false>()); return true;
        case BlockType::Q4_1: body(Nibbles32<true>()); return true;
        case BlockType::Q5_0: body(Fives32<false>()); return true;
        case BlockType::Q5_1: body(Fives32<true>()); return true;
        case BlockType::Q8_0: body(Bytes32()); return true;
        case BlockType::Q4_K: body(Nibbles256()); return true;
        case BlockType::Q5_K: body(Fives256()); return true;
        case BlockType::Q6_K: body(Sixes256()); return true;
        case BlockType::IQ4_NL: body(Table32()); return true;
        case BlockType::IQ4_XS: body(Table256()); return true;
        case BlockType::MXFP4: body(Floats32()); return true;
        default: return false;
    }
}

}  // namespace syringa
