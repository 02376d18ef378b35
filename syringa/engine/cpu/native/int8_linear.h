// y = x · wᵀ with int8 weights and activations.
//
// Weights: one scale per output channel, stored as unsigned bytes (value + 128) because the byte dot product takes one
// unsigned operand. Stored in panels of PANEL channels: PANEL × 4 bytes for each four inputs, read sequentially.
// Activations: signed bytes with one scale per row and group of GROUP inputs. An outlier costs precision only in its
// own group, and a row's result depends on that row alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "arena.h"
#include "dequantize.h"
#include "panels.h"
#include "simd.h"
#include "thread_pool.h"

namespace syringa {

struct Int8Weights : LinearWeights {
    const int padded;  // inputs rounded up to whole groups
    std::vector<float> scales;
    uint8_t* values;

    Int8Weights(int outputs, int inputs, bool gated)
        : LinearWeights(outputs, inputs, gated),
          padded((inputs + GROUP - 1) / GROUP * GROUP),
          scales(panels() * PANEL),
          values((uint8_t*)Arena::allocate((size_t)panels() * padded * PANEL)),
          chunk_(Arena::current_chunk()) {}
    ~Int8Weights() override { Arena::release(chunk_); }

    void multiply(const float* x, int rows, float* y, size_t stride, const float* bias, Output output) const override;

    int width() const { return gated ? PANEL / 2 : PANEL; }  // outputs of a panel
    int panels() const { return (outputs + width() - 1) / width(); }
    uint8_t* panel(int p) const { return values + (size_t)p * padded * PANEL; }

  private:
    Arena::Chunk* chunk_;
};

// Quantize a row of `padded` weights into channel c of a panel. Return its scale.
inline float quantize_channel(const float* row, int padded, uint8_t* panel, int c) {
    words peaks{};  // the bits of positive floats are in the order of the floats
    for (int k = 0; k < padded; k += LANES) {
        const words bits = (words)load(row + k) & 0x7fffffffu;
        peaks = bits > peaks ? bits : peaks;
    }
    const float peak = max_lane((floats)peaks), inverse = peak > 0.f ? 127.f / peak : 0.f;
    const floats magic = splat(12582912.f);  // adding it rounds to the nearest integer, ties to even
    for (int k = 0; k < padded; k += LANES) {
        const floats scaled = rounded(load(row + k) * splat(inverse));
        const bytes q = __builtin_convertvector(__builtin_convertvector(scaled + magic - magic, ints) + 128, bytes);
        for (int i = 0; i < LANES; i += 4) std::memcpy(panel + (size_t)(k + i) * PANEL + c * 4, (const char*)&q + i, 4);
    }
    return peak / 127.f;
}

// Quantize tensors of a layer to int8, side by side, and pack them into panels. The first half of the rows of gated
// ones are gates. Padding is harmless: its activations are 0, and its outputs are not stored. Return null if a weight
// is not a finite number.
inline Int8Weights* quantize_tensors(const TensorBlocks* parts, int count, int inputs, bool gated) {
    int rows = 0;
    for (int i = 0; i < count; i++) rows += parts[i].rows;
    auto weights = std::make_unique<Int8Weights>(gated ? rows / 2 : rows, inputs, gated);
    std::atomic<bool> finite{true};
    pool().run(weights->panels(), [&](int p) {
        std::vector<float> row(weights->padded);
        for (int c = 0; c < PANEL; c++) {
            const int n = p * weights->width() + (gated ? c % LANES : c);
            if (n >= weights->outputs) continue;
            int at = gated && c >= LANES ? weights->outputs + n : n;
            const TensorBlocks* part = parts;
            for (; at >= part->rows; part++) at -= part->rows;
            if (!row_is_finite(*part, inputs, at)) {
                finite = false;
                return;
            }
            read_row(*part, inputs, at, row.data());
            weights->scales[p * PANEL + c] = quantize_channel(row.data(), weights->padded, weights->panel(p), c);
        }
    });
    return finite ? weights.release() : nullptr;
}

struct Int8Rows {
    std::vector<activation_t> values;  // [rows][padded]
    std::vector<float> scales;    // [rows][groups]
    std::vector<int32_t> offset;  // [rows][groups]: −128 · the sum of the bytes, which cancels the weights' + 128

