// One team of threads, which computes one step at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hardpoint {

// The caller of `run` is member 0; the others are threads of the team, which sleep between runs.
class Team {
public:
    explicit Team(int members);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return members_; }
    // Call work(context, member) on every member; return when all have returned.
    void run(void (*work)(void*, int), void* context);
    // Wait, within a run, until every member has come here. Gives the core away where it takes
    // long: a member that is not running may need it.
    void meet();

private:
    void serve(int member);
    void end();

    const int members_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> run_{0};
    bool closed_ = false;
    void (*work_)(void*, int) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint64_t> round_{0};
};

}  // namespace hardpoint
