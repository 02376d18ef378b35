// Memory for weights, on huge pages where the system has them: reading weights is most of a small batch's time, and the
// small pages' address look-ups alone would cost a third of the bandwidth.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace syringa {

class Arena {
  public:
    // Zeroed memory, aligned to a cache line.
    static void* take(size_t size) {
        size = (size + LINE - 1) / LINE * LINE;
        if (!current_ || current_->used + size > current_->size) {
            Chunk* full = current_;
            current_ = open(size);
            if (full) leave(full);  // lives on while its tensors do
        }
        void* memory = reinterpret_cast<char*>(current_) + current_->used;
        current_->used += size;
        current_->users++;
        return memory;
    }

    // An address does not tell its chunk: whoever takes memory keeps what `chunk()` says right after, to give it back.
    struct Chunk;
    static Chunk* chunk() { return current_; }
    static void give_back(Chunk* chunk) { leave(chunk); }

    struct Chunk {
        size_t size, used;
        int users;
    };

  private:
    static constexpr size_t LINE = 64, HUGE_PAGE = 2u << 20, CHUNK = 64u << 20;

    static Chunk* open(size_t size) {
        size_t whole = size + LINE > CHUNK ? size + LINE : CHUNK;
        whole = (whole + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        // More than needed, then the ends cut off: that is how one gets an aligned mapping.
        char* mapped = (char*)mmap(nullptr, whole + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == (char*)MAP_FAILED) throw std::bad_alloc();
        char* begin = (char*)(((uintptr_t)mapped + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        if (begin > mapped) munmap(mapped, begin - mapped);
        munmap(begin + whole, mapped + HUGE_PAGE - begin);
#if defined(MADV_HUGEPAGE)
        madvise(begin, whole, MADV_HUGEPAGE);
#endif
        return new (begin) Chunk{whole, LINE, 1};  // the first user is the arena itself, while the chunk is current
    }

    static void leave(Chunk* chunk) {
        if (--chunk->users == 0) munmap(chunk, chunk->size);
    }

    static inline Chunk* current_ = nullptr;
};

}  // namespace syringa
