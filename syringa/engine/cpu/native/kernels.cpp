// The C interface for Python. Pointers are borrowed for the call; only quantized weights are owned here.

#include "attention.h"
#include "decoder.h"
#include "delta_net.h"
#include "dense_linear.h"
#include "encoder.h"
#include "experts.h"
#include "int8_linear.h"
#include "pooling.h"
#include "quantized_linear.h"
#include "rowwise.h"
#include "sampling.h"

using namespace syringa;

namespace syringa {

// Never destroyed: its threads run until the process exits.
static ThreadPool* shared_pool = nullptr;

ThreadPool& pool() { return *shared_pool; }

}  // namespace syringa

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void syringa_start(int threads) {
    if (!shared_pool) shared_pool = new ThreadPool(std::max(1, threads));
}

// The weights of a layer from `count` tensors, side by side: in int8, or in the tensors' blocks. Null if one of them is
// not a finite number, or for lack of memory.
EXPORT LinearWeights* syringa_quantize_tensors(const TensorBlocks* tensors, int count, int inputs, int gated) {
    try {
        return quantize_tensors(tensors, count, inputs, gated != 0);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
EXPORT LinearWeights* syringa_pack_weights(const TensorBlocks* tensors, int count, int inputs, int gated) {
    try {
        return pack_weights(tensors, count, inputs, gated != 0);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

EXPORT void syringa_set_gate(LinearWeights* weights, int kind, float alpha, float limit) {
    weights->gate = {kind, alpha, limit};
}

EXPORT void syringa_free_weights(LinearWeights* weights) { delete weights; }

EXPORT void syringa_linear(const LinearWeights* weights, const float* x, int rows, float* y, const float* bias,
                           int output) {
    weights->multiply(x, rows, y, weights->outputs, bias, (Output)output);
}

// Rows of weights that syringa_pack_weights returned, by index, as fp32.
EXPORT void syringa_unpack_rows(const LinearWeights* weights, const int64_t* indices, int count, float* out) {
    static_cast<const QuantizedWeights*>(weights)->unpack_rows(indices, count, out);
}

// All rows of a tensor, as fp32 or with `half` as bf16. Return whether all numbers are finite; -1 for lack of memory.
EXPORT int syringa_read_tensor(const TensorBlocks* tensor, int inputs, void* out, int half) {
    try {
        return read_tensor(*tensor, inputs, out, half != 0);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Whether all numbers of a tensor are finite.
EXPORT int syringa_check_tensor(const TensorBlocks* tensor, int inputs) { return tensor_is_finite(*tensor, inputs); }

EXPORT void syringa_dense_linear(const DenseWeights* weights, const float* x, int rows, float* y, const float* bias,
                                 int add) {
    if (weights->half)
        dense_linear<uint16_t>(*weights, x, rows, y, bias, add != 0);
    else
        dense_linear<float>(*weights, x, rows, y, bias, add != 0);
}

EXPORT void syringa_rms_norm(const float* x, const float* weight, int rows, int size, float eps, float* y) {
    rms_norm(x, weight, rows, size, eps, y);
}

EXPORT void syringa_gate(const float* x, int rows, int size, int kind, float alpha, float limit, float* y) {
    gate_rows({kind, alpha, limit}, x, rows, size, y);
}

EXPORT void syringa_experts(const SparseLayer* layer, const float* normed, int rows, float* x) {
    run_experts(*layer, normed, rows, x);
}

EXPORT void syringa_layer_norm(const float* x, const LayerNorm* norm, int rows, int size, float* y) {
    layer_norm(x, *norm, rows, size, y);
}

EXPORT void syringa_gelu(float* x, int rows, int size) { gelu_rows(x, rows, size); }

EXPORT void syringa_packed_attention(const AttentionShape* shape, const PackedBatch* batch, const float* qkv,
                                     int stride, float* out, int out_stride, int half) {
    static PackedBlocks blocks;  // not reentrant
    blocks.begin(*batch);
    if (half)
        blocks.attend<uint16_t>(*shape, qkv, stride, out, out_stride);
    else
        blocks.attend<float>(*shape, qkv, stride, out, out_stride);
}

EXPORT void syringa_sigmoid_mul(float* x, int rows, int size, const float* gates, int stride, int single) {
    sigmoid_mul(x, rows, size, gates, stride, single != 0);
}

EXPORT void syringa_rotary_and_cache(const RotaryShape* shape, float* qkv, int stride, int rows,
                                     const int32_t* positions, const int64_t* slots, const float* cosine,
                                     const float* sine, const float* q_norm, const float* k_norm, void* keys,
                                     void* values, int half_cache) {
    if (half_cache)
        rotary_and_cache(*shape, qkv, stride, rows, positions, slots, cosine, sine, q_norm, k_norm, (uint16_t*)keys,
                         (uint16_t*)values);
    else
        rotary_and_cache(*shape, qkv, stride, rows, positions, slots, cosine, sine, q_norm, k_norm, (float*)keys,
                         (float*)values);
}

EXPORT void syringa_attention(const AttentionShape* shape, const AttentionBatch* batch, const void* keys,
                              const void* values, const float* q, int q_stride, float* out, int out_stride,
                              int half_cache) {
    if (half_cache)
        attention(*shape, *batch, (const uint16_t*)keys, (const uint16_t*)values, q, q_stride, out, out_stride);
    else
        attention(*shape, *batch, (const float*)keys, (const float*)values, q, q_stride, out, out_stride);
}

EXPORT void syringa_delta_net(const DeltaNetLayer* layer, const DeltaNetStates* batch, const float* projected,
                              int stride, float* out) {
    delta_net(*layer, *batch, projected, stride, out);
}

EXPORT void syringa_sample(const float* logits, int64_t stride, int rows, int size, const float* temperatures,
                         const double* uniforms, int64_t* tokens) {
    sample(logits, stride, rows, size, temperatures, uniforms, tokens);
}

EXPORT void syringa_run_layers(const DecoderStack* stack, const StepRows* step, const AttentionBatch* batch, void* keys,
                               void* values, int64_t stride, int half_cache) {
    if (half_cache)
        run_layers(*stack, *step, *batch, (uint16_t*)keys, (uint16_t*)values, stride);
    else
        run_layers(*stack, *step, *batch, (float*)keys, (float*)values, stride);
}

// With keys and values in bf16.
EXPORT void syringa_run_encoder(const EncoderStack* stack, const EncoderRows* rows, float* x) {
    run_encoder<uint16_t>(*stack, *rows, x);
}

EXPORT void syringa_pool(const float* x, const PackedBatch* batch, int size, int pooling, float* out) {
    pool_rows(x, *batch, size, (Pooling)pooling, out);
}

EXPORT void syringa_normalize(float* x, int rows, int size) { normalize_rows(x, rows, size); }
