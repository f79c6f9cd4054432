#include "team.h"

#include <pthread.h>
#include <sched.h>

namespace hardpoint {
namespace {

constexpr int SPINS = 256;   // looks at a barrier before the core is given away
constexpr int YIELDS = 16;   // times that it is, before a member sleeps until the next run

inline void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

Team::Team(int members) : members_(members < 1 ? 1 : members) {
    try {
        for (int member = 1; member < members_; member++)
            threads_.emplace_back([this, member] { serve(member); });
    } catch (...) {  // the system gives no more threads
        end();
        throw;
    }
}

Team::~Team() { end(); }

void Team::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run(void (*work)(void*, int), void* context) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        context_ = context;
        run_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(context, 0);
    meet();
}

void Team::serve(int member) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "hardpoint-team");
#endif
    uint64_t done = 0;
    for (;;) {
        for (int i = 0; i < YIELDS && run_.load(std::memory_order_acquire) == done; i++)
            sched_yield();
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return closed_ || run_.load() != done; });
            if (run_.load() == done) return;
            done++;
        }
        work_(context_, member);
        meet();
    }
}

void Team::meet() {
    uint64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == members_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; round_.load(std::memory_order_acquire) == round; i++)
        if (i < SPINS)
            rest();
        else
            sched_yield();
}

}  // namespace hardpoint
