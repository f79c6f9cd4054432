#include "program.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <stdexcept>

#include "execution.h"

namespace hardpoint {
namespace {

std::mutex stepping;  // engines in one process compute in turn: they have the same cores

bool reads(const hp_op& op, int32_t buffer) {
    return (op.kind != HP_EMBED && op.in == buffer) ||
           ((op.kind == HP_EXPERTS || op.kind == HP_SIGMOID_ADD) && op.second == buffer) ||
           ((op.kind == HP_ADD || op.kind == HP_ADD_NORM || op.kind == HP_EXPERTS ||
             op.kind == HP_SIGMOID_ADD) &&
            op.out == buffer);
}

// The columns that an operation reads and writes.
struct Widths {
    int64_t in, out;
};
Widths widths_of(const hp_op& op, const hp_shape& shape) {
    const int64_t queries = shape.heads * shape.head, keys = shape.kv_heads * shape.head;
    switch (op.kind) {
    case HP_EMBED: return {0, op.weight.cols};
    case HP_LINEAR:
    case HP_ADD: return {op.weight.cols, op.weight.rows};
    case HP_GATED: return {op.weight.cols, op.weight.rows / 2};
    case HP_ROTATE: return {queries + 2 * keys, 0};
    case HP_ATTEND: return {queries + 2 * keys, queries};
    case HP_ACTIVATE: return {2 * op.columns, op.columns};
    case HP_ROUTE: return {op.columns, 2 * op.per_token};
    case HP_EXPERTS: return {op.weight.cols, op.other.rows / std::max<int64_t>(1, op.columns)};
    case HP_SIGMOID_ADD: return {op.columns, op.columns};
    case HP_GATHER: return {op.columns, op.columns};
    default: return {op.weight.cols, op.weight.cols};
    }
}

}  // namespace

Program::Program(const Kernels* kernels, int threads, const hp_op* ops, int64_t count,
                 const hp_shape& shape)
    : kernels_(*kernels), shape_(shape), ops_(ops, ops + count),
      counters_(new Counter[size_t(count * PHASES)]),
      columns_(shape.columns, shape.columns + shape.buffers), team_(threads) {
    int64_t widest = 1, activations = 0, slots = 0, inner = 0, outer = 0;
    for (const hp_op& op : ops_) {
        check(op);
        for (const Matrix& matrix : {op.weight, op.other}) {
            widest = std::max(widest, matrix.cols);
            if (activation_group(matrix.type))
                activations = std::max(activations, activation_bytes(matrix.type, matrix.cols));
        }
        if (op.kind == HP_EXPERTS) {
            slots = std::max(slots, shape.most_tokens * op.per_token);
            inner = std::max(inner, op.other.cols);
            outer = std::max(outer, op.weight.cols);
        }
    }
    for (size_t place = 0; place < ops_.size(); place++) sole_norm_.push_back(is_sole_norm(place));
    for (int64_t columns : columns_) buffers_.emplace_back(columns * shape.most_tokens);
    activations_ = Room<char>(activations * std::max(shape.most_tokens, slots));
    gathered_ = Room<char>(slots * std::max(widest * 4, activations));
    inner_ = Room<float>(slots * inner);
    outer_ = Room<float>(slots * outer);
    members_.resize(size_t(team_.size()));
    for (Member& own : members_) {
        const int64_t group = shape.heads / std::max<int64_t>(1, shape.kv_heads);
        own.scratch = Room<float>(scratch_size(widest, group, shape.head));
        own.tile = Room<float>(MOST_ROWS * CHUNK);
        own.rows = Room<float>(PRIVATE_ROWS * widest);
        own.activations = Room<char>(PRIVATE_ROWS * activations);
        own.best.resize(size_t(shape.most_rows));
    }
    pieces_.reserve(size_t(shape.most_tokens));
}

// Raises std::invalid_argument.
void Program::check(const hp_op& op) const {
    const auto is_buffer = [&](int32_t index) { return index >= 0 && index < shape_.buffers; };
    const Widths widths = widths_of(op, shape_);
    const bool reads_rows = op.kind != HP_EMBED && op.kind != HP_GATHER;
    bool good = op.kind >= 0 && op.kind <= HP_SIGMOID_ADD && op.in_column >= 0 && op.out_column >= 0;
    good = good && (op.kind == HP_EMBED || is_buffer(op.in));
    good = good && (is_buffer(op.out) || (op.out == -1 && op.kind == HP_LINEAR && op.picked));
    good = good && (!reads_rows || op.in_column + widths.in <= columns(op.in));
    good = good && op.out_column + widths.out <= columns(op.out);
    if (op.kind == HP_EXPERTS || op.kind == HP_SIGMOID_ADD) good = good && is_buffer(op.second);
    if (op.kind == HP_EXPERTS || op.kind == HP_ROUTE)
        good = good && op.columns > 0 && op.per_token > 0 && op.per_token <= op.columns;
    if (op.kind == HP_GATHER) good = good && is_buffer(op.in) && columns(op.in) <= columns(op.out);
    if (op.kind == HP_ROTATE) good = good && op.turned >= 0 && op.turned <= shape_.head;
    if (!good) throw std::invalid_argument("operation");
}

// Whether an operation is a norm whose result only the next one multiplies with.
bool Program::is_sole_norm(size_t place) const {
    if (place + 1 >= ops_.size() || ops_[place].kind != HP_NORM) return false;
    const hp_op& norm = ops_[place];
    const hp_op& next = ops_[place + 1];
    if ((next.kind != HP_LINEAR && next.kind != HP_GATED) || next.in != norm.out ||
        next.in_column || norm.out_column || next.weight.cols != norm.weight.cols ||
        next.picked != norm.picked || next.out == norm.in)
        return false;
    for (size_t i = place + 2; i < ops_.size(); i++) {
        if (reads(ops_[i], norm.out)) return false;
        if (ops_[i].out == norm.out) return true;
    }
    return true;
}

void Program::choose(const float* logits, int64_t rows, int64_t count, const hp_wish* wishes,
                     int64_t* tokens) {
    struct Work {
        const float* logits;
        int64_t rows, count;
        const hp_wish* wishes;
        int64_t* tokens;
        std::atomic<int64_t> next{0};
    } work{logits, rows, count, wishes, tokens};
    team_.run(
        [](void* context, int) {
            Work& own = *(Work*)context;
            std::vector<float> scratch;
            for (int64_t row; (row = own.next.fetch_add(1)) < own.rows;) {
                const float* logits = own.logits + row * own.count;
                try {
                    own.tokens[row] =
                        hardpoint::choose(logits, own.count, own.wishes[row], scratch);
                } catch (const std::bad_alloc&) {
                    own.tokens[row] = UNDECIDED;
                }
            }
        },
        &work);
}

float* Program::buffer(int64_t index) const {
    return index < 0 || index >= shape_.buffers ? nullptr : buffers_[size_t(index)].data();
}

int32_t Program::run(const hp_step& step, int64_t first, int64_t last) {
    last = std::min(last, int64_t(ops_.size()));
    if (first == 0) {
        if (int32_t wrong = check(step)) return wrong;
        divide(step);
    }
    step_ = &step;
    first_ = first;
    last_ = last;
    for (int64_t i = first * PHASES; i < last * PHASES; i++) counters_[size_t(i)].store(0);
    if (step.best)
        for (Member& own : members_)
            std::fill(own.best.begin(), own.best.begin() + step.rows, Best{-HUGE_VALF, -1, false});
    team_.run([](void* self, int member) { ((Program*)self)->work(member); }, this);
    if (ended()) return -1;
    if (step.best && first < last && ops_[size_t(last - 1)].out < 0) collect_best(step);
    return 0;
}

void Program::collect_best(const hp_step& step) {
    for (int64_t row = 0; row < step.rows; row++) {
        Best best = members_[0].best[size_t(row)];
        for (const Member& own : members_) {
            const Best& other = own.best[size_t(row)];
            best.wrong |= other.wrong;
            if (other.value > best.value || (other.value == best.value && other.place < best.place)) {
                best.value = other.value;
                best.place = other.place;
            }
        }
        step.best[row] = best.wrong || !std::isfinite(best.value) ? -1 : best.place;
    }
}

void Program::best(const float* logits, int64_t rows, int64_t count, int64_t* best) {
    struct Work {
        const Kernels& kernels;
        const float* logits;
        int64_t rows, count;
        int64_t* best;
        std::atomic<int64_t> next{0};
    } work{kernels_, logits, rows, count, best};
    team_.run(
        [](void* context, int) {
            Work& own = *(Work*)context;
            for (int64_t row; (row = own.next.fetch_add(1)) < own.rows;) {
                Best found{-HUGE_VALF, -1, false};
                own.kernels.rank(own.logits + row * own.count, own.count, 0, found);
                own.best[row] = found.wrong || !std::isfinite(found.value) ? -1 : found.place;
            }
        },
        &work);
}

int32_t Program::check(const hp_step& step) const {
    const hp_shape& shape = shape_;
    auto within = [](int64_t value, int64_t end) { return value >= 0 && value < end; };
    if (!within(step.tokens, shape.most_tokens + 1)) return 1;
    if (!within(step.requests, step.tokens + 1)) return 2;
    if (!within(step.rows, std::min(step.tokens, shape.most_rows) + 1)) return 3;
    if (step.starts[0] != 0 || step.starts[step.requests] != step.tokens) return 9;
    for (int64_t t = 0; t < step.tokens; t++) {
        if (!within(step.token_ids[t], shape.vocabulary)) return 5;
        if (!within(step.positions[t], shape.positions)) return 6;
        if (!within(step.slots[t], shape.blocks * shape.block_size)) return 7;
    }
    for (int64_t i = 0; i < step.rows; i++)
        if (!within(step.picked[i], step.tokens)) return 8;
    for (int64_t r = 0; r < step.requests; r++) {
        int64_t begin = step.starts[r], end = step.starts[r + 1];
        if (begin >= end) return 9;
        for (int64_t t = begin; t + 1 < end; t++)
            if (step.positions[t] + 1 != step.positions[t + 1]) return 6;
        int64_t blocks = step.positions[end - 1] / shape.block_size + 1;
        if (blocks > step.table_columns) return 4;
        for (int64_t b = 0; b < blocks; b++)
            if (!within(step.table[r * step.table_columns + b], shape.blocks)) return 10;
    }
    return 0;
}

// Share attention out: by query tokens and key heads, and by spans of keys where there are too few
// of those for the team and the keys are many.
void Program::divide(const hp_step& step) {
    pieces_.clear();
    first_part_.clear();
    int64_t parts = 0, longest = 0;
    singles_ = step.tokens == step.requests;
    for (int64_t r = 0; r < step.requests; r++)
        for (int64_t t = step.starts[r]; t < step.starts[r + 1]; t += QUERY_TILE) {
            const int64_t count = std::min(QUERY_TILE, step.starts[r + 1] - t);
            const int64_t spans = (step.positions[t] + count + SPAN - 1) / SPAN;
            pieces_.push_back({r, t, count});
            first_part_.push_back(parts);
            parts += spans;
            longest = std::max(longest, spans);
        }
    first_part_.push_back(parts);
    by_spans_ = longest > 1 && int64_t(pieces_.size()) * shape_.kv_heads < 4 * team_.size();
    if (!by_spans_) return;
    const int64_t rows = QUERY_TILE * (shape_.heads / shape_.kv_heads);
    try {
        const size_t size = size_t(parts * shape_.kv_heads * rows * (shape_.head + 2));
        if (parts_.size() < size) parts_.resize(size);
    } catch (const std::bad_alloc&) {
        by_spans_ = false;
    }
}

int64_t scratch_size(int64_t most_columns, int64_t group, int64_t head) {
    const int64_t rows = QUERY_TILE * group;
    const int64_t attention = rows * (3 * head + KEY_TILE) + 2 * KEY_TILE * head;
    const int64_t widened = std::max(4 * most_columns, PANEL * (256 + 4));
    const int64_t products = MOST_ROWS * (2 * CHUNK + PANEL) + widened;
    return std::max(attention, products) + 64;
}

const Kernels* kernels(int32_t level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level == AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return avx2_kernels();
    if (level >= AVX512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        if (level == AVX512) return avx512_kernels();
        if (level == AVX512_BF16 && __builtin_cpu_supports("avx512bf16"))
            return avx512_bf16_kernels();
    }
#endif
    return level == PORTABLE ? portable_kernels() : nullptr;
}

}  // namespace hardpoint

