// A program in memory: its operations, its buffers and its team. Private to the library.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "program.h"
#include "sampling.h"
#include "team.h"

namespace hardpoint {

constexpr int64_t PRIVATE_ROWS = 4;  // so few that every member prepares them for itself
constexpr int PHASES = 6;            // of one operation, between which the members meet

struct Piece {  // of attention: some query tokens of one request
    int64_t request, token, count;
};

template <class T>
class Room {  // memory that is taken when it is first written
public:
    Room() = default;
    explicit Room(int64_t count) {
        const size_t bytes = (size_t(count > 0 ? count : 1) * sizeof(T) + 63) / 64 * 64;
        data_.reset((T*)std::calloc(bytes + 64, 1));
        if (!data_) throw std::bad_alloc();
    }
    T* data() const { return (T*)((uintptr_t(data_.get()) + 63) / 64 * 64); }

private:
    struct Free {
        void operator()(T* data) const { std::free(data); }
    };
    std::unique_ptr<T, Free> data_;
};

struct Member {  // what a thread of the team has for itself
    Room<float> scratch;                        // of the kernels
    Room<float> tile;                           // products that nobody else wants
    Room<float> rows;                           // PRIVATE_ROWS, normed
    Room<char> activations;                     // of the same, prepared
    std::vector<Best> best;                     // of each row that is wanted
    std::vector<int64_t> starts, slots, first_piece;  // of experts
};

class Program {
public:
    // Raises std::bad_alloc, std::system_error, and std::invalid_argument for an operation that
    // reads or writes beside its buffers.
    Program(const Kernels* kernels, int threads, const hp_op* ops, int64_t count,
            const hp_shape& shape);

    int32_t run(const hp_step& step, int64_t first, int64_t last);
    void best(const float* logits, int64_t rows, int64_t count, int64_t* best);
    void choose(const float* logits, int64_t rows, int64_t count, const hp_wish* wishes,
                int64_t* tokens);
    float* buffer(int64_t index) const;
    void watch(const int32_t* ended) { ended_ = ended; }

private:
    using Counter = std::atomic<int64_t>;

    void check(const hp_op& op) const;
    int32_t check(const hp_step& step) const;
    void divide(const hp_step& step);
    bool is_sole_norm(size_t place) const;
    void collect_best(const hp_step& step);

    // In a run; every member makes the same calls.
    void work(int member);
    bool is_left_out(int64_t place) const;
    void execute(int64_t place, int member);
    void multiply(int64_t place, Member& own);
    void route_experts(const hp_op& op, int64_t rows, Member& own) const;
    void run_experts(int64_t place, Member& own);
    void attend(int64_t place, Member& own);
    void single(int64_t place, const hp_op& op, int64_t row, Member& own);
    void rotate(const hp_op& op, int64_t token, int64_t kv_head, int64_t kv_heads, float* x);

    Rows prepared(int64_t place, const hp_op& op, int64_t rows, Member& own);
    Attention attention(const hp_op& op, const Piece& piece, int64_t kv_head);
    bool norms_for(int64_t place) const { return place > first_ && sole_norm_[size_t(place - 1)]; }
    int64_t rows_of(const hp_op& op) const { return op.picked ? step_->rows : step_->tokens; }
    float* at(int32_t buffer, int64_t column) const {
        return (buffer < 0 ? step_->logits : buffers_[size_t(buffer)].data()) + column;
    }
    int64_t columns(int32_t buffer) const {
        return buffer < 0 ? shape_.vocabulary : columns_[size_t(buffer)];
    }
    Counter& counter(int64_t place, int phase) const {
        return counters_[size_t(place * PHASES + phase)];
    }
    bool ended() const { return ended_ && __atomic_load_n(ended_, __ATOMIC_RELAXED); }
    // Call some(i) for the numbers below `count` that no other member has taken: of what is left each
    // takes half of its part at once, as memory is read fastest in long runs. None, once the run was
    // ended: the members still meet as often.
    template <class Some>
    void share(Counter& next, int64_t count, Some some) const {
        for (int64_t i = next.load(std::memory_order_relaxed); i < count;) {
            const int64_t end = i + 1 + (count - i - 1) / (2 * team_.size());
            if (!next.compare_exchange_weak(i, end, std::memory_order_relaxed)) continue;
            for (int64_t k = i; k < end && !ended(); k++) some(k);
            i = next.load(std::memory_order_relaxed);
        }
    }

    const int32_t* ended_ = nullptr;
    const Kernels kernels_;
    const hp_shape shape_;
    const std::vector<hp_op> ops_;
    std::vector<bool> sole_norm_;  // a norm that only the operation behind it reads
    std::unique_ptr<Counter[]> counters_;
    std::vector<Room<float>> buffers_;
    std::vector<int64_t> columns_;
    std::vector<Member> members_;
    Room<char> activations_;        // of all rows, prepared
    Room<char> gathered_;           // experts': their rows, what is within, what comes out
    Room<float> inner_, outer_;
    std::vector<Piece> pieces_;
    std::vector<float> parts_;      // of attention that is shared out by spans of keys
    std::vector<int64_t> first_part_;  // of each piece
    bool singles_ = false;          // every request has one token
    bool by_spans_ = false;
    const hp_step* step_ = nullptr;
    int64_t first_ = 0, last_ = 0;
    Team team_;
};

}  // namespace hardpoint
