// A layer of experts: a router chooses some of them for each row, and only these are read.
//
// The rows of an expert are multiplied together, and a row's experts are added in the order of its choice, so that its
// bits do not depend on the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "dense_linear.h"
#include "panels.h"
#include "rowwise.h"

namespace syringa {

struct SparseLayer {
    int hidden, count, per_token;
    int sigmoid;    // experts are scored by a sigmoid instead of a softmax over all of them
    int normalize;  // the weights of a row's experts add up to `scale`
    float scale;
    const DenseWeights* router;
    const float* router_bias;
    const float* correction;  // added to the scores by which experts are chosen; null: none
    const LinearWeights *const *gate_up, *const *down;
    const float *const *gate_up_bias, *const *down_bias;  // null: none
    const LinearWeights *shared_gate_up, *shared_down;    // an expert that every row uses; null: none
    const DenseWeights* shared_gate;                      // a sigmoid of this product weights it; null: 1 does
};

// Choose the experts of a row of router logits, which become scores. `ids` and `weights`: best first.
inline void choose_experts(const SparseLayer& layer, float* logits, int* ids, float* weights) {
    const int count = layer.count;
    if (layer.sigmoid) {
        for (int e = 0; e < count; e++) logits[e] = 1.f / (1.f + std::exp(-logits[e]));
    } else {
        const float peak = *std::max_element(logits, logits + count);
        float total = 0.f;
        for (int e = 0; e < count; e++) total += logits[e] = std::exp(logits[e] - peak);
        for (int e = 0; e < count; e++) logits[e] /= total;
    }
    float sum = 0.f;
    for (int i = 0; i < layer.per_token; i++) {
        int best = -1;
        float most = 0.f;
        for (int e = 0; e < count; e++) {
            if (std::find(ids, ids + i, e) != ids + i) continue;
            const float score = layer.correction ? logits[e] + layer.correction[e] : logits[e];
            if (best < 0 || score > most) best = e, most = score;  // an expert is found among NaNs, too
        }
        ids[i] = best;
        weights[i] = logits[best];
        sum += weights[i];
    }
    if (layer.sigmoid) sum += 1e-20f;  // all scores may be 0
    for (int i = 0; i < layer.per_token; i++) weights[i] = (layer.normalize ? weights[i] / sum : weights[i]) * layer.scale;
}

// Where the (row, choice) pairs of each expert are, in the order of rows.
struct ExpertRows {
    std::vector<int> ids, starts, pairs;  // of each pair; of each expert; sorted by expert
    std::vector<float> weights;

    void route(const SparseLayer& layer, float* logits, int rows) {
        const int k = layer.per_token;
        ids.resize((size_t)rows * k);
        weights.resize((size_t)rows * k);
        pairs.resize((size_t)rows * k);
        for_rows(rows, (size_t)layer.count * k, [&](int r) {
            choose_experts(layer, logits + (size_t)r * layer.count, ids.data() + (size_t)r * k,
                           weights.data() + (size_t)r * k);
        });
        starts.assign(layer.count + 1, 0);
        for (int id : ids) starts[id + 1]++;
        for (int e = 0; e < layer.count; e++) starts[e + 1] += starts[e];
        std::vector<int> next(starts.begin(), starts.end() - 1);
        for (int pair = 0; pair < (int)ids.size(); pair++) pairs[next[ids[pair]]++] = pair;
    }
};

// Add the output of the experts for the rows of `normed` to x.
inline void run_experts(const SparseLayer& layer, const float* normed, int rows, float* x) {
    static std::vector<float> logits, gathered, inner, products;  // not reentrant
    static ExpertRows routed;
    const size_t hidden = layer.hidden;
    const int k = layer.per_token;
    const auto reserve = [](std::vector<float>& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
        return buffer.data();
    };
    reserve(logits, (size_t)rows * layer.count);
    dense_linear<float>(*layer.router, normed, rows, logits.data(), layer.router_bias, false);
    routed.route(layer, logits.data(), rows);
    // Sorted by expert, as the pairs are.
    float* outputs = reserve(products, (size_t)rows * k * hidden);
    for (int e = 0; e < layer.count; e++) {
        const int first = routed.starts[e], count = routed.starts[e + 1] - first;
        if (!count) continue;
        const float* inputs = normed;
        if (rows > 1) {
            float* to = reserve(gathered, (size_t)rows * hidden);
            for (int i = 0; i < count; i++)
                std::copy_n(normed + routed.pairs[first + i] / k * hidden, hidden, to + i * hidden);
            inputs = to;
        }
        const LinearWeights &gate_up = *layer.gate_up[e], &down = *layer.down[e];
        float* gated = reserve(inner, (size_t)rows * gate_up.outputs);
        gate_up.multiply(inputs, count, gated, gate_up.outputs, layer.gate_up_bias ? layer.gate_up_bias[e] : nullptr,
                         ASSIGN);
        down.multiply(gated, count, outputs + first * hidden, hidden, layer.down_bias ? layer.down_bias[e] : nullptr,
                      ASSIGN);
    }
    static std::vector<int> places;  // of each pair among the outputs
    places.resize((size_t)rows * k);
    for (int i = 0; i < (int)places.size(); i++) places[routed.pairs[i]] = i;
    for_rows(rows, hidden * k, [&](int r) {
        float* to = x + r * hidden;
        for (int i = r * k; i < (r + 1) * k; i++) {
            const float* from = outputs + places[i] * hidden;
            const float weight = routed.weights[i];
            for (size_t d = 0; d < hidden; d++) to[d] += weight * from[d];
        }
    });
    if (!layer.shared_gate_up) return;
    float *gated = reserve(inner, (size_t)rows * layer.shared_gate_up->outputs), *common = reserve(gathered, rows * hidden);
    layer.shared_gate_up->multiply(normed, rows, gated, layer.shared_gate_up->outputs, nullptr, ASSIGN);
    if (!layer.shared_gate) return layer.shared_down->multiply(gated, rows, x, hidden, nullptr, ADD);
    layer.shared_down->multiply(gated, rows, common, hidden, nullptr, ASSIGN);
    dense_linear<float>(*layer.shared_gate, normed, rows, logits.data(), nullptr, false);
    for_rows(rows, hidden, [&](int r) {
        const float weight = 1.f / (1.f + std::exp(-logits[r]));
        float *to = x + r * hidden, *from = common + r * hidden;
        for (size_t d = 0; d < hidden; d++) to[d] += weight * from[d];
    });
}

}  // namespace syringa