using hardpoint::Program;

int32_t hp_abi() { return 4; }

int32_t hp_levels() {
    int32_t bits = 0;
    for (int32_t level = 0; level < hardpoint::LEVELS; level++)
        if (hardpoint::kernels(level)) bits |= 1 << level;
    return bits;
}

void* hp_program_new(int32_t level, int32_t threads, const hp_op* ops, int64_t count,
                     const hp_shape* shape) {
    const hardpoint::Kernels* kernels = hardpoint::kernels(level);
    if (!kernels) return nullptr;
    try {
        return new Program(kernels, threads, ops, count, *shape);
    } catch (...) {
        return nullptr;
    }
}

void hp_program_watch(void* program, const int32_t* ended) { ((Program*)program)->watch(ended); }

void hp_program_free(void* program) { delete (Program*)program; }

int32_t hp_program_run(void* program, const hp_step* step, int64_t first, int64_t last) {
    std::lock_guard<std::mutex> lock(hardpoint::stepping);
    return ((Program*)program)->run(*step, first, last);
}

void hp_program_best(void* program, const float* logits, int64_t rows, int64_t count,
                     int64_t* best) {
    std::lock_guard<std::mutex> lock(hardpoint::stepping);
    ((Program*)program)->best(logits, rows, count, best);
}

void hp_program_choose(void* program, const float* logits, int64_t rows, int64_t count,
                       const hp_wish* wishes, int64_t* tokens) {
    std::lock_guard<std::mutex> lock(hardpoint::stepping);
    ((Program*)program)->choose(logits, rows, count, wishes, tokens);
}

float* hp_program_buffer(void* program, int64_t index) { return ((Program*)program)->buffer(index); }
