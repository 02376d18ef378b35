// A gated delta net between its projections (models/delta_rule.py has the formulas), token by token.
//
// One task per sequence and key head: its channels of the convolution and the states of its value heads belong to no
// other task. A token is computed in the same order whatever is computed with it, so a row gets the same bits alone, in
// a batch, in one chunk or in many. A head's state stays in the core's cache while its tokens pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

namespace syringa {

struct DeltaNetLayer {
    int key_heads, value_heads, key_size, value_size, kernel;
    float eps;
    const float *conv;           // [kernel][channels]
    const float *rate, *dt_bias;  // [value_heads]; rate is −e^A
    const float *norm;           // [value_size]
};

// Sequence s has the rows [starts[s], starts[s+1]), the first at position first[s], and its state in slots[s]. After
// snapshot_rows[s] rows, if not 0, its state is also written to snapshot_slots[s].
struct DeltaNetStates {
    int sequences;
    const int32_t *starts, *first, *slots, *snapshot_rows, *snapshot_slots;
    float *conv;       // [slots][kernel − 1][channels]
    float *recurrent;  // [slots][value_heads][key_size][value_size]
};

constexpr float DELTA_L2_EPS = 1e-6f;

inline float dot_row(const float* x, const float* y, int size) {
    floats acc{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) acc = fma(load(x + i), load(y + i), acc);
    float total = sum(acc);
    for (; i < size; i++) total += x[i] * y[i];
    return total;
}

// silu(x), in place
inline void silu_row(float* x, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, silu(load(x + i)));
    for (; i < size; i++) x[i] = silu(splat(x[i]))[0];
}

inline void scale_to_length(float* x, int size, float length) {
    const float scale = length / std::sqrt(dot_row(x, x, size) + DELTA_L2_EPS);
    for (int i = 0; i < size; i++) x[i] *= scale;
}

// Channels [from, from + size) of the convolution of a row, and its place in `history`, the kernel − 1 inputs before it:
// the oldest is overwritten by the next one.
inline void convolve(const DeltaNetLayer& layer, int channels, const float* row, int from, int size, float* history,
                     float* out) {
    const int last = layer.kernel - 1;
    std::memset(out, 0, sizeof(float) * size);
    for (int j = 0; j < last; j++) {
        const float *x = history + (size_t)j * size, *w = layer.conv + (size_t)j * channels + from;
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, fma(load(x + i), load(w + i), load(out + i)));
        for (; i < size; i++) out[i] = fma(splat(x[i]), splat(w[i]), splat(out[i]))[0];
    }
    const float *x = row + from, *w = layer.conv + (size_t)last * channels + from;
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, fma(load(x + i), load(w + i), load(out + i)));
    for (; i < size; i++) out[i] = fma(splat(x[i]), splat(w[i]), splat(out[i]))[0];
    std::memmove(history, history + size, sizeof(float) * (last - 1) * size);
    std::memcpy(history + (size_t)(last - 1) * size, x, sizeof(float) * size);
    silu_row(out, size);
}

// W vectors of columns of `delta_step`.
template <int W>
void delta_columns(float* state, const float* q, const float* k, const float* v, float decay, float beta, int key_size,
                   int size, float* out) {
    floats update[W] = {}, y[W] = {};
    for (int d = 0; d < key_size; d++)  // the decayed state, and what it predicts for the key
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            float* at = state + (size_t)d * size + w * LANES;
            const floats s = load(at) * splat(decay);
            store(at, s);
            update[w] = fma(s, splat(k[d]), update[w]);
        }
    for (int w = 0; w < W; w++) update[w] = (load(v + w * LANES) - update[w]) * splat(beta);
    for (int d = 0; d < key_size; d++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            float* at = state + (size_t)d * size + w * LANES;
            const floats s = fma(update[w], splat(k[d]), load(at));
            store(at, s);
            y[w] = fma(s, splat(q[d]), y[w]);
        }
    for (int w = 0; w < W; w++) store(out + w * LANES, y[w]);
}

