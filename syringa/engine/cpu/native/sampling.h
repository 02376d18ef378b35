// Sample a token from softmax(logits / temperature) by inverting the cumulative distribution at a uniform number.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "thread_pool.h"
#include "simd.h"

namespace syringa {

constexpr int SAMPLE_BLOCK = 128;

// The unnormalized probabilities of one block; 0 past the end.
inline void block_weights(const float* x, int count, float best, float inverse, float* weights) {
    float padded[SAMPLE_BLOCK];
    if (count < SAMPLE_BLOCK) {
        std::fill(padded, padded + SAMPLE_BLOCK, -std::numeric_limits<float>::infinity());
        std::memcpy(padded, x, sizeof(float) * count);
        x = padded;
    }
    for (int i = 0; i < SAMPLE_BLOCK; i += LANES)
        store(weights + i, vexp((load(x + i) - splat(best)) * splat(inverse)));
}

// Returns −1 if the row is not a distribution: all logits are −inf, or one is NaN.
inline int64_t sample_row(const float* x, int size, float temperature, double uniform) {
    float best = -std::numeric_limits<float>::infinity();
    bool broken = false;
    int i = 0;
    floats bests = splat(best);
    ints odd{};
    for (; i + LANES <= size; i += LANES) {
        const floats v = load(x + i);
        odd |= v != v;
        bests = vmax(bests, v);
    }
    for (int lane = 0; lane < LANES; lane++) broken |= odd[lane] != 0;
    best = max_lane(bests);
    for (; i < size; i++) {
        broken |= x[i] != x[i];
        best = std::max(best, x[i]);
    }
    if (broken || !std::isfinite(best)) return -1;

    thread_local std::vector<double> mass;  // cumulative, by block
    const int blocks = (size + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    mass.resize(blocks);
    const float inverse = 1.f / temperature;
    float weights[SAMPLE_BLOCK];
    double total = 0;
    for (int b = 0; b < blocks; b++) {
        block_weights(x + b * SAMPLE_BLOCK, std::min(SAMPLE_BLOCK, size - b * SAMPLE_BLOCK), best, inverse, weights);
        floats part{};
        for (int k = 0; k < SAMPLE_BLOCK; k += LANES) part = part + load(weights + k);
        total += sum(part);
        mass[b] = total;
    }
    const double target = uniform * total;
    int b = (int)(std::upper_bound(mass.begin(), mass.end(), target) - mass.begin());
    b = std::min(b, blocks - 1);
    block_weights(x + b * SAMPLE_BLOCK, std::min(SAMPLE_BLOCK, size - b * SAMPLE_BLOCK), best, inverse, weights);
    double reached = b ? mass[b - 1] : 0.0;
    int last = 0;
    for (int k = 0; k < SAMPLE_BLOCK; k++) {
        if (weights[k] == 0.f) continue;
        last = k;  // rounding may leave the sum below the target: then take the last token with a weight
        reached += weights[k];
        if (reached > target) break;
    }
    return (int64_t)b * SAMPLE_BLOCK + last;
}

inline void sample(const float* logits, size_t stride, int rows, int size, const float* temperatures,
                 const double* uniforms, int64_t* tokens) {
    pool().run(rows, [&](int r) { tokens[r] = sample_row(logits + r * stride, size, temperatures[r], uniforms[r]); });
}

}  // namespace syringa
