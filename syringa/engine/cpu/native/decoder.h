// The layers of a decoder in one call. A step at a small batch is a few milliseconds: three hundred trips from Python to
// a kernel and back would be a fifth of it. The order is that of models/decoder.py, which runs the other precisions.
#pragma once

#include <vector>

#include "attention.h"
#include "gemm.h"
#include "rows.h"

namespace syringa {

struct Layer {
    const float *input_norm, *post_norm;
    const Int8Weights *qkv, *out, *gate_up, *down;  // gate_up is gated: it gives silu(gate) · up
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    const float *q_norm, *k_norm;
    RotaryShape rotary;
    AttentionShape attention;
};

struct Stack {
    const Layer* layers;
    int count, hidden;
    float eps;
    const float *cosine, *sine;
};

// A step's rows: residuals, replaced by the last layer's, and where each row's key and value go.
struct StepRows {
    float* x;
    const int32_t* positions;
    const int64_t* slots;
    int rows;
};

// `keys` and `values` are those of the first layer; the next ones follow at `stride` elements each.
template <class T>
void run_layers(const Stack& stack, const StepRows& step, const AttentionBatch& batch, T* keys, T* values, size_t stride) {
    const auto room = [&](std::vector<float>& buffer, size_t width) {
        if (buffer.size() < step.rows * width) buffer.resize(step.rows * width);
        return buffer.data();
    };
    static std::vector<float> normed_buffer, wide_buffer, narrow_buffer;  // one caller at a time
    float *x = step.x, *normed = room(normed_buffer, stack.hidden);
    for (int i = 0; i < stack.count; i++, keys += stride, values += stride) {
        const Layer& layer = stack.layers[i];
        float *qkv = room(wide_buffer, layer.qkv->outputs), *attended = room(narrow_buffer, layer.out->inputs);
        rms_norm(x, layer.input_norm, step.rows, stack.hidden, stack.eps, normed);
        linear(*layer.qkv, normed, step.rows, qkv, layer.qkv->outputs, layer.qkv_bias, false);
        rotary_and_cache(layer.rotary, qkv, layer.qkv->outputs, step.rows, step.positions, step.slots, stack.cosine,
                         stack.sine, layer.q_norm, layer.k_norm, keys, values);
        attention(layer.attention, batch, keys, values, qkv, layer.qkv->outputs, attended, layer.out->inputs);
        linear(*layer.out, attended, step.rows, x, stack.hidden, layer.out_bias, true);

        float* gated = room(wide_buffer, layer.gate_up->outputs);
        rms_norm(x, layer.post_norm, step.rows, stack.hidden, stack.eps, normed);
        linear(*layer.gate_up, normed, step.rows, gated, layer.gate_up->outputs, layer.gate_up_bias, false);
        linear(*layer.down, gated, step.rows, x, stack.hidden, layer.down_bias, true);
    }
}

}  // namespace syringa