// One token of a value head: update `state`, [key_size][size], and write the output, `size` numbers.
inline void delta_step(float* state, const float* q, const float* k, const float* v, float decay, float beta,
                       int key_size, int size, float* out) {
    int i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        delta_columns<4>(state + i, q, k, v + i, decay, beta, key_size, size, out + i);
    for (; i + LANES <= size; i += LANES)
        delta_columns<1>(state + i, q, k, v + i, decay, beta, key_size, size, out + i);
    for (; i < size; i++) {
        float update = 0.f, y = 0.f;
        for (int d = 0; d < key_size; d++) update += (state[(size_t)d * size + i] *= decay) * k[d];
        update = (v[i] - update) * beta;
        for (int d = 0; d < key_size; d++) y += (state[(size_t)d * size + i] += update * k[d]) * q[d];
        out[i] = y;
    }
}

inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// Rows [q | k | v | z | b | a] of the input projection, to `out`, [rows][value width].
inline void delta_net(const DeltaNetLayer& layer, const DeltaNetStates& batch, const float* projected, size_t stride,
                      float* out) {
    const int keys = layer.key_size, values = layer.value_size, group = layer.value_heads / layer.key_heads;
    const int key_width = layer.key_heads * keys, value_width = layer.value_heads * values;
    const int channels = 2 * key_width + value_width, last = layer.kernel - 1;
    const size_t matrix = (size_t)keys * values, conv_size = (size_t)last * channels;
    const size_t slot_size = matrix * layer.value_heads;
    pool().run(batch.sequences * layer.key_heads, [&](int task) {
        const int s = task / layer.key_heads, head = task % layer.key_heads;
        const int widths[3] = {keys, keys, group * values};
        const int from[3] = {head * keys, key_width + head * keys, 2 * key_width + head * group * values};
        static thread_local std::vector<float> buffer;  // the last inputs and the convolved ones, of q, k and v each
        const size_t width = 2 * keys + group * values;
        buffer.resize((last + 1) * width);
        float* const before = buffer.data();
        float* const history[3] = {before, before + (size_t)last * keys, before + (size_t)2 * last * keys};
        float *q = before + last * width, *k = q + keys, *v = k + keys;
        float* const parts[3] = {q, k, v};
        const size_t slot = batch.slots[s];
        float* states = batch.recurrent + slot * slot_size + (size_t)head * group * matrix;
        const auto copy_history = [&](float* conv, bool to_cache) {
            for (int p = 0; p < 3; p++)
                for (int j = 0; j < last; j++) {
                    float *cached = conv + (size_t)j * channels + from[p], *own = history[p] + (size_t)j * widths[p];
                    std::memcpy(to_cache ? cached : own, to_cache ? own : cached, sizeof(float) * widths[p]);
                }
        };
        if (batch.first[s] == 0) {
            std::memset(before, 0, sizeof(float) * last * width);
            std::memset(states, 0, sizeof(float) * group * matrix);
        } else {
            copy_history(batch.conv + slot * conv_size, false);
        }
        const int begin = batch.starts[s], end = batch.starts[s + 1];
        for (int r = begin; r < end; r++) {
            const float* row = projected + (size_t)r * stride;
            for (int p = 0; p < 3; p++) convolve(layer, channels, row, from[p], widths[p], history[p], parts[p]);
            scale_to_length(q, keys, 1.f / std::sqrt((float)keys));
            scale_to_length(k, keys, 1.f);
            for (int g = 0; g < group; g++) {
                const int h = head * group + g;
                const float *gate = row + channels, *b = gate + value_width, *a = b + layer.value_heads;
                const float decay = std::exp(layer.rate[h] * softplus(a[h] + layer.dt_bias[h]));
                const float beta = 1.f / (1.f + std::exp(-b[h]));
                float* y = out + (size_t)r * value_width + (size_t)h * values;
                delta_step(states + g * matrix, q, k, v + (size_t)g * values, decay, beta, keys, values, y);
                const float scale = 1.f / std::sqrt(dot_row(y, y, values) / (float)values + layer.eps);
                const float* z = gate + (size_t)h * values;
                int i = 0;
                for (; i + LANES <= values; i += LANES)
                    store(y + i, load(y + i) * splat(scale) * load(layer.norm + i) * silu(load(z + i)));
                for (; i < values; i++) y[i] = y[i] * scale * layer.norm[i] * silu(splat(z[i]))[0];
            }
            if (r + 1 - begin == batch.snapshot_rows[s]) {
                const size_t target = batch.snapshot_slots[s];
                copy_history(batch.conv + target * conv_size, true);
                std::memcpy(batch.recurrent + target * slot_size + (size_t)head * group * matrix, states,
                            sizeof(float) * group * matrix);
            }
        }
        copy_history(batch.conv + slot * conv_size, true);
    });
}

}  // namespace syringa
