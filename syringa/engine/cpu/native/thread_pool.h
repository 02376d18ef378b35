// A thread pool for bursts of short parallel loops.
//
// A forward pass is some three hundred loops of 10 µs to 10 ms. Between loops threads spin; between passes they yield
// (a sleeping thread is often woken on the core of its waker, and then both share that core); after that they sleep, so
// that an idle engine costs nothing. A descheduled thread never delays a loop it has not entered.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace syringa {

static inline void cpu_pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
  public:
    explicit ThreadPool(int threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { worker_loop(); });
    }

    // Calls body(i) once for each i in [0, count), on any thread. If a call lacks memory, some of the others may be left
    // out, and std::bad_alloc is thrown on the calling thread.
    template <class Body>
    void run(int count, Body&& body) {
        if (count <= 0) return;
        if (workers_.empty() || count == 1) {
            for (int i = 0; i < count; i++) body(i);
            return;
        }
        call_ = [](void* context, int i) { (*static_cast<Body*>(context))(i); };
        context_ = const_cast<void*>(static_cast<const void*>(&body));
        count_ = count;
        next_.store(0, std::memory_order_relaxed);
        state_.store((++epoch_ << 16) | OPEN, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        run_tasks();
        state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        while (state_.load(std::memory_order_acquire) & ENTERED) cpu_pause();
        if (out_of_memory_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
    }

    int threads() const { return (int)workers_.size() + 1; }

  private:
    // state_: the number of the loop, whether it may be entered, and how many workers are inside.
    static constexpr uint64_t OPEN = 1u << 15, ENTERED = OPEN - 1;
    static constexpr int SPINS = 4000;
    static constexpr std::chrono::microseconds AWAKE{500};

    // An exception would end the process on a worker, and on the calling thread leave the loop while others use its body.
    void run_tasks() {
        try {
            for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(context_, i);
        } catch (const std::bad_alloc&) {
            out_of_memory_.store(true, std::memory_order_relaxed);
        }
    }

    bool try_enter(uint64_t& seen) {
        uint64_t state = state_.load(std::memory_order_acquire);
        while ((state & OPEN) && (state >> 16) != seen) {
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
                seen = state >> 16;
                return true;
            }
        }
        return false;
    }

    // Spin, then yield, until a loop can be entered or time is up.
    bool spin_enter(uint64_t& seen) {
        for (int spins = 0; spins < SPINS; spins++) {
            if (try_enter(seen)) return true;
            cpu_pause();
        }
        const auto end = std::chrono::steady_clock::now() + AWAKE;
        while (std::chrono::steady_clock::now() < end) {
            if (try_enter(seen)) return true;
            std::this_thread::yield();
        }
        return false;
    }

    void worker_loop() {
        uint64_t seen = 0;
        for (;;) {
            if (!spin_enter(seen)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] {
                    uint64_t state = state_.load(std::memory_order_seq_cst);
                    return (state & OPEN) && (state >> 16) != seen;
                });
                sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                if (!try_enter(seen)) continue;
            }
            run_tasks();
            state_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> state_{0};
    std::atomic<int> next_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> out_of_memory_{false};
    uint64_t epoch_ = 0;
    int count_ = 0;
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
};

ThreadPool& pool();

// Distribute rows over the threads in chunks that are worth waking a thread for.
template <class Body>
void for_rows(int rows, size_t width, Body&& body) {
    const int chunk = std::max<int>(1, (int)(16384 / std::max<size_t>(width, 1)));
    if (rows <= chunk) {
        for (int r = 0; r < rows; r++) body(r);
        return;
    }
    pool().run((rows + chunk - 1) / chunk, [&](int c) {
        for (int r = c * chunk; r < std::min(rows, (c + 1) * chunk); r++) body(r);
    });
}

}  // namespace syringa
