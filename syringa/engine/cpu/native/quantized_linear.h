// y = x · wᵀ with weights in the quantized blocks of a GGUF file and int8 activations.
//
// Weights are repacked, not requantized: see quantized_product.h. Rows are multiplied chunk by chunk, up to BLOCK_ROWS
// at a time: a chunk stays in the L1 cache, and its scales are computed once.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "arena.h"
#include "dequantize.h"
#include "gguf_blocks.h"
#include "panels.h"
#include "quantized_product.h"
#include "simd.h"
#include "thread_pool.h"

namespace syringa {

#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 8;  // rows at a time: their integer sums of a sub-block fill half of the registers
#elif defined(__AVXVNNI__)
constexpr int BLOCK_ROWS = 4;  // half of sixteen registers
#else
constexpr int BLOCK_ROWS = 2;
#endif
constexpr int MANY_ROWS = 48, MAX_ROWS = 192;  // of a task
constexpr int L2_BYTES = 640 << 10;            // of the cache, for the activations of a task
constexpr int AHEAD_BYTES = 8 << 10;           // how far ahead a chunk is prefetched, in whole chunks: at least one

// --- Weights

// One tensor, or a gated pair of one type, of a layer.
struct Segment {
    BlockType type;
    int first, outputs, panels;  // first: of its outputs in the layer
    uint8_t* values;
    size_t panel_bytes;
    Arena::Chunk* memory;
};

struct QuantizedWeights : LinearWeights {
    std::vector<Segment> segments;

    QuantizedWeights(int outputs, int inputs, bool gated) : LinearWeights(outputs, inputs, gated) {}
    ~QuantizedWeights() override {
        for (const Segment& segment : segments) Arena::release(segment.memory);
    }

