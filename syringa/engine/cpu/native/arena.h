// Memory for weights, on huge pages if available. Small batches are bound by reading weights, and the TLB misses of
// small pages would cost a third of the bandwidth.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace syringa {

class Arena {
  public:
    // Zeroed memory, aligned to a cache line.
    static void* allocate(size_t size) {
        size = (size + LINE - 1) / LINE * LINE;
        if (!current_ || current_->used + size > current_->size) {
            Chunk* full = current_;
            current_ = map_chunk(size);
            if (full) unref(full);  // stays mapped while its weights are in use
        }
        void* memory = reinterpret_cast<char*>(current_) + current_->used;
        current_->used += size;
        current_->users++;
        return memory;
    }

    // The chunk of the last allocation. The caller keeps it and passes it to `release`.
    struct Chunk;
    static Chunk* current_chunk() { return current_; }
    static void release(Chunk* chunk) { unref(chunk); }

    struct Chunk {
        size_t size, used;
        int users;
    };

  private:
    static constexpr size_t LINE = 64, HUGE_PAGE = 2u << 20, CHUNK = 64u << 20;

    static Chunk* map_chunk(size_t size) {
        size_t whole = size + LINE > CHUNK ? size + LINE : CHUNK;
        whole = (whole + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        // Map more than needed and unmap the ends, to align the mapping to huge pages.
        char* mapped =
            (char*)mmap(nullptr, whole + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == (char*)MAP_FAILED) throw std::bad_alloc();
        char* begin = (char*)(((uintptr_t)mapped + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        if (begin > mapped) munmap(mapped, begin - mapped);
        munmap(begin + whole, mapped + HUGE_PAGE - begin);
#if defined(MADV_HUGEPAGE)
        madvise(begin, whole, MADV_HUGEPAGE);
#endif
        return new (begin) Chunk{whole, LINE, 1};  // the arena itself holds a reference to the current chunk
    }

    static void unref(Chunk* chunk) {
        if (--chunk->users == 0) munmap(chunk, chunk->size);
    }

    static inline Chunk* current_ = nullptr;
};

}  // namespace syringa
