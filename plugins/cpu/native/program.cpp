#include "program.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "team.h"

namespace hardpoint {
namespace {

std::mutex stepping;  // engines in one process compute in turn: they have the same cores

struct Piece {  // of attention: some query tokens of one request
    int64_t request, token, count;
};

class Program {
public:
    Program(const Kernels* kernels, int threads, const hp_op* ops, int64_t count,
            const hp_shape& shape)
        : kernels_(*kernels), shape_(shape), ops_(ops, ops + count),
          counters_(new std::atomic<int64_t>[size_t(count)]), team_(threads) {
        int64_t most = 1;
        for (hp_op& op : ops_) {
            most = std::max(most, op.weight.cols);
            if (op.weight.type == BF16) op.vector_type = BF16;
        }
        for (int32_t i = 0; i < shape.buffers; i++)
            buffers_.emplace_back(size_t(shape.columns[i] * shape.most_tokens));
        columns_.assign(shape.columns, shape.columns + shape.buffers);
        scratch_.resize(size_t(team_.size()));
        for (auto& own : scratch_)
            own.resize(size_t(scratch_size(most, shape.heads / shape.kv_heads, shape.head)));
        pieces_.reserve(size_t(shape.most_tokens));
    }

    int32_t run(const hp_step& step, int64_t first, int64_t last) {
        if (first == 0) {
            if (int32_t wrong = check(step)) return wrong;
            divide(step);
        }
        step_ = &step;
        first_ = first;
        last_ = last;
        for (int64_t i = first; i < last; i++) counters_[size_t(i)].store(0);
        team_.run([](void* self, int member) { ((Program*)self)->work(member); }, this);
        return 0;
    }

