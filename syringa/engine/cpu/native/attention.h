// Attention over a paged cache, one code path for decode, prefill and recompute.
//
// Keys are reduced in spans of SPAN positions that start at multiples of SPAN, in order. A query row therefore gets the
// same bits alone, in a batch, in one chunk or in many.
//
// Layout, per block of BLOCK positions and key-value head, in pairs for bfloat16 dot products: keys
// [size / 2][BLOCK][2], so that a vector holds two components of several keys; values [BLOCK / 2][size][2], so that it
// holds several components of two values.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "thread_pool.h"
#include "simd.h"

namespace syringa {

constexpr int BLOCK = 16, SPAN = 64, SPAN_BLOCKS = SPAN / BLOCK;
constexpr float LOG2_E = 1.44269504f;  // scores are multiplied by it: exp2 is cheaper than exp
constexpr float LOWEST = -1e30f;  // finite, so that a span without visible keys changes nothing and gives no NaN
// Rows and vectors that a tile processes at a time: its sums and two halves of each vector fill the registers.
#if defined(__AVX512F__)
constexpr int TILE = 6, TILE_WIDTH = 4;
#elif defined(__AVX2__)
constexpr int TILE = 4, TILE_WIDTH = 2;
#else
constexpr int TILE = 2, TILE_WIDTH = 4;
#endif

struct AttentionShape {
    int heads, kv_heads, size;
    int window;  // 0: unlimited; negative: queries also see the keys behind their own position
    float scale;
    float softcap;       // a score s becomes softcap · tanh(s / softcap); 0: it does not
    const float* sinks;  // of each query head, a score without a value that joins the softmax; null: none

    bool bidirectional() const { return window < 0; }
};

// Layout of a step's batch: sequence s has query rows [starts[s], starts[s+1]), the first at position first[s].
struct AttentionBatch {
    int sequences;
    const int32_t* starts;
    const int32_t* first;
    const int32_t* tables;  // [sequences][table_width], block numbers
    int table_width;
};

// scores[m][SPAN] = q[m] · the first KEY_VECTORS vectors of the span's keys
template <int M, int KEY_VECTORS, class T>
void score_rows(const Pair<T>* q, int size, const T* const keys[SPAN_BLOCKS], float* scores) {
    constexpr int WIDTH = std::min(KEY_VECTORS, TILE_WIDTH);
    for (int from = 0; from < KEY_VECTORS * LANES; from += WIDTH * LANES) {
        const T* part[WIDTH];
        for (int v = 0; v < WIDTH; v++) part[v] = keys[(from + v * LANES) / BLOCK] + (from + v * LANES) % BLOCK * 2;
        floats acc[M][WIDTH] = {};
        for (int d = 0; d < size / 2; d++) {
            Pairs<T> key[WIDTH];
            for (int v = 0; v < WIDTH; v++) key[v] = load_pairs(part[v] + d * BLOCK * 2);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < WIDTH; v++) acc[m][v] = dot2(acc[m][v], key[v], q[m * (size / 2) + d]);
        }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < WIDTH; v++) store(scores + m * SPAN + from + v * LANES, acc[m][v]);
    }
}

// out[m][from .. from + V · LANES) += weights[m] · the span's values
template <int M, int V, class T>
void accumulate_values(const Pair<T>* weights, int size, int from, int count, const T* const values[SPAN_BLOCKS],
                       float* out) {
    floats acc[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) acc[m][v] = load(out + m * size + from + v * LANES);
    for (int j = 0; j < (count + 1) / 2; j++) {
        const T* value = values[j / (BLOCK / 2)] + ((j % (BLOCK / 2)) * size + from) * 2;
        Pairs<T> part[V];
        for (int v = 0; v < V; v++) part[v] = load_pairs(value + v * LANES * 2);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[m][v] = dot2(acc[m][v], part[v], weights[m * (SPAN / 2) + j]);
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) store(out + m * size + from + v * LANES, acc[m][v]);
}

template <int M, class T>
void accumulate_all_values(const Pair<T>* weights, int size, int count, const T* const values[SPAN_BLOCKS],
                           float* out) {
    int from = 0;
    for (; from + TILE_WIDTH * LANES <= size; from += TILE_WIDTH * LANES)
        accumulate_values<M, TILE_WIDTH>(weights, size, from, count, values, out);
    for (; from + 2 * LANES <= size; from += 2 * LANES)
        accumulate_values<M, 2>(weights, size, from, count, values, out);
    for (; from + LANES <= size; from += LANES) accumulate_values<M, 1>(weights, size, from, count, values, out);
}

