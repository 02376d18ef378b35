// All layers of a quantized decoder in one call. A step of a small batch takes a few milliseconds; three hundred calls
// from Python would add a fifth. Same order of operations as models/decoder.py, which runs the other precisions.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "panels.h"
#include "rowwise.h"

namespace syringa {

struct DecoderLayer {
    const float *input_norm, *post_norm;
    const float *attention_norm, *mlp_norm;           // of outputs before they are added to the residuals; null: none
    const LinearWeights *qkv, *out, *gate_up, *down;  // gate_up is gated
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    const SparseLayer* experts;  // instead of gate_up and down; null: none
    const float *q_norm, *k_norm;
    const float *cosine, *sine;
    RotaryShape rotary;
    AttentionShape attention;
};

struct DecoderStack {
    const DecoderLayer* layers;
    int count, hidden;
    float eps;
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
    // Multiply by the last weights of attention or an MLP, and add the products to the residuals.
    const auto add_output = [&](const LinearWeights& weights, const float* inputs, int rows, const float* bias,
                                const float* norm, float* x) {
        if (!norm) return weights.multiply(inputs, rows, x, stack.hidden, bias, ADD);
        float* y = normed_buffer.data();
        weights.multiply(inputs, rows, y, stack.hidden, bias, ASSIGN);
        add_rms_norm(y, norm, rows, stack.hidden, stack.eps, x);
    };
    float *x = step.x, *normed = reserve(normed_buffer, stack.hidden);
    int rows = step.rows;
    for (int i = 0; i < stack.count; i++, keys += stride, values += stride) {
        const DecoderLayer& layer = stack.layers[i];
        float *qkv = reserve(wide_buffer, layer.qkv->outputs), *attended = reserve(narrow_buffer, layer.out->inputs);
        rms_norm(x, layer.input_norm, rows, stack.hidden, stack.eps, normed);
        layer.qkv->multiply(normed, rows, qkv, layer.qkv->outputs, layer.qkv_bias, ASSIGN);
        rotary_and_cache(layer.rotary, qkv, layer.qkv->outputs, rows, step.positions, step.slots, layer.cosine,
                         layer.sine, layer.q_norm, layer.k_norm, keys, values);
        attention(layer.attention, batch, keys, values, qkv, layer.qkv->outputs, attended, layer.out->inputs);
        if (i == stack.count - 1 && step.num_kept < rows) {
            rows = step.num_kept;
            move_to_front(x, step.kept, rows, stack.hidden);
            move_to_front(attended, step.kept, rows, layer.out->inputs);
        }
        add_output(*layer.out, attended, rows, layer.out_bias, layer.attention_norm, x);

        rms_norm(x, layer.post_norm, rows, stack.hidden, stack.eps, normed);
        if (layer.experts) {
            run_experts(*layer.experts, normed, rows, x);
            continue;
        }
        float* gated = reserve(wide_buffer, layer.gate_up->outputs);
        layer.gate_up->multiply(normed, rows, gated, layer.gate_up->outputs, layer.gate_up_bias, ASSIGN);
        add_output(*layer.down, gated, rows, layer.down_bias, layer.mlp_norm, x);
    }
}

}  // namespace syringa
