// The C interface that Python calls. Every pointer is borrowed for the call; only packed weights are owned here.

#include "attention.h"
#include "decoder.h"
#include "dense.h"
#include "draw.h"
#include "gemm.h"
#include "rows.h"

using namespace syringa;

namespace syringa {

// Never destroyed: its threads sleep inside it until the process ends.
static Pool* shared_pool = nullptr;

Pool& pool() { return *shared_pool; }

}  // namespace syringa

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void syringa_start(int threads) {
    if (!shared_pool) shared_pool = new Pool(std::max(1, threads));
}

EXPORT Int8Weights* syringa_pack(const float* weights, int rows, int inputs, int gated) {
    return pack(weights, rows, inputs, gated != 0);
}

EXPORT void syringa_release(Int8Weights* weights) { delete weights; }

EXPORT void syringa_linear(const Int8Weights* weights, const float* x, int rows, float* y, const float* bias, int add) {
    linear(*weights, x, rows, y, weights->outputs, bias, add != 0);
}

EXPORT void syringa_dense(const DenseWeights* weights, const float* x, int rows, float* y, const float* bias, int add) {
    if (weights->half)
        dense<uint16_t>(*weights, x, rows, y, bias, add != 0);
    else
        dense<float>(*weights, x, rows, y, bias, add != 0);
}

EXPORT void syringa_rms_norm(const float* x, const float* weight, int rows, int size, float eps, float* y) {
    rms_norm(x, weight, rows, size, eps, y);
}

EXPORT void syringa_silu_mul(const float* x, int rows, int size, float* y) { silu_mul(x, rows, size, y); }

EXPORT void syringa_rotary_and_cache(const RotaryShape* shape, float* qkv, int stride, int rows, const int32_t* positions,
                                     const int64_t* slots, const float* cosine, const float* sine, const float* q_norm,
                                     const float* k_norm, void* keys, void* values, int half_cache) {
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

EXPORT void syringa_draw(const float* logits, int64_t stride, int rows, int size, const float* temperatures,
                         const double* uniforms, int64_t* tokens) {
    draw(logits, stride, rows, size, temperatures, uniforms, tokens);
}

EXPORT void syringa_layers(const Stack* stack, const StepRows* step, const AttentionBatch* batch, void* keys, void* values,
                           int64_t stride, int half_cache) {
    if (half_cache)
        run_layers(*stack, *step, *batch, (uint16_t*)keys, (uint16_t*)values, stride);
    else
        run_layers(*stack, *step, *batch, (float*)keys, (float*)values, stride);
}