// most · tanh(x / most)
inline floats cap(floats x, float most) {
    return splat(2.f * most) * sigmoid(x * splat(2.f / most)) - splat(most);
}

// Rows in tiles of TILE, the rest in one smaller tile.
template <int M, class Body>
void tile_rest(int left, Body&& body) {
    if constexpr (M > 0) {
        if (left == M)
            body(std::integral_constant<int, M>{});
        else
            tile_rest<M - 1>(left, body);
    }
}

template <class Body>
void in_tiles(int rows, Body&& body) {
    int row = 0;
    for (; row + TILE <= rows; row += TILE) body(row, std::integral_constant<int, TILE>{});
    tile_rest<TILE - 1>(rows - row, [&](auto m) { body(row, m); });
}

// One key-value head of one sequence: `queries` consecutive positions, each with its group of query heads.
template <class T>
class HeadTile {
  public:
    HeadTile(const AttentionShape& shape, const T* keys, const T* values, const int32_t* table, int kv_head)
        : shape_(shape), keys_(keys), values_(values), table_(table), kv_head_(kv_head) {}

    // `last`: the position of the last key that any of the queries sees.
    void run(const float* q, size_t q_stride, int queries, int position, int last, float* out, size_t out_stride) {
        group_ = shape_.heads / shape_.kv_heads;
        rows_ = queries * group_;
        position_ = position;
        last_ = last;
        prepare(q, q_stride, queries);
        int begin = 0;
        if (shape_.window > 0) begin = std::max(0, position - shape_.window + 1) / SPAN * SPAN;
        for (; begin <= last; begin += SPAN) process_span(begin, std::min(SPAN, last + 1 - begin));
        write_output(out, out_stride, queries);
    }

  private:
    void prepare(const float* q, size_t stride, int queries) {
        const int size = shape_.size;
        const float scale = shape_.scale * LOG2_E;
        // Reused between calls, because a step has thousands of tiles. Thread-local lookups are not free.
        thread_local std::vector<Pair<T>> pairs;
        thread_local std::vector<float> numbers;
        const size_t area = (size_t)rows_ * size;
        pairs.resize(area / 2 + (size_t)TILE * SPAN / 2);
        query_ = pairs.data();
        weights_ = query_ + area / 2;
        numbers.resize(area + (size_t)TILE * SPAN + (size_t)rows_ * (LANES + 1) + size);
        out_ = numbers.data();
        scores_ = out_ + area;
        total_ = scores_ + TILE * SPAN;
        peak_ = total_ + (size_t)rows_ * LANES;
        scaled_ = peak_ + rows_;
        std::fill(out_, out_ + area, 0.f);
        std::fill(total_, total_ + (size_t)rows_ * LANES, 0.f);
        std::fill(peak_, peak_ + rows_, LOWEST);
        if (shape_.sinks)
            for (int r = 0; r < rows_; r++) {
                peak_[r] = shape_.sinks[kv_head_ * group_ + r % group_] * LOG2_E;
                total_[(size_t)r * LANES] = 1.f;
            }
        for (int i = 0; i < queries; i++)
            for (int g = 0; g < group_; g++) {
                const float* from = q + i * stride + (size_t)(kv_head_ * group_ + g) * size;
                for (int d = 0; d < size; d++) scaled_[d] = from[d] * scale;
                to_pairs(scaled_, size, query_ + (size_t)(i * group_ + g) * size / 2);
            }
    }

    // Vectors of keys past the last one are left out: their weights would be zero.
    void process_span(int begin, int count) {
        if (count <= LANES)
            process_vectors<1>(begin, count);
        else if (count <= 2 * LANES)
            process_vectors<2>(begin, count);
        else if (count <= 4 * LANES)
            process_vectors<4>(begin, count);
        else
            process_vectors<SPAN / LANES>(begin, count);
    }

    template <int KEY_VECTORS>
    void process_vectors(int begin, int count) {
        const int size = shape_.size;
        const size_t area = (size_t)BLOCK * size;
        const T *keys[SPAN_BLOCKS], *values[SPAN_BLOCKS];
        for (int b = 0; b < SPAN_BLOCKS; b++) {
            // Past the last block, read any block: the result is masked.
            const int index = begin / BLOCK + (b * BLOCK < count ? b : 0);
            const size_t at = ((size_t)table_[index] * shape_.kv_heads + kv_head_) * area;
            keys[b] = keys_ + at;
            values[b] = values_ + at;
        }
        in_tiles(rows_, [&](int row, auto m) {
            score_rows<m.value, KEY_VECTORS>(query_ + (size_t)row * size / 2, size, keys, scores_);
            for (int r = 0; r < m.value; r++) {
                softmax_row<KEY_VECTORS>(row + r, begin, scores_ + r * SPAN);
                to_pairs(scores_ + r * SPAN, KEY_VECTORS * LANES, weights_ + r * SPAN / 2);
            }
            accumulate_all_values<m.value>(weights_, size, count, values, out_ + (size_t)row * size);
        });
    }

