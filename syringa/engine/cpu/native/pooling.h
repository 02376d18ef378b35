// One vector for each sequence of a packed batch, from the rows of its tokens, in the order of the tokens.
#pragma once

#include <algorithm>
#include <cstring>

#include "packed_attention.h"
#include "simd.h"
#include "thread_pool.h"

namespace syringa {

enum Pooling { MEAN, CLS, LAST_TOKEN, MAX, WEIGHTED_MEAN };  // the same numbers as in __init__.py

inline void pool_sequence(const float* x, int rows, int size, Pooling pooling, float* out) {
    const float* row = pooling == LAST_TOKEN ? x + (size_t)(rows - 1) * size : x;
    std::memcpy(out, row, sizeof(float) * size);
    if (pooling == CLS || pooling == LAST_TOKEN) return;
    for (int r = 1; r < rows; r++) {
        row += size;
        if (pooling == MAX)
            for (int i = 0; i < size; i++) out[i] = std::max(out[i], row[i]);
        else if (pooling == MEAN)
            for (int i = 0; i < size; i++) out[i] += row[i];
        else
            for (int i = 0; i < size; i++) out[i] += row[i] * (float)(r + 1);
    }
    if (pooling == MAX) return;
    const float total = pooling == MEAN ? (float)rows : 0.5f * (float)rows * (float)(rows + 1);
    for (int i = 0; i < size; i++) out[i] /= total;
}

inline void pool_rows(const float* x, const PackedBatch& batch, int size, Pooling pooling, float* out) {
    const int rows = batch.starts[batch.sequences];
    for_rows(batch.sequences, (size_t)size * rows / std::max(1, batch.sequences), [&](int s) {
        const int begin = batch.starts[s];
        pool_sequence(x + (size_t)begin * size, batch.starts[s + 1] - begin, size, pooling, out + (size_t)s * size);
    });
}

// Give rows a length of 1, in place.
inline void normalize_rows(float* x, int rows, int size) {
    for_rows(rows, size, [&](int r) {
        float* row = x + (size_t)r * size;
        floats squares{};
        int i = 0;
        for (; i + LANES <= size; i += LANES) squares = fma(load(row + i), load(row + i), squares);
        float total = sum(squares);
        for (; i < size; i++) total += row[i] * row[i];
        const float length = std::max(std::sqrt(total), 1e-12f);
        for (i = 0; i < size; i++) row[i] /= length;
    });
}

}  // namespace syringa
