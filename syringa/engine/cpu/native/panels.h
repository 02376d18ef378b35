// What the products with quantized weights share: panels of channels, groups of activations, and outputs.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace syringa {

constexpr int GROUP = 64;  // inputs with one activation scale, in products with int8 weights
#if defined(__AVX512F__)
constexpr int VECTORS = 2, ROWS = 4;  // integer and float accumulators fill the registers
#elif defined(__AVX2__)
constexpr int VECTORS = 2, ROWS = 4;  // integer accumulators and unpacked weights do; floats are spilled once per group
#else
constexpr int VECTORS = 2, ROWS = 2;
#endif
constexpr int PANEL = VECTORS * LANES;

static_assert(VECTORS == 2, "a gated panel has one vector of gates and one of ups");

// What happens to a product: it replaces y, is added to it, or gelu(product) replaces it.
enum Output { ASSIGN, ADD, GELU };

// What a gated layer computes of its gate g and up u: silu(g) · u, gelu(g) · u, or that of gpt-oss's experts,
// g · sigmoid(alpha · g) · (u + 1) with g ≤ limit and |u| ≤ limit. The same numbers in native/__init__.py.
enum GateKind { SILU, GELU_TANH, CLAMPED_SWIGLU };

struct Gate {
    int kind = SILU;
    float alpha = 0.f, limit = 0.f;

    floats operator()(floats g, floats u) const {
        if (kind == SILU) return silu(g) * u;
        if (kind == GELU_TANH) return gelu_tanh(g) * u;
        const floats most = splat(limit), least = splat(-limit);
        g = g > most ? most : g;  // a NaN stays one
        u = u > most ? most : u < least ? least : u;
        return g * sigmoid(splat(alpha) * g) * (u + splat(1.f));
    }
};

// The weights of a linear layer. Gated ones are two matrices, gate and up, whose panels hold a vector of each, so that
// both operands of the gate are in registers; `outputs` is the number of results.
struct LinearWeights {
    const int outputs, inputs;
    const bool gated;
    Gate gate;

    LinearWeights(int outputs, int inputs, bool gated) : outputs(outputs), inputs(inputs), gated(gated) {}
    virtual ~LinearWeights() = default;
    LinearWeights(const LinearWeights&) = delete;

    // y = x · wᵀ + bias, stored as `output` says. `stride`: between the rows of y.
    virtual void multiply(const float* x, int rows, float* y, size_t stride, const float* bias,
                          Output output) const = 0;
};

// --- Activations

// The inputs of a group of SIZE; `copy` holds those of the last one, padded with zeros.
template <int SIZE>
const float* group_of(const float* x, int inputs, int group, float* copy) {
    const int begin = group * SIZE, length = std::min(SIZE, inputs - begin);
    if (length == SIZE) return x + begin;
    std::fill(copy, copy + SIZE, 0.f);
    std::memcpy(copy, x + begin, sizeof(float) * std::max(length, 0));
    return copy;
}

// The largest magnitude of a group, or NaN if there is one: then the scale is NaN, and so are the products.
template <int SIZE>
float group_peak(const float* values) {
    ints peaks{};  // the bits of positive floats are in the order of the floats, and those of NaN come last
    for (int i = 0; i < SIZE; i += LANES) {
        const ints bits = (ints)load(values + i) & 0x7fffffff;
        peaks = bits > peaks ? bits : peaks;
    }
    const int32_t most = max_lane(peaks);
    float peak;
    std::memcpy(&peak, &most, sizeof peak);
    return peak;
}

inline ints round_scaled(floats values, float scale) {
    const floats magic = splat(12582912.f);  // adding it rounds to the nearest integer, ties to even
    return __builtin_convertvector(fma(values, splat(scale), magic) - magic, ints);
}

// --- Outputs

// Where the products of a panel go: rows of `outputs` numbers.
struct PanelOutput {
    float* y;
    size_t stride;
    int outputs;
    const float* bias;
    const Gate* gate;  // null: not gated
    Output output;
};

// A vector of outputs may extend past the last one.
inline floats with_bias(floats value, const float* bias, int n, int outputs) {
    if (!bias) return value;
    if (n + LANES <= outputs) return value + load(bias + n);
    for (int i = 0; n + i < outputs; i++) value[i] += bias[n + i];
    return value;
}
inline void store_outputs(float* row, int n, int outputs, floats value, Output output) {
    if (output == GELU) value = gelu(value);
    if (n + LANES <= outputs) {
        store(row + n, output == ADD ? value + load(row + n) : value);
    } else {
        for (int i = 0; n + i < outputs; i++) row[n + i] = output == ADD ? value[i] + row[n + i] : value[i];
    }
}

// Store panel p of a row. Inlined, so that sums stay in registers and the rows of a block overlap.
inline __attribute__((always_inline)) void store_panel(const PanelOutput& to, int p, size_t row, const floats* result) {
    float* out = to.y + row * to.stride;
    if (to.gate) {
        const int n = p * LANES;
        const floats gate = with_bias(result[0], to.bias, n, to.outputs);
        const floats up = with_bias(result[1], to.bias ? to.bias + to.outputs : nullptr, n, to.outputs);
        store_outputs(out, n, to.outputs, (*to.gate)(gate, up), to.output);
    } else {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int n = p * PANEL + v * LANES;
            store_outputs(out, n, to.outputs, with_bias(result[v], to.bias, n, to.outputs), to.output);
        }
    }
}

// Call body with the number of rows, 1 to M, as a constant; do nothing for 0.
template <int M, class Body>
inline void dispatch_rows(int rows, Body&& body) {
    if constexpr (M > 0) {
        if (rows == M)
            body(std::integral_constant<int, M>());
        else
            dispatch_rows<M - 1>(rows, body);
    }
}

}  // namespace syringa
