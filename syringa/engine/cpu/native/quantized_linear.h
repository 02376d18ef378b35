// y = x · wᵀ with weights in the quantized blocks of a GGUF file and int8 activations.
//
// Weights are repacked, not requantized: a panel holds PANEL channels, as in int8_linear.h, chunk by chunk of 64 or 256
// inputs. A chunk has its scales (gguf_blocks.h), then its numbers, for each 32 inputs and vector BITS vectors
// (`pack_numbers`), and is read sequentially.
//
// A row's bits depend on that row alone: the byte products of a sub-block are added as integers, sub-blocks and groups
// as floats in the order of the inputs. Numbers are unpacked in registers, for BLOCK_ROWS rows at a time. (Unpacking
// them to bytes in the cache first was not faster, even for hundreds of rows.) Many rows are multiplied chunk by chunk:
// a chunk stays in the L1 cache, and its scales are computed once.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "arena.h"
#include "dequantize.h"
#include "gguf_blocks.h"
#include "panels.h"
#include "simd.h"
#include "thread_pool.h"

namespace syringa {

constexpr int QUADS = 4 * LANES;  // bytes of a vector
constexpr int STRIP = 32;         // inputs that are unpacked at a time: STEPS vectors of four inputs
constexpr int STEPS = STRIP / 4;
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6;  // rows at a time: their integer and float accumulators of a group fill the registers
#else
constexpr int BLOCK_ROWS = 2;
#endif
constexpr int MANY_ROWS = 8 * BLOCK_ROWS, MAX_ROWS = 32 * BLOCK_ROWS;  // that are multiplied chunk by chunk

// --- Packing

template <class Format>
struct ChunkLayout {  // in bytes
    static constexpr size_t SCALES = (size_t)LANES * Format::Scales::BYTES;  // of one vector of channels
    static constexpr size_t NUMBERS = VECTORS * SCALES;                      // where they begin
    static constexpr size_t STRIP_SIZE = (size_t)VECTORS * Format::BITS * QUADS;
    static constexpr size_t SIZE = NUMBERS + STRIP_SIZE * (Format::Scales::CHUNK / STRIP);
};

// Where a strip has its vectors, in the order in which they are read. Each holds four inputs (a step) of LANES channels
// in the four bytes of a lane: the lower nibbles of steps 2i and 2i + 1 share a vector; the upper bits of all steps (5
// bits) or of four steps (6 bits) come before them.
template <int BITS>
constexpr int low_vector(int i, int v) {
    return BITS == 5 ? (1 + i) * VECTORS + v : BITS == 6 ? (i / 2 * 3 + 1 + i % 2) * VECTORS + v : i * VECTORS + v;
}
template <int BITS>
constexpr int high_vector(int i, int v) {
    return BITS == 6 ? i / 2 * 3 * VECTORS + v : v;
}
constexpr int byte_vector(int step, int v) { return (step / 2 * VECTORS + v) * 2 + step % 2; }

// Store the numbers of STRIP inputs of a channel.
template <int BITS>
void pack_numbers(const uint8_t* u, uint8_t* strip, int v, int lane) {
    uint32_t step[STEPS];
    std::memcpy(step, u, sizeof step);
    const auto put = [&](int vector, uint32_t word) { std::memcpy(strip + vector * QUADS + lane * 4, &word, 4); };
    if constexpr (BITS == 8) {
        for (int t = 0; t < STEPS; t++) put(byte_vector(t, v), step[t]);
    } else {
        for (int i = 0; i < STEPS / 2; i++)
            put(low_vector<BITS>(i, v), (step[2 * i] & 0x0f0f0f0fu) | (step[2 * i + 1] & 0x0f0f0f0fu) << 4);
        uint32_t high[2] = {};
        for (int t = 0; t < STEPS; t++) {
            if (BITS == 5) high[0] |= (step[t] >> 4 & 0x01010101u) << t;
            if (BITS == 6) high[t / 4] |= (step[t] >> 4 & 0x03030303u) << (t % 4 * 2);
        }
        for (int i = 0; i < BITS - 4; i++) put(high_vector<BITS>(2 * i, v), high[i]);
    }
}

static inline quads shifted(quads v, int left) {
    return left >= 0 ? (quads)((shorts)v << left) : (quads)((shorts)v >> -left);
}

// Steps 2i and 2i + 1 of vector v of a strip, as unsigned bytes.
template <class Format>
inline __attribute__((always_inline)) void unpack_numbers(const uint8_t* strip, int v, int i, quads* u) {
    constexpr int BITS = Format::BITS;
    if constexpr (BITS == 8) {
        for (int t = 0; t < 2; t++) u[t] = load_quads(strip + byte_vector(2 * i + t, v) * QUADS);
    } else {
        const quads low = quads{} + (uint8_t)0x0f, both = load_quads(strip + low_vector<BITS>(i, v) * QUADS);
        u[0] = both & low, u[1] = shifted(both, -4) & low;
        if constexpr (BITS == 5) {
            const quads high = load_quads(strip + high_vector<5>(i, v) * QUADS), mask = quads{} + (uint8_t)0x10;
            u[0] |= shifted(high, 4 - 2 * i) & mask, u[1] |= shifted(high, 3 - 2 * i) & mask;
        }
        if constexpr (BITS == 6) {
            const quads high = load_quads(strip + high_vector<6>(i, v) * QUADS), mask = quads{} + (uint8_t)0x30;
            u[0] |= shifted(high, 4 - i % 2 * 4) & mask, u[1] |= shifted(high, 2 - i % 2 * 4) & mask;
        }
        if constexpr (Format::HAS_TABLE) {
            uint8_t table[16];
            for (int n = 0; n < 16; n++) table[n] = (uint8_t)(Format::TABLE[n] + Format::ZERO);
            u[0] = lookup(table, u[0]), u[1] = lookup(table, u[1]);
        }
    }
}

// --- Activations

// Signed bytes with one scale per row and group of GROUP inputs, as in int8_linear.h, and their sums.
struct QuantizedRows {
    std::vector<int8_t> values;             // [rows][padded]
    std::vector<float> scales;              // [rows][padded / GROUP]
    std::vector<int32_t> minus16, minus32;  // [rows][padded / 16 or 32]: the negative sums, for ZERO
    std::vector<float> minus_sums;          // [rows][padded / 32]: the same times the scale, for minimums