    // Online softmax: replace a row's scores by weights relative to the running maximum, and rescale earlier sums.
    template <int KEY_VECTORS>
    void softmax_row(int row, int begin, float* scores) {
        const int position = position_ + row / group_;
        const int last = (shape_.bidirectional() ? last_ : position) - begin;  // the last visible key of the span
        const int from = shape_.window > 0 ? position - shape_.window + 1 - begin : 0;
        const bool masked = last < KEY_VECTORS * LANES - 1 || from > 0;
        const auto visible = [&](int v) {
            const ints key = lane_numbers() + splat(v * LANES);
            return (key <= splat(last)) & (key >= splat(from));
        };
        floats part[KEY_VECTORS], peaks = splat(peak_[row]);
        for (int v = 0; v < KEY_VECTORS; v++) {
            part[v] = load(scores + v * LANES);
            if (shape_.softcap > 0.f) part[v] = cap(part[v], shape_.softcap * LOG2_E);
            if (masked) part[v] = visible(v) ? part[v] : splat(LOWEST);
            peaks = vmax(peaks, part[v]);
        }
        const float peak = max_lane(peaks);
        floats total = load(total_ + (size_t)row * LANES);
        if (peak != peak_[row]) {
            const floats shrink = vexp2(splat(peak_[row] - peak));
            total = total * shrink;
            float* out = out_ + (size_t)row * shape_.size;
            for (int d = 0; d < shape_.size; d += LANES) store(out + d, load(out + d) * shrink);
            peak_[row] = peak;
        }
        for (int v = 0; v < KEY_VECTORS; v++) {
            floats weight = vexp2(part[v] - splat(peak));
            if (masked) weight = visible(v) ? weight : floats{};
            store(scores + v * LANES, weight);
            total = total + weight;
        }
        store(total_ + (size_t)row * LANES, total);
    }

    void write_output(float* out, size_t stride, int queries) {
        const int size = shape_.size;
        for (int i = 0; i < queries; i++)
            for (int g = 0; g < group_; g++) {
                const int row = i * group_ + g;
                const floats inverse = splat(1.f / sum(load(total_ + (size_t)row * LANES)));
                float* to = out + i * stride + (size_t)(kv_head_ * group_ + g) * size;
                const float* from = out_ + (size_t)row * size;
                for (int d = 0; d < size; d += LANES) store(to + d, load(from + d) * inverse);
            }
    }

    const AttentionShape& shape_;
    const T *keys_, *values_;
    const int32_t* table_;
    int kv_head_, group_ = 1, rows_ = 0, position_ = 0, last_ = 0;
    Pair<T> *query_ = nullptr, *weights_ = nullptr;
    float *out_ = nullptr, *scores_ = nullptr, *total_ = nullptr, *peak_ = nullptr, *scaled_ = nullptr;
};

template <class T>
void attention(const AttentionShape& shape, const AttentionBatch& batch, const T* keys, const T* values, const float* q,
               size_t q_stride, float* out, size_t out_stride) {
    struct Task {
        int sequence, query, queries, kv_head;
    };
    static std::vector<Task> tasks;  // not reentrant: the engine has one step loop
    tasks.clear();
    const int group = shape.heads / shape.kv_heads, tile = std::max(1, 48 / group);
    for (int s = 0; s < batch.sequences; s++) {
        const int queries = batch.starts[s + 1] - batch.starts[s];
        // Last queries first: they have the most keys, and a long task at the end would leave other threads idle.
        for (int end = queries; end > 0; end -= tile)
            for (int h = 0; h < shape.kv_heads; h++)
                tasks.push_back({s, std::max(0, end - tile), std::min(tile, end), h});
    }
    pool().run((int)tasks.size(), [&](int i) {
        const Task& t = tasks[i];
        const size_t row = batch.starts[t.sequence] + t.query;
        const int position = batch.first[t.sequence] + t.query;
        const int rest = batch.starts[t.sequence + 1] - (int)row;  // queries from the first one on
        const int last = position + (shape.bidirectional() ? rest : t.queries) - 1;
        HeadTile<T>(shape, keys, values, batch.tables + (size_t)t.sequence * batch.table_width, t.kv_head)
            .run(q + row * q_stride, q_stride, t.queries, position, last, out + row * out_stride, out_stride);
    });
}

}  // namespace syringa