    void resize(size_t rows, int padded) {
        const size_t groups = padded / GROUP;
        if (values.size() < rows * padded) values.resize(rows * padded);
        if (scales.size() < rows * groups) scales.resize(rows * groups), offset.resize(rows * groups);
    }
};

inline void quantize_row(const float* x, int inputs, int padded, activation_t* activations, float* scales,
                         int32_t* offset) {
    for (int g = 0; g < padded / GROUP; g++) {
        float copy[GROUP];
        const float* values = group_of<GROUP>(x, inputs, g, copy);
        const float peak = group_peak<GROUP>(values), inverse = peak > 0.f ? 127.f / peak : 0.f;
        ints total{};
        for (int i = 0; i < GROUP; i += LANES) {
            const ints q = round_scaled(load(values + i), inverse);
            total += q;
            store_activations(activations + g * GROUP + i, q);
        }
        scales[g] = peak / 127.f;
        offset[g] = -128 * sum(total);
    }
}

// Multiply M rows with one panel. The order of sums does not depend on M. AHEAD: prefetch the next panel meanwhile.
template <int M, bool AHEAD = false>
void panel_product(const Int8Weights& w, int p, const Int8Rows& x, size_t row, const PanelOutput& out) {
    const int groups = w.padded / GROUP;
    const uint8_t* weights = w.panel(p);
    const activation_t* activations = x.values.data() + row * w.padded;
    const float* scales = x.scales.data() + row * groups;
    const int32_t* offset = x.offset.data() + row * groups;
    const size_t ahead = (size_t)w.padded * PANEL;
    floats result[M][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) result[m][v] = floats{};
    for (int g = 0; g < groups; g++) {
        ints acc[M][VECTORS];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[m][v] = splat(offset[m * groups + g]);
        for (int k = g * GROUP; k < (g + 1) * GROUP; k += 4, weights += PANEL * 4) {
            if constexpr (AHEAD)
                for (int line = 0; line < PANEL * 4; line += 64) __builtin_prefetch(weights + ahead + line, 0, 2);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const activation_t* four = activations + (size_t)m * w.padded + k;
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[m][v] = dot4(acc[m][v], weights + v * LANES * 4, four);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                result[m][v] =
                    fma(__builtin_convertvector(acc[m][v], floats), splat(scales[m * groups + g]), result[m][v]);
    }
    const float* scale = w.scales.data() + (size_t)p * PANEL;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) result[m][v] = result[m][v] * load(scale + v * LANES);
        store_panel(out, p, row + m, result[m]);
    }
}

inline void Int8Weights::multiply(const float* x, int rows, float* y, size_t stride, const float* bias,
                                  Output output) const {
    static Int8Rows quantized;  // not reentrant: the engine has one step loop
    quantized.resize(rows, padded);
    const int groups = padded / GROUP;
    const auto quantize = [&](int r) {
        quantize_row(x + (size_t)r * inputs, inputs, padded, quantized.values.data() + (size_t)r * padded,
                     quantized.scales.data() + (size_t)r * groups, quantized.offset.data() + (size_t)r * groups);
    };
    if (rows < 8)
        for (int r = 0; r < rows; r++) quantize(r);
    else
        pool().run((rows + 7) / 8, [&](int c) {
            for (int r = c * 8; r < std::min(rows, c * 8 + 8); r++) quantize(r);
        });
    // A block of rows stays in the L2 cache while a run of panels is streamed.
    const int block = std::max(ROWS, std::min(rows, (1 << 18) / padded) / ROWS * ROWS);
    const int blocks = (rows + block - 1) / block;
    const int panels = this->panels(), run = std::max(1, std::min(8, panels / (4 * pool().threads())));
    const int runs = (panels + run - 1) / run;
    const PanelOutput out{y, stride, outputs, bias, gated ? &gate : nullptr, output};
    pool().run(blocks * runs, [&](int task) {
        const int first = task / runs * block, last = std::min(rows, first + block);
        for (int p = task % runs * run; p < std::min(panels, (task % runs + 1) * run); p++) {
            // The first rows wait for the panel to arrive from memory. The second ones find it in the cache and have
            // time to prefetch the next panel.
            int row = first;
            for (; row + ROWS <= last; row += ROWS)
                if (row == first + ROWS)
                    panel_product<ROWS, true>(*this, p, quantized, row, out);
                else
                    panel_product<ROWS>(*this, p, quantized, row, out);
            dispatch_rows<ROWS - 1>(last - row, [&](auto count) {
                panel_product<decltype(count)::value>(*this, p, quantized, row, out);
            });
        }
    });
}

}  // namespace syringa