    void resize(size_t rows, int padded) {
        if (values.size() >= rows * padded) return;
        values.resize(rows * padded), scales.resize(rows * padded / GROUP);
        minus16.resize(rows * padded / 16), minus32.resize(rows * padded / 32), minus_sums.resize(rows * padded / 32);
    }

    void quantize(const float* x, int inputs, int padded, size_t row) {
        int8_t* to = values.data() + row * padded;
        for (int g = 0; g < padded / GROUP; g++, to += GROUP) {
            float copy[GROUP];
            const float* from = group_of(x, inputs, g, copy);
            const float peak = group_peak(from);
            const float inverse = peak > 0.f ? 127.f / peak : 0.f, scale = peak / 127.f;
            scales[row * (padded / GROUP) + g] = scale;
            int32_t* sixteen = minus16.data() + row * (padded / 16) + g * 4;
            for (int i = 0; i < GROUP; i += 16) {
                int32_t total = 0;
                for (int j = i; j < i + 16; j += LANES) {
                    const ints q = round_scaled(load(from + j), inverse);
                    const bytes narrow = __builtin_convertvector(q, bytes);
                    std::memcpy(to + j, &narrow, sizeof narrow);
                    total += sum(q);
                }
                sixteen[i / 16] = -total;
            }
            for (int half = 0; half < 2; half++) {
                const int32_t total = sixteen[2 * half] + sixteen[2 * half + 1];
                minus32[row * (padded / 32) + g * 2 + half] = total;
                minus_sums[row * (padded / 32) + g * 2 + half] = scale * (float)total;
            }
        }
    }
};

// --- Products

// The activations of a product, from `row` on.
struct ProductRows {
    const QuantizedRows& x;
    size_t row;
    int padded;
};

// Add the products of a strip with M rows. `part` is the sum of a group, before the activations' scale.
template <class Format, int M>
inline __attribute__((always_inline)) void strip_product(const uint8_t* strip, const ProductRows& in, int k,
                                                         const float* scales, floats (*part)[VECTORS]) {
    typedef DotSum<Format::MOST> Dot;
    constexpr int SUB = Format::Scales::SUB, SUBS = STRIP / SUB, PAIRS = STEPS / SUBS / 2;
    constexpr int ZERO = Dot::zero(Format::ZERO);
    const int8_t* values = in.x.values.data() + in.row * in.padded + k;
    const int32_t* minus =
        (SUB == 16 ? in.x.minus16.data() : in.x.minus32.data()) + in.row * (in.padded / SUB) + k / SUB;
#pragma GCC unroll 2
    for (int s = 0; s < SUBS; s++) {
        Dot dot[M][VECTORS];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                dot[m][v].total = ZERO ? splat(minus[(size_t)m * (in.padded / SUB) + s]) * ZERO : ints{};
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; i++) {
            quads u[VECTORS][2];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) unpack_numbers<Format>(strip, v, s * PAIRS + i, u[v]);
#pragma GCC unroll 2
            for (int t = 0; t < 2; t++)
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    const auto four = load_four(values + (size_t)m * in.padded + ((s * PAIRS + i) * 2 + t) * 4);
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++) dot[m][v].add(2 * i + t, u[v][t], four);
                }
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const floats scale = load(scales + (size_t)s * PANEL + v * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                part[m][v] = fma(__builtin_convertvector(dot[m][v].end(2 * PAIRS), floats), scale, part[m][v]);
        }
    }
}

