// All layers of a quantized decoder in one call. A step of a small batch takes a few milliseconds; three hundred calls
// from Python would add a fifth. Same order of operations as models/decoder.py, which runs the other precisions.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "panels.h"
#include "rowwise.h"

namespace syringa {

struct DecoderLayer {
    const float *input_norm, *post_norm;
    const LinearWeights *qkv, *out, *gate_up, *down;  // gate_up is gated: it computes silu(gate) · up
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    const float *q_norm, *k_norm;
    RotaryShape rotary;
    AttentionShape attention;
};

struct DecoderStack {
    const DecoderLayer* layers;
    int count, hidden;
    float eps;
    const float *cosine, *sine;
};

// The rows of a step: residuals, updated in place, and the cache slot of each row's key and value. Of the model's last
// layer, only keys and values need all rows: if `num_kept` is smaller than `rows`, its output is computed for the rows
// in `kept`, ascending, and is at the front of `x` then.
struct StepRows {
    float* x;
    const int32_t* positions;
    const int64_t* slots;
    int rows;
    const int64_t* kept;
    int num_kept;
};

inline void move_to_front(float* x, const int64_t* rows, int count, size_t width) {
    for (int i = 0; i < count; i++)
        if (rows[i] != i) std::copy_n(x + rows[i] * width, width, x + i * width);
}

// `keys` and `values` point to the first layer's cache; those of the next layers follow every `stride` elements.
template <class T>
void run_layers(const DecoderStack& stack, const StepRows& step, const AttentionBatch& batch, T* keys, T* values,
                size_t stride) {
    const auto reserve = [&](std::vector<float>& buffer, size_t width) {
        if (buffer.size() < step.rows * width) buffer.resize(step.rows * width);
        return buffer.data();
    };
    static std::vector<float> normed_buffer, wide_buffer, narrow_buffer;  // not reentrant
    float *x = step.x, *normed = reserve(normed_buffer, stack.hidden);
    int rows = step.rows;
    for (int i = 0; i < stack.count; i++, keys += stride, values += stride) {
        const DecoderLayer& layer = stack.layers[i];
        float *qkv = reserve(wide_buffer, layer.qkv->outputs), *attended = reserve(narrow_buffer, layer.out->inputs);
        rms_norm(x, layer.input_norm, rows, stack.hidden, stack.eps, normed);
        layer.qkv->multiply(normed, rows, qkv, layer.qkv->outputs, layer.qkv_bias, ASSIGN);
        rotary_and_cache(layer.rotary, qkv, layer.qkv->outputs, rows, step.positions, step.slots, stack.cosine,
                         stack.sine, layer.q_norm, layer.k_norm, keys, values);
        attention(layer.attention, batch, keys, values, qkv, layer.qkv->outputs, attended, layer.out->inputs);
        if (i == stack.count - 1 && step.num_kept < rows) {
            rows = step.num_kept;
            move_to_front(x, step.kept, rows, stack.hidden);
            move_to_front(attended, step.kept, rows, layer.out->inputs);
        }
        layer.out->multiply(attended, rows, x, stack.hidden, layer.out_bias, ADD);

        float* gated = reserve(wide_buffer, layer.gate_up->outputs);
        rms_norm(x, layer.post_norm, rows, stack.hidden, stack.eps, normed);
        layer.gate_up->multiply(normed, rows, gated, layer.gate_up->outputs, layer.gate_up_bias, ASSIGN);
        layer.down->multiply(gated, rows, x, stack.hidden, layer.down_bias, ADD);
    }
}

}  // namespace syringa
