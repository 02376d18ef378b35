// A thread pool for bursts of short parallel loops.
//
// A forward pass is some three hundred loops of 10 µs to 10 ms. Between them threads spin; between passes they stay
// awake but let anybody else have the core (a sleeping thread is often woken on the core of the one that wakes it, and
// then both wait for that one core); after that they sleep, so that an idle engine costs nothing. A thread that the
// system has taken off its core never delays a loop it has not entered.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace syringa {

static inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { work(); });
    }

    // Calls body(i) once for each i in [0, count), on any thread.
    template <class Body>
    void run(int count, Body&& body) {
        if (count <= 0) return;
        if (helpers_.empty() || count == 1) {
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
        drain();
        state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        while (state_.load(std::memory_order_acquire) & ENTERED) relax();
    }

    int threads() const { return (int)helpers_.size() + 1; }

  private:
    // state_: the loop's number, whether it may still be entered, and how many helpers are inside.
    static constexpr uint64_t OPEN = 1u << 15, ENTERED = OPEN - 1;
    static constexpr int SPINS = 4000;
    static constexpr std::chrono::microseconds AWAKE{500};

    void drain() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(context_, i);
    }

    bool enter(uint64_t& seen) {
        uint64_t state = state_.load(std::memory_order_acquire);
        while ((state & OPEN) && (state >> 16) != seen) {
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
                seen = state >> 16;
                return true;
            }
        }
        return false;
    }

    // Waits for a loop to enter, but not for long.
    bool enter_soon(uint64_t& seen) {
        for (int spins = 0; spins < SPINS; spins++) {
            if (enter(seen)) return true;
            relax();
        }
        const auto end = std::chrono::steady_clock::now() + AWAKE;
        while (std::chrono::steady_clock::now() < end) {
            if (enter(seen)) return true;
            std::this_thread::yield();
        }
        return false;
    }

    void work() {
        uint64_t seen = 0;
        for (;;) {
            if (!enter_soon(seen)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] {
                    uint64_t state = state_.load(std::memory_order_seq_cst);
                    return (state & OPEN) && (state >> 16) != seen;
                });
                sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                if (!enter(seen)) continue;
            }
            drain();
            state_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> state_{0};
    std::atomic<int> next_{0};
    std::atomic<int> sleepers_{0};
    uint64_t epoch_ = 0;
    int count_ = 0;
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
};

Pool& pool();

}  // namespace syringa