// Add the products of the group that begins at input k to those of the row, with the activations' scale, and subtract
// its minimums.
template <class Format, int M>
inline __attribute__((always_inline)) void add_group(const ProductRows& in, int k, const float* minimums,
                                                     const floats (*part)[VECTORS], floats (*sums)[VECTORS]) {
    const float* scales = in.x.scales.data() + in.row * (in.padded / GROUP) + k / GROUP;
    const float* row_sums = in.x.minus_sums.data() + in.row * (in.padded / STRIP) + k / STRIP;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const floats scale = broadcast(scales + (size_t)m * (in.padded / GROUP));
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            floats sum = fma(part[m][v], scale, sums[m][v]);
            if constexpr (Format::MINS) {
                static_assert(Format::Scales::SUB == STRIP, "a format with minimums has one for each strip");
#pragma GCC unroll 2
                for (int s = 0; s < GROUP / STRIP; s++)
                    sum = fma(load(minimums + s * PANEL + v * LANES),
                              broadcast(row_sums + (size_t)m * (in.padded / STRIP) + s), sum);
            }
            sums[m][v] = sum;
        }
    }
}

// The scales of a chunk as floats.
template <class Format>
struct ChunkScales {
    static constexpr int COUNT = Format::Scales::CHUNK / Format::Scales::SUB * PANEL;
    alignas(64) float scales[COUNT], minimums[COUNT];

    inline __attribute__((always_inline)) explicit ChunkScales(const uint8_t* chunk) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            Format::Scales::load(chunk + v * ChunkLayout<Format>::SCALES, scales + v * LANES, minimums + v * LANES,
                                 PANEL);
    }
};

// Add the products of M rows with the chunk that begins at input k. The order of sums does not depend on M.
template <class Format, int M>
inline __attribute__((always_inline)) void chunk_product(const uint8_t* chunk, const ChunkScales<Format>& scales,
                                                         const ProductRows& in, int k, floats (*sums)[VECTORS]) {
    typedef ChunkLayout<Format> Layout;
    constexpr int SUB = Format::Scales::SUB;
    for (int g = 0; g < Format::Scales::CHUNK / GROUP; g++) {
        floats part[M][VECTORS] = {};
        for (int strip = 2 * g; strip < 2 * g + 2; strip++) {
            const size_t sub = (size_t)strip * (STRIP / SUB) * PANEL;
            strip_product<Format, M>(chunk + Layout::NUMBERS + strip * Layout::STRIP_SIZE, in, k + strip * STRIP,
                                     scales.scales + sub, part);
        }
        add_group<Format, M>(in, k + g * GROUP, scales.minimums + (size_t)g * (GROUP / SUB) * PANEL, part, sums);
    }
}

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
    const int padded;  // inputs rounded up to whole groups
    std::vector<Segment> segments;

    QuantizedWeights(int outputs, int inputs, bool gated)
        : LinearWeights(outputs, inputs, gated), padded((inputs + GROUP - 1) / GROUP * GROUP) {}
    ~QuantizedWeights() override {
        for (const Segment& segment : segments) Arena::release(segment.memory);
    }

    void multiply(const float* x, int rows, float* y, size_t stride, const float* bias, bool add) const override;
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
        Format::Scales::load(panel + v * Layout::SCALES, scales, minimums, LANES);
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
    const QuantizedWeights& weights;
    const Segment& segment;
    const QuantizedRows& x;
    int p, first, last;  // panel, rows
    PanelOutput out;

    const uint8_t* panel() const { return segment.values + p * segment.panel_bytes; }
};

// Call body(row, count) for the rows of a task, at most BLOCK_ROWS at a time. They are split evenly: 4 and 4 are faster
// than 6 and 2.
template <class Body>
inline void split_rows(const PanelTask& task, Body&& body) {
    for (int row = task.first, count; row < task.last; row += count) {
        const int left = task.last - row, steps = (left + BLOCK_ROWS - 1) / BLOCK_ROWS;
        count = (left + steps - 1) / steps;
        dispatch_rows<BLOCK_ROWS>(count, [&](auto rows) { body(row, rows); });
    }
}

