// Attention of sequences that are packed one after the other, each within itself and in both directions, for encoders.
//
// Keys and values of a layer are brought into the blocks of attention.h, whose code then runs as for a decoder. A
// sequence begins with a block of its own, so that its bits do not depend on what it is packed with.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace syringa {

// Sequence s has the rows [starts[s], starts[s + 1]).
struct PackedBatch {
    int sequences;
    const int32_t* starts;
};

constexpr int MAX_HEAD_SIZE = 512;

class PackedBlocks {
  public:
    // Lay out the blocks of a batch. What `batch` points to has to stay until the last call of `attend`.
    void begin(const PackedBatch& batch) {
        batch_ = batch;
        blocks_.clear();
        int width = 0;
        for (int s = 0; s < batch.sequences; s++)
            width = std::max(width, (batch.starts[s + 1] - batch.starts[s] + BLOCK - 1) / BLOCK);
        tables_.assign((size_t)batch.sequences * width, 0);
        first_.assign(batch.sequences, 0);
        for (int s = 0; s < batch.sequences; s++) {
            const int begin = batch.starts[s], end = batch.starts[s + 1];
            for (int row = begin; row < end; row += BLOCK) {
                tables_[(size_t)s * width + (row - begin) / BLOCK] = (int32_t)blocks_.size();
                blocks_.push_back({row, std::min(BLOCK, end - row)});
            }
        }
        width_ = width;
    }

    // The attention of rows [q | k | v]. T: of keys and values.
    template <class T>
    void attend(const AttentionShape& shape, const float* qkv, size_t stride, float* out, size_t out_stride) {
        static std::vector<T> keys, values;  // not reentrant: the engine has one step loop
        const size_t numbers = blocks_.size() * shape.kv_heads * BLOCK * shape.size;
        if (keys.size() < numbers) keys.resize(numbers), values.resize(numbers);
        pool().run((int)blocks_.size(), [&](int b) {
            for (int h = 0; h < shape.kv_heads; h++) {
                const size_t at = ((size_t)b * shape.kv_heads + h) * BLOCK * shape.size;
                const float* k = qkv + blocks_[b].row * stride + (size_t)(shape.heads + h) * shape.size;
                write_keys(k, stride, blocks_[b].rows, shape.size, keys.data() + at);
                write_values(k + (size_t)shape.kv_heads * shape.size, stride, blocks_[b].rows, shape.size,
                             values.data() + at);
            }
        });
        const AttentionBatch batch{batch_.sequences, batch_.starts, first_.data(), tables_.data(), width_};
        attention(shape, batch, keys.data(), values.data(), qkv, stride, out, out_stride);
    }

  private:
    struct Block {
        size_t row;
        int rows;
    };

    template <class T>
    static void write_keys(const float* k, size_t stride, int rows, int size, T* block) {
        T row[MAX_HEAD_SIZE];
        for (int r = 0; r < rows; r++, k += stride) {
            for (int d = 0; d < size; d += LANES) store(row + d, load(k + d));
            for (int d = 0; d < size / 2; d++) std::memcpy(block + (d * BLOCK + r) * 2, row + 2 * d, 2 * sizeof(T));
        }
    }

    // Rows past the last one of an odd number become zero: their weight is, and an infinity would survive it.
    template <class T>
    static void write_values(const float* v, size_t stride, int rows, int size, T* block) {
        for (int r = 0; r < rows; r += 2, v += 2 * stride)
            for (int d = 0; d < size; d += LANES)
                store_pairs(block + (size_t)r * size + 2 * d, load(v + d),
                            r + 1 < rows ? load(v + stride + d) : floats{});
    }

    PackedBatch batch_{};
    std::vector<Block> blocks_;
    std::vector<int32_t> tables_, first_;
    int width_ = 0;
};

}  // namespace syringa