    void best(const float* logits, int64_t rows, int64_t count, int64_t* best) {
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
                for (int64_t row; (row = own.next.fetch_add(1)) < own.rows;)
                    own.best[row] = own.kernels.best(own.logits + row * own.count, own.count);
            },
            &work);
    }

private:
    int32_t check(const hp_step& step) const {
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

    void divide(const hp_step& step) {
        pieces_.clear();
        for (int64_t r = 0; r < step.requests; r++)
            for (int64_t t = step.starts[r]; t < step.starts[r + 1]; t += QUERY_TILE)
                pieces_.push_back({r, t, std::min(QUERY_TILE, step.starts[r + 1] - t)});
    }

    void work(int member) {
        for (int64_t i = first_; i < last_; i++) {
            execute(ops_[size_t(i)], counters_[size_t(i)], scratch_[size_t(member)].data());
            if (i + 1 < last_) team_.meet();
        }
    }

    float* buffer(int32_t index) {
        return index < 0 ? step_->logits : buffers_[size_t(index)].data();
    }
    int64_t columns(int32_t index) const {
        return index < 0 ? shape_.vocabulary : columns_[size_t(index)];
    }

    void execute(const hp_op& op, std::atomic<int64_t>& next, float* scratch) {
        const int64_t rows = op.picked ? step_->rows : step_->tokens;
        const float* in = buffer(op.in);
        float* out = buffer(op.out);
        const int64_t in_stride = columns(op.in), out_stride = columns(op.out);
        switch (op.kind) {
        case HP_LINEAR:
        case HP_ADD:
        case HP_GATED:
            multiply(op, rows, in, in_stride, out, out_stride, next, scratch);
            break;
        case HP_ATTEND: {
            const int64_t pieces = int64_t(pieces_.size()) * shape_.kv_heads;
            for (int64_t i; (i = next.fetch_add(1)) < pieces;)
                attend(op, pieces_[size_t(i / shape_.kv_heads)], i % shape_.kv_heads, in, in_stride,
                       out, out_stride, scratch);
            break;
        }
        default: {  // row by row
            const int64_t some = std::max<int64_t>(1, rows / (4 * team_.size()));
            for (int64_t row; (row = next.fetch_add(some)) < rows;)
                for (int64_t r = row; r < std::min(rows, row + some); r++)
                    single(op, r, in, in_stride, out + r * out_stride);
        }
        }
    }

    void multiply(const hp_op& op, int64_t rows, const float* in, int64_t in_stride, float* out,
                  int64_t out_stride, std::atomic<int64_t>& next, float* scratch) {
        const int64_t outputs = op.kind == HP_GATED ? op.weight.rows / 2 : op.weight.rows;
        const int64_t chunks = (outputs + CHUNK - 1) / CHUNK, block = row_block(op.weight.cols);
        const int64_t pieces = chunks * ((rows + block - 1) / block);
        for (int64_t i; (i = next.fetch_add(1)) < pieces;) {
            const int64_t row = i / chunks * block, count = std::min(block, rows - row);
            const int64_t from = i % chunks * CHUNK, to = std::min(outputs, from + CHUNK);
            const float* x = in + row * in_stride;
            float* y = out + row * out_stride;
            if (op.kind == HP_GATED)
                kernels_.gated(x, in_stride, count, op.weight, from, to,
                               {op.bias, op.vector_type}, y, out_stride, scratch);
            else
                kernels_.linear(x, in_stride, count, op.weight, from, to,
                                {op.bias, op.vector_type}, op.kind == HP_ADD, y, out_stride,
                                scratch);
        }
    }

    void single(const hp_op& op, int64_t row, const float* in, int64_t in_stride, float* out) {
        const hp_step& step = *step_;
        const float* from = in + row * in_stride;
        switch (op.kind) {
        case HP_EMBED:
            kernels_.embed(op.weight, step.token_ids[row], op.scale, out);
            break;
        case HP_NORM:
            kernels_.norm(from, in_stride, 1, op.weight, op.eps, out, 0);
            break;
        case HP_GATHER:
            memcpy(out, in + step.picked[row] * in_stride, size_t(in_stride) * 4);
            break;
        case HP_ROTATE:
            rotate(op, row, const_cast<float*>(from));
            break;
        }
    }

    void rotate(const hp_op& op, int64_t token, float* x) {
        const int64_t head = shape_.head, heads = shape_.heads, kv = shape_.kv_heads;
        float* keys = x + heads * head;
        if (op.query_norm) {
            kernels_.norm(x, head, heads, {op.query_norm, 1, head, op.vector_type}, op.eps, x, head);
            kernels_.norm(keys, head, kv, {op.key_norm, 1, head, op.vector_type}, op.eps, keys, head);
        }
        const int64_t angles = step_->positions[token] * (head / 2);
        kernels_.rotate(x, heads + kv, head, op.cos + angles, op.sin + angles);
        const int64_t size = kv * head, place = step_->slots[token] * size;
        const int64_t bytes = shape_.cache_type == BF16 ? 2 : 4;
        kernels_.store(keys, size, (char*)op.keys + place * bytes, shape_.cache_type);
        kernels_.store(keys + size, size, (char*)op.values + place * bytes, shape_.cache_type);
    }

    void attend(const hp_op& op, const Piece& piece, int64_t kv_head, const float* in,
                int64_t in_stride, float* out, int64_t out_stride, float* scratch) {
        const int64_t group = shape_.heads / shape_.kv_heads, column = kv_head * group * shape_.head;
        kernels_.attend({in + piece.token * in_stride + column, in_stride,
                         out + piece.token * out_stride + column, out_stride, op.keys, op.values,
                         shape_.cache_type, step_->table + piece.request * step_->table_columns,
                         shape_.block_size, shape_.kv_heads, kv_head, group, shape_.head,
                         step_->positions[piece.token], piece.count, op.window, op.scale},
                        scratch);
    }

    const Kernels kernels_;
    const hp_shape shape_;
    std::vector<hp_op> ops_;
    std::unique_ptr<std::atomic<int64_t>[]> counters_;
    std::vector<std::vector<float>> buffers_, scratch_;
    std::vector<int64_t> columns_;
    std::vector<Piece> pieces_;
    const hp_step* step_ = nullptr;
    int64_t first_ = 0, last_ = 0;
    Team team_;
};

}  // namespace

int64_t scratch_size(int64_t most_columns, int64_t group, int64_t head) {
    const int64_t rows = QUERY_TILE * group;
    const int64_t attention = rows * (2 * head + KEY_TILE);
    const int64_t products = 2 * 96 * CHUNK + 4 * most_columns;
    return std::max(attention, products) + 64;
}

const Kernels* kernels(int32_t level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level == AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return avx2_kernels();
    if (level == AVX512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return avx512_kernels();
#endif
    return level == PORTABLE ? portable_kernels() : nullptr;
}

}  // namespace hardpoint

using hardpoint::Program;

int32_t hp_abi() { return 2; }

int32_t hp_levels() {
    int32_t bits = 0;
    for (int32_t level = 0; level <= hardpoint::AVX512; level++)
        if (hardpoint::kernels(level)) bits |= 1 << level;
    return bits;
}

void* hp_program_new(int32_t level, int32_t threads, const hp_op* ops, int64_t count,
                     const hp_shape* shape) {
    const hardpoint::Kernels* kernels = hardpoint::kernels(level);
    if (!kernels) return nullptr;
    try {
        return new Program(kernels, threads, ops, count, *shape);
    } catch (...) {  // no memory, or no thread
        return nullptr;
    }
}

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