    void multiply(const float* x, int rows, float* y, size_t stride, const float* bias, Output output) const override;
    // Write the weights of output channels, as an embedding. The layer must not be gated.
    void unpack_rows(const int64_t* indices, int count, float* out) const;
};

// Store a block of channel c of a panel, the one with this index in its chunk.
template <class Format>
void pack_block(const uint8_t* block, int index, uint8_t* chunk, int c) {
    typedef ChunkLayout<Format> Layout;
    constexpr int STRIPS = Format::INPUTS / STRIP;
    const int v = c / LANES, lane = c % LANES;
    uint8_t u[Format::INPUTS];
    Format::numbers(block, u);
    for (int s = 0; s < STRIPS; s++) {
        const size_t strip = index * STRIPS + s;
        pack_numbers<Format::BITS>(u + s * STRIP, chunk + Layout::NUMBERS + strip * Layout::STRIP_SIZE, v, lane);
    }
    Format::Scales::pack(block, index, chunk + v * Layout::SCALES, lane);
}

// Repack one tensor, or a gate and an up projection. Return whether all scales are finite.
template <class Format>
bool pack_segment(const TensorBlocks* parts, int inputs, bool gated, Segment& segment) {
    constexpr int CHUNK = Format::Scales::CHUNK, BLOCKS = CHUNK / Format::INPUTS;
    const int width = gated ? LANES : PANEL, blocks = inputs / Format::INPUTS, chunks = (blocks + BLOCKS - 1) / BLOCKS;
    segment.outputs = parts[0].rows;
    segment.panels = (segment.outputs + width - 1) / width;
    segment.panel_bytes = chunks * ChunkLayout<Format>::SIZE;
    segment.values = (uint8_t*)Arena::allocate(segment.panels * segment.panel_bytes);
    segment.memory = Arena::current_chunk();
    std::atomic<bool> finite{true};
    pool().run(segment.panels, [&](int p) {
        uint8_t* panel = segment.values + p * segment.panel_bytes;
        for (int b = 0; b < blocks; b++)
            for (int c = 0; c < PANEL; c++) {
                const int n = p * width + (gated ? c % LANES : c);
                if (n >= segment.outputs) continue;
                const TensorBlocks& tensor = parts[gated ? c / LANES : 0];
                const size_t row = tensor.order ? tensor.order[n] : n;
                const uint8_t* block = tensor.data + (row * blocks + b) * Format::BYTES;
                if (!Format::Scales::finite(block)) finite = false;
                pack_block<Format>(block, b % BLOCKS, panel + b / BLOCKS * ChunkLayout<Format>::SIZE, c);
            }
    });
    return finite;
}

// Repack tensors of a layer, of any types; gated ones are a gate and an up projection of one type. Return null if a
// scale is not a finite number.
inline QuantizedWeights* pack_weights(const TensorBlocks* parts, int count, int inputs, bool gated) {
    int outputs = 0;
    for (int i = 0; i < (gated ? 1 : count); i++) outputs += parts[i].rows;
    auto weights = std::make_unique<QuantizedWeights>(outputs, inputs, gated);
    int first = 0;
    for (int i = 0; i < count; i += gated ? 2 : 1) {
        Segment segment{parts[i].type, first};
        bool finite = false;
        const bool known = with_format(segment.type, [&](auto format) {
            finite = pack_segment<decltype(format)>(parts + i, inputs, gated, segment);
        });
        if (known) weights->segments.push_back(segment);
        if (!finite) return nullptr;
        first += segment.outputs;
    }
    return weights.release();
}

// Write the weights of channel c of a panel, in the order of the inputs.
template <class Format>
void unpack_channel(const uint8_t* panel, int c, int inputs, float* out) {
    typedef ChunkLayout<Format> Layout;
    constexpr int CHUNK = Format::Scales::CHUNK, SUB = Format::Scales::SUB;
    const int v = c / LANES, lane = c % LANES;
    for (int k = 0; k < inputs; k += CHUNK, panel += Layout::SIZE) {
        float scales[CHUNK / SUB * LANES], minimums[CHUNK / SUB * LANES];
        for (int j = 0; j < CHUNK / SUB; j++) {
            store(scales + j * LANES, float_scale<Format>(panel + v * Layout::SCALES, j));
            if constexpr (Format::MINS)
                store(minimums + j * LANES, float_minimum<Format>(panel + v * Layout::SCALES, j));
        }
        for (int begin = 0; begin < std::min(CHUNK, inputs - k); begin += STRIP) {
            const uint8_t* strip = panel + Layout::NUMBERS + begin / STRIP * Layout::STRIP_SIZE;
            for (int i = 0; i < STRIP; i += 8) {
                quads pair[2];
                unpack_numbers<Format>(strip, v, i / 8, pair);
                for (int j = 0; j < 8; j++) {
                    const int sub = (begin + i) / SUB * LANES + lane;
                    const float product = scales[sub] * (float)(pair[j / 4][lane * 4 + j % 4] - Format::ZERO);
                    out[k + begin + i + j] = Format::MINS ? product - minimums[sub] : product;
                }
            }
        }
    }
}

inline void QuantizedWeights::unpack_rows(const int64_t* indices, int count, float* out) const {
    const auto unpack = [&](int i) {
        int n = (int)indices[i];
        const Segment* segment = segments.data();
        for (; n >= segment->outputs; segment++) n -= segment->outputs;
        const uint8_t* panel = segment->values + n / PANEL * segment->panel_bytes;
        with_format(segment->type, [&](auto format) {
            unpack_channel<decltype(format)>(panel, n % PANEL, inputs, out + (size_t)i * inputs);
        });
    };
    if (count < 8)
        for (int i = 0; i < count; i++) unpack(i);
    else
        pool().run(count, [&](int i) { unpack(i); });
}

// A panel of a segment and a block of rows.
struct PanelTask {
    const Segment& segment;
    int p, first, last;  // panel, rows
    PanelOutput out;
};

// Multiply the rows of a task chunk by chunk.
template <class Format>
void multiply_panel(const PanelTask& task, const QuantizedRows<GROUP_OF<Format>>& x, int inputs) {
    typedef ChunkLayout<Format> Layout;
    constexpr int CHUNK = Format::Scales::CHUNK, GROUP = GROUP_OF<Format>, STRIPS = CHUNK / STRIP;
    const int rows = task.last - task.first, steps = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    // Unpacking nibbles is as fast as loading bytes.
    const bool wide = (Format::BITS == 5 || Format::BITS == 6 || Format::HAS_TABLE) && steps > 1;
    const int lines = ((int)Layout::SIZE / 64 + steps * STRIPS - 1) / (steps * STRIPS);  // prefetched in each strip
    alignas(64) uint8_t bytes[CHUNK * PANEL];
    floats sums[MAX_ROWS][VECTORS];
    std::memset(sums, 0, sizeof(floats) * VECTORS * rows);
    const uint8_t* chunk = task.segment.values + task.p * task.segment.panel_bytes;
    for (int k = 0; k < inputs; k += CHUNK, chunk += Layout::SIZE) {
        const ChunkScales<Format> scales(chunk);
        if (wide) unpack_chunk<Format>(chunk, bytes);
        LinesAhead ahead{chunk + std::max<size_t>(1, AHEAD_BYTES / Layout::SIZE) * Layout::SIZE, lines, rows == 1};
        const uint8_t* const ahead_end = ahead.next + Layout::SIZE;
        // Rows are split evenly: 5 and 4 are faster than 8 and 1.
        for (int row = 0, left = steps, count; left; row += count, left--) {
            count = (rows - row + left - 1) / left;
            dispatch_rows<BLOCK_ROWS>(count, [&](auto m) {
                constexpr int M = decltype(m)::value;
                constexpr int GROUPS = M <= 4 ? CHUNK / GROUP : 1;  // of a call: as measured (performance.md)
                for (int begin = 0; begin < CHUNK; begin += GROUPS * GROUP) {
                    const auto* activations = x.at(k + begin, task.first + row);
                    const int strip = begin / STRIP, first = begin / Format::Scales::SUB;
                    if (wide)
                        add_groups<Format, M, true, GROUPS>(bytes + strip * STEPS * VECTORS * QUADS, scales, first,
                                                            activations, x.rows, ahead, sums + row);
                    else
                        add_groups<Format, M, false, GROUPS>(chunk + Layout::NUMBERS + strip * Layout::STRIP_SIZE,
                                                             scales, first, activations, x.rows, ahead, sums + row);
                    ahead.next += 64 * ahead.per_strip * GROUPS * GROUP / STRIP;
                    if (ahead.next >= ahead_end) ahead.per_strip = 0;
                }
            });
        }
    }
    for (int row = 0; row < rows; row++) store_panel(task.out, task.p, task.first + row, sums[row]);
}

inline void QuantizedWeights::multiply(const float* x, int rows, float* y, size_t stride, const float* bias,
                                       Output output) const {
    if (rows == 0) return;
    static QuantizedRows<64> small;  // by the size of groups; not reentrant: the engine has one step loop
    static QuantizedRows<128> large;
    bool has_small = false, has_large = false;
    int panels = 0;
    for (const Segment& segment : segments) {
        panels += segment.panels;
        with_format(segment.type, [&](auto format) {
            (GROUP_OF<decltype(format)> == 64 ? has_small : has_large) = true;
        });
    }
    if (has_small) small.quantize(x, inputs, rows);
    if (has_large) large.quantize(x, inputs, rows);
    // A block of rows stays in the L2 cache while a run of panels is streamed.
    const int row_bytes = (int)sizeof(ActivationGroup<64>) * ((inputs + 63) / 64);
    const int most = std::max(BLOCK_ROWS, std::min(MAX_ROWS, L2_BYTES / row_bytes) / BLOCK_ROWS * BLOCK_ROWS);
    const int least = (rows + most - 1) / most, even = (rows + least - 1) / least;
    const int block = (even + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS, blocks = (rows + block - 1) / block;
    const int longest = block >= MANY_ROWS ? 1 : 8;  // many rows take long with a panel; threads should end together
    const int run = std::max(1, std::min(longest, panels / (4 * pool().threads()))), runs = (panels + run - 1) / run;
    pool().run(blocks * runs, [&](int task) {
        const int first = task / runs * block, last = std::min(rows, first + block);
        for (int p = task % runs * run; p < std::min(panels, (task % runs + 1) * run); p++) {
            int at = p;
            const Segment* segment = segments.data();
            for (; at >= segment->panels; segment++) at -= segment->panels;
            const PanelOutput out{y + segment->first, stride, segment->outputs, bias ? bias + segment->first : nullptr,
                                  gated ? &gate : nullptr, output};
            const PanelTask panel{*segment, at, first, last, out};
            with_format(segment->type, [&](auto format) {
                typedef decltype(format) Format;
                if constexpr (GROUP_OF<Format> == 64)
                    multiply_panel<Format>(panel, small, inputs);
                else
                    multiply_panel<Format>(panel, large, inputs);
            });
        }
    });
}

}  // namespace syringa
