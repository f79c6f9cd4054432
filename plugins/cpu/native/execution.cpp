// What the members of the team do in a step.

#include "execution.h"

#include <algorithm>
#include <cstring>

namespace hardpoint {

void Program::work(int member) {
    bool met = true;
    for (int64_t i = first_; i < last_; i++) {
        if (is_left_out(i)) continue;
        if (!met) team_.meet();
        execute(i, member);
        met = false;
    }
}

// Whether the next operation does the work of this one.
bool Program::is_left_out(int64_t place) const {
    if (place + 1 >= last_) return false;
    const hp_op& op = ops_[size_t(place)];
    if (op.kind == HP_NORM) return sole_norm_[size_t(place)] && rows_of(op) <= PRIVATE_ROWS;
    return op.kind == HP_ROTATE && ops_[size_t(place + 1)].kind == HP_ATTEND && singles_ && !by_spans_;
}

void Program::execute(int64_t place, int member) {
    const hp_op& op = ops_[size_t(place)];
    switch (op.kind) {
    case HP_LINEAR:
    case HP_ADD:
    case HP_GATED: return multiply(place, members_[size_t(member)]);
    case HP_ATTEND: return attend(place, members_[size_t(member)]);
    case HP_EXPERTS: return run_experts(place, members_[size_t(member)]);
    default: {
        const int64_t rows = rows_of(op);
        Member& own = members_[size_t(member)];
        share(counter(place, 0), rows, [&](int64_t row) { single(place, op, row, own); });
    }
    }
}

// The rows that a product reads: normed, if the norm before it was left out, and prepared, if the
// weights want that.
Rows Program::prepared(int64_t place, const hp_op& op, int64_t rows, Member& own) {
    const Matrix& w = op.weight;
    const bool prepares = activation_group(w.type) > 0;
    const bool norms = norms_for(place) && is_left_out(place - 1);
    const int64_t bytes = prepares ? activation_bytes(w.type, w.cols) : w.cols * 4;
    const float* in = at(op.in, op.in_column);
    const int64_t stride = columns(op.in);
    if (!norms && !prepares) return {in, stride * 4, rows};
    if (rows <= PRIVATE_ROWS) {
        char* to = prepares ? own.activations.data() : (char*)own.rows.data();
        for (int64_t row = 0; row < rows; row++) {
            const float* from = in + row * stride;
            if (norms) {
                const hp_op& norm = ops_[size_t(place - 1)];
                float* normed = own.rows.data() + row * w.cols;
                kernels_.norm(at(norm.in, norm.in_column) + row * columns(norm.in),
                              {norm.weight.data, norm.weight.type}, w.cols, norm.eps, false, normed);
                from = normed;
            }
            if (prepares) kernels_.prepare(w.type, from, w.cols, to + row * bytes);
        }
        return {to, bytes, rows};
    }
    char* to = activations_.data();
    if (!norms_for(place)) {  // else the norm has done it, too
        share(counter(place, 0), rows, [&](int64_t row) {
            kernels_.prepare(w.type, in + row * stride, w.cols, to + row * bytes);
        });
        team_.meet();
    }
    return {to, bytes, rows};
}

void Program::multiply(int64_t place, Member& own) {
    const hp_op& op = ops_[size_t(place)];
    const Matrix& w = op.weight;
    const int64_t rows = rows_of(op), half = w.rows / 2;
    const Rows x = prepared(place, op, rows, own);
    const int64_t outputs = op.kind == HP_GATED ? half : w.rows;
    const int64_t block = row_block(w.cols), blocks = (rows + block - 1) / block;
    const int64_t pieces = (outputs + CHUNK - 1) / CHUNK * blocks;
    const Vector bias = {op.bias, op.vector_type};
    const bool ranks = op.out < 0 && step_->best, kept = op.out >= 0 || step_->logits;
    float* out = kept ? at(op.out, op.out_column) : nullptr;
    share(counter(place, 1), pieces, [&](int64_t i) {
        const int64_t row = i % blocks * block, count = std::min(block, rows - row);
        const int64_t from = i / blocks * CHUNK, to = std::min(outputs, from + CHUNK);
        const Rows mine = {(const char*)x.data + row * x.stride, x.stride, count};
        const int64_t stride = kept ? columns(op.out) : CHUNK;
        float* y = kept ? out + row * stride + from : own.tile.data();
        if (op.kind == HP_GATED)
            kernels_.gated(mine, w, from, half + from, to - from, bias, op.activation, y, stride,
                           own.scratch.data());
        else
            kernels_.linear(mine, w, from, to, bias, op.cap, op.kind == HP_ADD, y, stride,
                            own.scratch.data());
        if (ranks)
            for (int64_t m = 0; m < count; m++)
                kernels_.rank(y + m * stride, to - from, from, own.best[size_t(row + m)]);
    });
}

Attention Program::attention(const hp_op& op, const Piece& piece, int64_t kv_head) {
    const int64_t group = shape_.heads / shape_.kv_heads, column = kv_head * group * shape_.head;
    const int64_t in_stride = columns(op.in), out_stride = columns(op.out);
    return {at(op.in, op.in_column) + piece.token * in_stride + column,
            in_stride,
            at(op.out, op.out_column) + piece.token * out_stride + column,
            out_stride,
            op.keys,
            op.values,
            shape_.cache_type,
            step_->table + piece.request * step_->table_columns,
            shape_.block_size,
            shape_.kv_heads,
            kv_head,
            group,
            shape_.head,
            step_->positions[piece.token],
            piece.count,
            op.window,
            op.scale,
            op.cap};
}

void Program::attend(int64_t place, Member& own) {
    const hp_op& op = ops_[size_t(place)];
    const int64_t heads = shape_.kv_heads, count = int64_t(pieces_.size()) * heads;
    float* scratch = own.scratch.data();
    if (!by_spans_) {
        const bool turns = place > first_ && is_left_out(place - 1);
        share(counter(place, 0), count, [&](int64_t i) {
            const Piece& piece = pieces_[size_t(i / heads)];
            if (turns) {
                const hp_op& rotary = ops_[size_t(place - 1)];
                float* x = at(rotary.in, rotary.in_column) + piece.token * columns(rotary.in);
                rotate(rotary, piece.token, i % heads, 1, x);
            }
            kernels_.attend(attention(op, piece, i % heads), scratch);
        });
        return;
    }
    const int64_t group = shape_.heads / heads, room = QUERY_TILE * group * (shape_.head + 2);
    const auto parts_of = [&](int64_t piece, int64_t head) {
        const int64_t spans = first_part_[size_t(piece + 1)] - first_part_[size_t(piece)];
        return parts_.data() + (first_part_[size_t(piece)] * heads + head * spans) * room;
    };
    share(counter(place, 0), first_part_.back() * heads, [&](int64_t i) {
        const int64_t part = i / heads, head = i % heads;
        const auto above = std::upper_bound(first_part_.begin(), first_part_.end(), part);
        const int64_t piece = above - first_part_.begin() - 1;
        const Attention work = attention(op, pieces_[size_t(piece)], head);
        const Spans spans = spans_of(work.position, work.tokens, work.window);
        const int64_t span = part - first_part_[size_t(piece)];
        const int64_t size = work.tokens * group * (shape_.head + 2);
        if (span >= spans.first)
            kernels_.attend_part(work, span, parts_of(piece, head) + (span - spans.first) * size,
                                 scratch);
    });
    team_.meet();
    share(counter(place, 1), count, [&](int64_t i) {
        const Attention work = attention(op, pieces_[size_t(i / heads)], i % heads);
        const Spans spans = spans_of(work.position, work.tokens, work.window);
        kernels_.join(work, spans.last - spans.first, parts_of(i / heads, i % heads));
    });
}

void Program::single(int64_t place, const hp_op& op, int64_t row, Member& own) {
    const hp_step& step = *step_;
    const float* from = op.kind == HP_EMBED ? nullptr : at(op.in, op.in_column) + row * columns(op.in);
    float* to = op.out < 0 ? nullptr : at(op.out, op.out_column) + row * columns(op.out);
    const Vector weight = {op.weight.data, op.weight.type};
    switch (op.kind) {
    case HP_EMBED: return kernels_.embed(op.weight, step.token_ids[row], op.scale, to);
    case HP_NORM: {
        const bool sole = place + 1 < last_ && sole_norm_[size_t(place)];
        const Matrix w = sole ? ops_[size_t(place + 1)].weight : op.weight;
        const bool prepares = sole && activation_group(w.type) > 0;
        // What nobody else reads is written where only this core writes.
        float* normed = prepares ? own.rows.data() : to;
        kernels_.norm(from, weight, op.weight.cols, op.eps, false, normed);
        if (prepares)
            kernels_.prepare(w.type, normed, w.cols,
                              activations_.data() + row * activation_bytes(w.type, w.cols));
        return;
    }
    case HP_ADD_NORM: return kernels_.norm(from, weight, op.weight.cols, op.eps, true, to);
    case HP_LAYER_NORM:
        return kernels_.layer_norm(from, weight, {op.bias, op.vector_type}, op.weight.cols, op.eps,
                                   to);
    case HP_GATHER: {
        const int64_t width = columns(op.in);
        memcpy(to, at(op.in, 0) + step.picked[row] * width, size_t(width) * 4);
        return;
    }
    case HP_ROTATE: return rotate(op, row, 0, shape_.kv_heads, const_cast<float*>(from));
    case HP_ACTIVATE: return kernels_.activate(from, from + op.columns, op.columns, op.activation, to);
    case HP_ROUTE: return kernels_.route(from, op.columns, op.per_token, op.normalised != 0, to);
    case HP_SIGMOID_ADD: {
        const float gate = *(at(op.second, 0) + row * columns(op.second));
        return kernels_.add_scaled(from, op.columns, kernels_.open(gate), to);
    }
    }
}

// Turn the queries and keys of some key heads of a token, whose row is x, and keep its keys and
// values.
void Program::rotate(const hp_op& op, int64_t token, int64_t kv_head, int64_t kv_heads, float* x) {
    const int64_t head = shape_.head, group = shape_.heads / shape_.kv_heads;
    float* queries = x + kv_head * group * head;
    float* keys = x + (shape_.heads + kv_head) * head;
    const float* values = keys + shape_.kv_heads * head;
    if (op.query_norm) {
        for (int64_t h = 0; h < kv_heads * group; h++)
            kernels_.norm(queries + h * head, {op.query_norm, op.vector_type}, head, op.eps, false,
                          queries + h * head);
        for (int64_t h = 0; h < kv_heads; h++)
            kernels_.norm(keys + h * head, {op.key_norm, op.vector_type}, head, op.eps, false,
                          keys + h * head);
    }
    const int64_t turned = op.turned ? op.turned : head;
    const int64_t angles = step_->positions[token] * (turned / 2);
    kernels_.rotate(queries, kv_heads * group, head, turned, op.cos + angles, op.sin + angles);
    kernels_.rotate(keys, kv_heads, head, turned, op.cos + angles, op.sin + angles);
    const int64_t bytes = cached_bytes(shape_.cache_type, head);
    const int64_t slot = (step_->slots[token] * shape_.kv_heads + kv_head) * bytes;
    kernels_.store(keys, kv_heads, head, (char*)op.keys + slot, shape_.cache_type);
    kernels_.store(values, kv_heads, head, (char*)op.values + slot, shape_.cache_type);
}

}  // namespace hardpoint
