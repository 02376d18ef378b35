// y = x · wᵀ in fp32, with weights in bf16 or fp32.
//
// Weights are stored in panels of DENSE_PANEL channels: for each input, the panel's channels are adjacent, so that a
// panel is read sequentially and needs no reduction across lanes. Each output is one chain of fused multiply-adds over
// the inputs in order, so a row's bits depend on that row alone. (BLAS libraries choose kernels by the number of rows.)
#pragma once

#include <algorithm>

#include "thread_pool.h"
#include "simd.h"

namespace syringa {

constexpr int DENSE_PANEL = 32;  // the same constant as in layers/linear.py, which builds the panels
#if defined(__AVX512F__)
constexpr int DENSE_ROWS = 8;
#else
constexpr int DENSE_ROWS = 2;
#endif

struct DenseWeights {
    const void* values;  // [panels][inputs][DENSE_PANEL]
    int outputs, inputs, half;  // half: bf16
};

template <int M, class T>
void dense_panel(const T* weights, int inputs, const float* x, float* y, size_t stride, int width, const float* bias,
                 bool add) {
    constexpr int PARTS = DENSE_PANEL / LANES;
    floats acc[M][PARTS] = {};
    for (int k = 0; k < inputs; k++, weights += DENSE_PANEL) {
        floats part[PARTS];
#pragma GCC unroll 8
        for (int v = 0; v < PARTS; v++) part[v] = load(weights + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const floats one = splat(x[(size_t)m * inputs + k]);
#pragma GCC unroll 8
            for (int v = 0; v < PARTS; v++) acc[m][v] = fma(one, part[v], acc[m][v]);
        }
    }
    for (int m = 0; m < M; m++) {
        float values[DENSE_PANEL];
        for (int v = 0; v < PARTS; v++) store(values + v * LANES, acc[m][v]);
        float* out = y + m * stride;
        for (int n = 0; n < width; n++) {
            if (bias) values[n] += bias[n];
            out[n] = add ? out[n] + values[n] : values[n];
        }
    }
}

template <int M, class... Rest>
void dense_tail(int left, Rest... rest) {
    if constexpr (M > 0) {
        if (left == M)
            dense_panel<M>(rest...);
        else
            dense_tail<M - 1>(left, rest...);
    }
}

template <class T>
void dense_linear(const DenseWeights& w, const float* x, int rows, float* y, const float* bias, bool add) {
    const size_t stride = w.outputs;
    // A block of rows stays in the L2 cache while panels are streamed.
    const int block = std::max(DENSE_ROWS, std::min(rows, (1 << 16) / w.inputs) / DENSE_ROWS * DENSE_ROWS);
    const int blocks = (rows + block - 1) / block, panels = (w.outputs + DENSE_PANEL - 1) / DENSE_PANEL;
    pool().run(blocks * panels, [&](int task) {
        const int p = task % panels, first = task / panels * block, last = std::min(rows, first + block);
        const T* weights = (const T*)w.values + (size_t)p * w.inputs * DENSE_PANEL;
        const int width = std::min(DENSE_PANEL, w.outputs - p * DENSE_PANEL);
        const float* offset = bias ? bias + p * DENSE_PANEL : nullptr;
        int row = first;
        const auto in = [&] { return x + (size_t)row * w.inputs; };
        const auto out = [&] { return y + row * stride + p * DENSE_PANEL; };
        for (; row + DENSE_ROWS <= last; row += DENSE_ROWS)
            dense_panel<DENSE_ROWS>(weights, w.inputs, in(), out(), stride, width, offset, add);
        dense_tail<DENSE_ROWS - 1>(last - row, weights, w.inputs, in(), out(), stride, width, offset, add);
    });
}

}  // namespace syringa
