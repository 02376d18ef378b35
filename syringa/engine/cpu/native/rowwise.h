// Row-wise operations between the matrix products. Each processes one row at a time, in a fixed order.
#pragma once

#include <algorithm>

#include "attention.h"
#include "panels.h"
#include "thread_pool.h"
#include "simd.h"

namespace syringa {

inline void norm_row(const float* x, const float* weight, int size, float eps, float* y) {
    floats squares{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float scale = 1.f / std::sqrt(total / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < size; i++) y[i] = x[i] * scale * weight[i];
}

inline void rms_norm(const float* x, const float* weight, int rows, int size, float eps, float* y) {
    for_rows(rows, size, [&](int r) { norm_row(x + (size_t)r * size, weight, size, eps, y + (size_t)r * size); });
}

struct LayerNorm {
    const float *weight, *bias;
    float eps;
};

inline void layer_norm_row(const float* x, const LayerNorm& norm, int size, float* y) {
    floats totals{}, squares{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) totals = totals + load(x + i);
    float total = sum(totals);
    for (; i < size; i++) total += x[i];
    const float mean = total / (float)size;
    for (i = 0; i + LANES <= size; i += LANES) {
        const floats d = load(x + i) - splat(mean);
        squares = fma(d, d, squares);
    }
    float square = sum(squares);
    for (; i < size; i++) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.f / std::sqrt(square / (float)size + norm.eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(y + i, fma((load(x + i) - splat(mean)) * splat(scale), load(norm.weight + i), load(norm.bias + i)));
    for (; i < size; i++) y[i] = (x[i] - mean) * scale * norm.weight[i] + norm.bias[i];
}

inline void layer_norm(const float* x, const LayerNorm& norm, int rows, int size, float* y) {
    for_rows(rows, size, [&](int r) { layer_norm_row(x + (size_t)r * size, norm, size, y + (size_t)r * size); });
}

inline void gelu_rows(float* x, int rows, int size) {
    for_rows(rows, size, [&](int r) {
        float* row = x + (size_t)r * size;
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(row + i, gelu(load(row + i)));
        for (; i < size; i++) row[i] = gelu(splat(row[i]))[0];
    });
}

// y = gate(g, u), from rows [g | u]
inline void gate_rows(const Gate& gate, const float* x, int rows, int size, float* y) {
    for_rows(rows, 2 * size, [&](int r) {
        const float *g = x + (size_t)r * 2 * size, *u = g + size;
        float* out = y + (size_t)r * size;
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, gate(load(g + i), load(u + i)));
        for (; i < size; i++) out[i] = gate(splat(g[i]), splat(u[i]))[0];
    });
}

// x += rms_norm(y), which overwrites y
inline void add_rms_norm(float* y, const float* weight, int rows, int size, float eps, float* x) {
    for_rows(rows, 2 * size, [&](int r) {
        float *from = y + (size_t)r * size, *to = x + (size_t)r * size;
        norm_row(from, weight, size, eps, from);
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(to + i, load(to + i) + load(from + i));
        for (; i < size; i++) to[i] += from[i];
    });
}

// x *= sigmoid(gate), in place. A row has `size` gates, or with `single` one for all its numbers.
inline void sigmoid_mul(float* x, int rows, int size, const float* gates, size_t stride, bool single) {
    for_rows(rows, 2 * size, [&](int r) {
        const float* gate = gates + (size_t)r * stride;
        float* row = x + (size_t)r * size;
        const floats all = sigmoid(splat(gate[0]));
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(row + i, load(row + i) * (single ? all : sigmoid(load(gate + i))));
        for (; i < size; i++) row[i] *= single ? all[0] : sigmoid(splat(gate[i]))[0];
    });
}

struct RotaryShape {
    int heads, kv_heads, size, rotary;  // rotary: number of leading components to rotate; 0: none
    float eps;                          // of the query and key norms, if any
};

inline void rotate(float* x, const float* cosine, const float* sine, int rotary) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

// Rows [q | k | v]: normalize and rotate q and k in place, then write k and v to their cache slots.
template <class T>
void rotary_and_cache(const RotaryShape& shape, float* qkv, size_t stride, int rows, const int32_t* positions,
                      const int64_t* slots, const float* cosine, const float* sine, const float* q_norm,
                      const float* k_norm, T* keys, T* values) {
    const int size = shape.size, half = shape.rotary / 2;
    for_rows(rows, stride, [&](int r) {
        float* row = qkv + (size_t)r * stride;
        const float *c = cosine + (size_t)positions[r] * half, *s = sine + (size_t)positions[r] * half;
        for (int h = 0; h < shape.heads + shape.kv_heads; h++) {
            const float* norm = h < shape.heads ? q_norm : k_norm;
            if (norm) norm_row(row + (size_t)h * size, norm, size, shape.eps, row + (size_t)h * size);
            if (half) rotate(row + (size_t)h * size, c, s, shape.rotary);
        }
        const size_t block = slots[r] / BLOCK, offset = slots[r] % BLOCK;
        // Values are read in pairs. If no token of this step follows, clear the other half: a NaN or infinity that the
        // block's last owner left would survive multiplication by zero.
        const bool alone = offset % 2 == 0 && (r + 1 == rows || slots[r + 1] != slots[r] + 1);
        for (int h = 0; h < shape.kv_heads; h++) {
            const float *k = row + (size_t)(shape.heads + h) * size, *v = k + (size_t)shape.kv_heads * size;
            T* key = keys + (block * shape.kv_heads + h) * BLOCK * size + offset * 2;
            T* value = values + (block * shape.kv_heads + h) * BLOCK * size + offset / 2 * size * 2 + offset % 2;
            for (int d = 0; d < size; d++) from_float(k[d], key + (size_t)(d / 2) * BLOCK * 2 + d % 2);
            for (int d = 0; d < size; d++) from_float(v[d], value + (size_t)d * 2);
            if (alone)
                for (int d = 0; d < size; d++) value[(size_t)d * 2 + 1] = 0;
        }
    });
}

}  // namespace syringa
