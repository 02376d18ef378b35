// All layers of a quantized encoder (BERT and its relatives) in one call. Same order of operations as
// embedding/encoder.py, which runs the other precisions.
#pragma once

#include <vector>

#include "packed_attention.h"
#include "panels.h"
#include "rowwise.h"

namespace syringa {

struct EncoderLayer {
    const LinearWeights *qkv, *out, *up, *down;
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;
    LayerNorm attention_norm, output_norm;
};

// The sum of a token's, its position's and its type's row, normalized.
struct EncoderEmbedding {
    const void* tokens;
    int half;  // whether rows of tokens are bf16; the others are fp32
    const float *positions, *types;  // types: null if there are none
    LayerNorm norm;
};

struct EncoderStack {
    EncoderEmbedding embedding;
    const EncoderLayer* layers;
    int count, hidden;
    AttentionShape attention;
};

// Tokens with their positions and types, packed. Their numbers are within the embedding.
struct EncoderRows {
    const int32_t *tokens, *positions, *types;
    int rows;
    PackedBatch batch;
};

template <class T>
void embed_rows(const EncoderEmbedding& embedding, const EncoderRows& step, int hidden, float* x) {
    for_rows(step.rows, hidden, [&](int r) {
        const T* token = (const T*)embedding.tokens + (size_t)step.tokens[r] * hidden;
        const float* position = embedding.positions + (size_t)step.positions[r] * hidden;
        const float* type = embedding.types ? embedding.types + (size_t)step.types[r] * hidden : nullptr;
        float* row = x + (size_t)r * hidden;
        for (int i = 0; i < hidden; i++) row[i] = to_float(token[i]) + (type ? type[i] : 0.f) + position[i];
        layer_norm_row(row, embedding.norm, hidden, row);
    });
}

// Write the hidden states of the last layer to x. T: of keys and values.
template <class T>
void run_encoder(const EncoderStack& stack, const EncoderRows& step, float* x) {
    const auto reserve = [&](std::vector<float>& buffer, size_t width) {
        if (buffer.size() < step.rows * width) buffer.resize(step.rows * width);
        return buffer.data();
    };
    static std::vector<float> wide_buffer, narrow_buffer;  // not reentrant
    static PackedBlocks blocks;
    blocks.begin(step.batch);
    if (stack.embedding.half)
        embed_rows<uint16_t>(stack.embedding, step, stack.hidden, x);
    else
        embed_rows<float>(stack.embedding, step, stack.hidden, x);
    for (int i = 0; i < stack.count; i++) {
        const EncoderLayer& layer = stack.layers[i];
        const int rows = step.rows, hidden = stack.hidden;
        float *qkv = reserve(wide_buffer, layer.qkv->outputs), *attended = reserve(narrow_buffer, layer.out->inputs);
        layer.qkv->multiply(x, rows, qkv, layer.qkv->outputs, layer.qkv_bias, ASSIGN);
        blocks.attend<T>(stack.attention, qkv, layer.qkv->outputs, attended, layer.out->inputs);
        layer.out->multiply(attended, rows, x, hidden, layer.out_bias, ADD);
        layer_norm(x, layer.attention_norm, rows, hidden, x);

        float* inner = reserve(wide_buffer, layer.up->outputs);
        layer.up->multiply(x, rows, inner, layer.up->outputs, layer.up_bias, GELU);
        layer.down->multiply(inner, rows, x, hidden, layer.down_bias, ADD);
        layer_norm(x, layer.output_norm, rows, hidden, x);
    }
}

}  // namespace syringa
