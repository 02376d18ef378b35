// A token from softmax(logits / temperature), by one number in [0, 1): the inverse of the cumulative distribution.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace syringa {

constexpr int DRAW_BLOCK = 128;

// The weights of one block; lanes past the end weigh nothing.
inline void block_weights(const float* x, int count, float best, float inverse, float* weights) {
    float padded[DRAW_BLOCK];
    if (count < DRAW_BLOCK) {
        std::fill(padded, padded + DRAW_BLOCK, -std::numeric_limits<float>::infinity());
        std::memcpy(padded, x, sizeof(float) * count);
        x = padded;
    }
    for (int i = 0; i < DRAW_BLOCK; i += LANES)
        store(weights + i, vexp((load(x + i) - splat(best)) * splat(inverse)));
}

// −1 for a row that is no distribution: nothing allowed, or a value that is not a number.
inline int64_t draw_row(const float* x, int size, float temperature, double uniform) {
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
    const int blocks = (size + DRAW_BLOCK - 1) / DRAW_BLOCK;
    mass.resize(blocks);
    const float inverse = 1.f / temperature;
    float weights[DRAW_BLOCK];
    double total = 0;
    for (int b = 0; b < blocks; b++) {
        block_weights(x + b * DRAW_BLOCK, std::min(DRAW_BLOCK, size - b * DRAW_BLOCK), best, inverse, weights);
        floats part{};
        for (int k = 0; k < DRAW_BLOCK; k += LANES) part = part + load(weights + k);
        total += sum(part);
        mass[b] = total;
    }
    const double target = uniform * total;
    int b = (int)(std::upper_bound(mass.begin(), mass.end(), target) - mass.begin());
    b = std::min(b, blocks - 1);
    block_weights(x + b * DRAW_BLOCK, std::min(DRAW_BLOCK, size - b * DRAW_BLOCK), best, inverse, weights);
    double reached = b ? mass[b - 1] : 0.0;
    int last = 0;
    for (int k = 0; k < DRAW_BLOCK; k++) {
        if (weights[k] == 0.f) continue;
        last = k;  // the block's own rounding may end before the target: then it is the last token that weighs anything
        reached += weights[k];
        if (reached > target) break;
    }
    return (int64_t)b * DRAW_BLOCK + last;
}

inline void draw(const float* logits, size_t stride, int rows, int size, const float* temperatures,
                 const double* uniforms, int64_t* tokens) {
    pool().run(rows, [&](int r) { tokens[r] = draw_row(logits + r * stride, size, temperatures[r], uniforms[r]); });
}

}  // namespace syringa
