// Multiplies rows with one panel and prints what was prefetched: rows, prefetches and cache lines of a chunk, and whether
// all of them were to the L1 cache (1), none (0) or some (-1).
#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>  // has prefetches of its own
#endif

static long prefetches;
static std::set<int> localities;
static void count_prefetch(int locality) { prefetches++, localities.insert(locality); }
#define __builtin_prefetch(address, write, locality) count_prefetch(locality)

#include "quantized_linear.h"

namespace syringa {

ThreadPool& pool() {
    static ThreadPool single(1);
    return single;
}

template <class Format>
void count(int rows) {
    typedef ChunkLayout<Format> Layout;
    constexpr int CHUNKS = 20, INPUTS = CHUNKS * Format::Scales::CHUNK;
    std::vector<uint8_t> panel(CHUNKS * Layout::SIZE);
    std::vector<float> x((size_t)rows * INPUTS, 1.f), y((size_t)rows * PANEL);
    QuantizedRows<GROUP_OF<Format>> activations;
    activations.quantize(x.data(), INPUTS, rows);
    const Segment segment{BlockType::Q4_0, 0, PANEL, 1, panel.data(), panel.size(), nullptr};
    PanelOutput out{};
    out.y = y.data(), out.stride = out.outputs = PANEL, out.output = ASSIGN;
    prefetches = 0, localities.clear();
    multiply_panel<Format>(PanelTask{segment, 0, 0, rows, out}, activations, INPUTS);
    const int all = localities == std::set<int>{3} ? 1 : localities.count(3) ? -1 : 0;
    std::printf("%d %ld %d %d\n", rows, prefetches / CHUNKS, (int)(Layout::SIZE / 64), all);
}

}  // namespace syringa

int main() {
    for (int rows : {1, 2, 3, 7, 48, 191}) {
        syringa::count<syringa::Nibbles256>(rows);
        syringa::count<syringa::Nibbles32<false>>(rows);
    }
}
