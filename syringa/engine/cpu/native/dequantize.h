// Rows of a stored tensor as fp32, with the same bits as the dequantization of the `gguf` package.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "gguf_blocks.h"
#include "simd.h"
#include "thread_pool.h"

namespace syringa {

// Rows of a tensor as they are in a file. `order`: the file's row of each channel; null: as in the file.
struct TensorBlocks {
    const uint8_t* data;
    const int32_t* order;
    BlockType type;
    int rows;

    size_t row(int n) const { return order ? order[n] : n; }
};

// Write `inputs` weights of a row that begins at `blocks`.
template <class Format>
void dequantize_row(const uint8_t* blocks, int inputs, float* out) {
    constexpr int SUB = std::min(Format::Scales::SUB, Format::INPUTS);
    uint8_t u[MAX_BLOCK], table[16];
    float scales[MAX_SUBS], minimums[MAX_SUBS];
    for (int n = 0; n < 16; n++) table[n] = (uint8_t)(Format::TABLE[n] + Format::ZERO);
    for (int k = 0; k < inputs; k += Format::INPUTS, blocks += Format::BYTES) {
        Format::numbers(blocks, u);
        if constexpr (Format::HAS_TABLE)
            for (int i = 0; i < Format::INPUTS; i++) u[i] = table[u[i]];
        Format::Scales::read(blocks, scales, minimums);
        for (int i = 0; i < Format::INPUTS; i += LANES) {
            const floats number = __builtin_convertvector(load_wide(u + i) - splat(Format::ZERO), floats);
            floats value = splat(scales[i / SUB]) * number;
            if constexpr (Format::MINS) value = rounded(value) - splat(minimums[i / SUB]);
            store(out + k + i, value);
        }
    }
}

// --- Checks: whether all weights of a row are finite numbers. Those of a block are if its scales are.

template <class Format>
bool blocks_are_finite(const uint8_t* blocks, int inputs) {
    bool finite = true;
    for (int k = 0; k < inputs; k += Format::INPUTS, blocks += Format::BYTES)
        finite &= Format::Scales::finite(blocks);
    return finite;
}

// `T`: an unsigned integer of the number's size. `infinity`: its bits; NaNs are above.
template <class T>
bool numbers_are_finite(const uint8_t* data, int inputs, T infinity) {
    const T magnitude = std::numeric_limits<T>::max() / 2;
    T largest = 0;
    for (int k = 0; k < inputs; k++) {
        T bits;
        std::memcpy(&bits, data + (size_t)k * sizeof bits, sizeof bits);
        largest = std::max(largest, (T)(bits & magnitude));
    }
    return largest < infinity;
}

// --- Rows of any type

// Row n of a tensor, as it is in the file.
template <class Format>
const uint8_t* blocks_of(const TensorBlocks& tensor, int inputs, int n) {
    return tensor.data + tensor.row(n) * (inputs / Format::INPUTS) * Format::BYTES;
}
inline const uint8_t* numbers_of(const TensorBlocks& tensor, int inputs, int n, size_t size) {
    return tensor.data + tensor.row(n) * inputs * size;
}

// Whether row n has finite numbers only; false also for a type that is not known.
inline bool row_is_finite(const TensorBlocks& tensor, int inputs, int n) {
    switch (tensor.type) {
        case BlockType::F32: return numbers_are_finite<uint32_t>(numbers_of(tensor, inputs, n, 4), inputs, 0x7f800000u);
        case BlockType::F16: return numbers_are_finite<uint16_t>(numbers_of(tensor, inputs, n, 2), inputs, 0x7c00u);
        case BlockType::BF16: return numbers_are_finite<uint16_t>(numbers_of(tensor, inputs, n, 2), inputs, 0x7f80u);
        default: break;
    }
    bool finite = false;
    with_format(tensor.type, [&](auto format) {
        typedef decltype(format) Format;
        finite = blocks_are_finite<Format>(blocks_of<Format>(tensor, inputs, n), inputs);
    });
    return finite;
}

// Write row n, of finite numbers, to `out`.
inline void read_row(const TensorBlocks& tensor, int inputs, int n, float* out) {
    const uint8_t* halves = numbers_of(tensor, inputs, n, 2);
    int k = 0;
    switch (tensor.type) {
        case BlockType::F32:
            std::memcpy(out, numbers_of(tensor, inputs, n, 4), (size_t)inputs * 4);
            return;
        case BlockType::F16:
            for (; k + LANES <= inputs; k += LANES) store(out + k, load_halves(halves + (size_t)k * 2));
            for (; k < inputs; k++) out[k] = half_to_float(halves + (size_t)k * 2);
            return;
        case BlockType::BF16:
            for (; k < inputs; k++) {
                uint16_t half;
                std::memcpy(&half, halves + (size_t)k * 2, sizeof half);
                out[k] = to_float(half);
            }
            return;
        default:
            with_format(tensor.type, [&](auto format) {
                typedef decltype(format) Format;
                dequantize_row<Format>(blocks_of<Format>(tensor, inputs, n), inputs, out);
            });
    }
}

// Call body(n) for each row, in parallel. Return whether all calls returned true.
template <class Body>
bool all_rows(int rows, Body&& body) {
    constexpr int RUN = 16;  // rows of a task
    std::atomic<bool> all{true};
    pool().run((rows + RUN - 1) / RUN, [&](int task) {
        bool each = true;
        for (int n = task * RUN; n < std::min(rows, (task + 1) * RUN); n++) each &= body(n);
        if (!each) all = false;
    });
    return all;
}

inline bool tensor_is_finite(const TensorBlocks& tensor, int inputs) {
    return all_rows(tensor.rows, [&](int n) { return row_is_finite(tensor, inputs, n); });
}

// Round finite numbers to bf16, ties to even.
inline void round_row(const float* row, int inputs, uint16_t* out) {
    int k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        const words bits = (words)load(row + k);
        const halves half = __builtin_convertvector((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, halves);
        std::memcpy(out + k, &half, sizeof half);
    }
    for (; k < inputs; k++) from_float(row[k], out + k);
}

// Write all rows, as fp32 or with `half` as bf16. Return whether all their numbers are finite.
inline bool read_tensor(const TensorBlocks& tensor, int inputs, void* out, bool half) {
    return all_rows(tensor.rows, [&](int n) {
        if (!row_is_finite(tensor, inputs, n)) return false;
        if (half) {
            thread_local std::vector<float> row;
            row.resize(inputs);
            read_row(tensor, inputs, n, row.data());
            round_row(row.data(), inputs, (uint16_t*)out + (size_t)n * inputs);
        } else {
            read_row(tensor, inputs, n, (float*)out + (size_t)n * inputs);
        }
        return true;
    });
}

}  // namespace syringa