// Multiply M rows with a panel. Their sums stay in registers.
template <class Format, int M>
void multiply_rows(const PanelTask& task, int row) {
    const uint8_t* chunk = task.panel();
    const ProductRows in{task.x, (size_t)row, task.weights.padded};
    floats sums[M][VECTORS] = {};
    for (int k = 0; k < task.weights.padded; k += Format::Scales::CHUNK, chunk += ChunkLayout<Format>::SIZE)
        chunk_product<Format, M>(chunk, ChunkScales<Format>(chunk), in, k, sums);
    for (int m = 0; m < M; m++) store_panel(task.out, task.p, row + m, sums[m]);
}

// Multiply M of many rows with a chunk.
template <class Format, int M>
void add_chunk(const uint8_t* chunk, const ChunkScales<Format>& scales, const ProductRows& in, int k,
               floats (*to)[VECTORS]) {
    floats sums[M][VECTORS];
    std::memcpy(sums, to, sizeof sums);
    chunk_product<Format, M>(chunk, scales, in, k, sums);
    std::memcpy(to, sums, sizeof sums);
}

template <class Format>
void multiply_chunks(const PanelTask& task) {
    constexpr int SIZE = (int)ChunkLayout<Format>::SIZE;
    const uint8_t* chunk = task.panel();
    const int padded = task.weights.padded, rows = task.last - task.first;
    const int lines = (SIZE / 64 * BLOCK_ROWS + rows - 1) / rows;  // of the next chunk, prefetched for BLOCK_ROWS rows
    floats sums[MAX_ROWS][VECTORS] = {};
    for (int k = 0; k < padded; k += Format::Scales::CHUNK, chunk += SIZE) {
        const ChunkScales<Format> scales(chunk);
        const uint8_t* next = chunk + SIZE;
        split_rows(task, [&](int row, auto count) {
            for (int line = 0; line < lines; line++, next += 64) __builtin_prefetch(next);
            const int8_t* ahead = task.x.values.data() + (size_t)(row + count) * padded + k;
            for (int m = 0; m < BLOCK_ROWS; m++)
                for (int i = 0; i < Format::Scales::CHUNK; i += 64) __builtin_prefetch(ahead + (size_t)m * padded + i);
            add_chunk<Format, decltype(count)::value>(chunk, scales, {task.x, (size_t)row, padded}, k,
                                                      sums + (row - task.first));
        });
    }
    for (int row = task.first; row < task.last; row++) store_panel(task.out, task.p, row, sums[row - task.first]);
}

template <class Format>
void multiply_panel(const PanelTask& task) {
    if (task.last - task.first >= MANY_ROWS) return multiply_chunks<Format>(task);
    split_rows(task, [&](int row, auto rows) { multiply_rows<Format, decltype(rows)::value>(task, row); });
}

inline void QuantizedWeights::multiply(const float* x, int rows, float* y, size_t stride, const float* bias,
                                       bool add) const {
    if (rows == 0) return;
    static QuantizedRows quantized;  // not reentrant: the engine has one step loop
    quantized.resize(rows, padded);
    const auto quantize = [&](int r) { quantized.quantize(x + (size_t)r * inputs, inputs, padded, r); };
    if (rows < 8)
        for (int r = 0; r < rows; r++) quantize(r);
    else
        pool().run((rows + 7) / 8, [&](int c) {
            for (int r = c * 8; r < std::min(rows, c * 8 + 8); r++) quantize(r);
        });
    // A block of rows stays in the L2 cache while a run of panels is streamed.
    const int most = std::max(BLOCK_ROWS, std::min((1 << 18) / padded, MAX_ROWS) / BLOCK_ROWS * BLOCK_ROWS);
    const int least = (rows + most - 1) / most, even = (rows + least - 1) / least;
    const int block = (even + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS, blocks = (rows + block - 1) / block;
    int panels = 0;
    for (const Segment& segment : segments) panels += segment.panels;
    const int longest = block >= MANY_ROWS ? 1 : 8;  // with many rows a panel takes long, and threads should end together
    const int run = std::max(1, std::min(longest, panels / (4 * pool().threads()))), runs = (panels + run - 1) / run;
    pool().run(blocks * runs, [&](int task) {
        const int first = task / runs * block, last = std::min(rows, first + block);
        for (int p = task % runs * run; p < std::min(panels, (task % runs + 1) * run); p++) {
            int at = p;
            const Segment* segment = segments.data();
            for (; at >= segment->panels; segment++) at -= segment->panels;
            const PanelOutput out{y + segment->first, stride, segment->outputs, bias ? bias + segment->first : nullptr,
                                  gated, add};
            const PanelTask panel{*this, *segment, quantized, at, first, last, out};
            with_format(segment->type, [&](auto format) { multiply_panel<decltype(format)>(panel); });
        }
    });
}

}  // namespace syringa
