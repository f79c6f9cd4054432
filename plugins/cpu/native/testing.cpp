// Each kernel of each level by itself, for the library's tests.

#include "kernels.h"

using namespace hardpoint;

#pragma GCC visibility push(default)
extern "C" {

// x: float32, or what hp_test_prepare made, `stride` bytes a row.
void hp_test_linear(int32_t level, const void* x, int64_t stride, int64_t rows, const Matrix* w,
                    const Vector* bias, float cap, int32_t add, float* out, float* scratch) {
    for (int64_t n = 0; n < w->rows; n += CHUNK)
        kernels(level)->linear({x, stride, rows}, *w, n, n + CHUNK < w->rows ? n + CHUNK : w->rows,
                               *bias, cap, add != 0, out + n, w->rows, scratch);
}

void hp_test_gated(int32_t level, const void* x, int64_t stride, int64_t rows, const Matrix* w,
                   const Vector* bias, int32_t activation, float* out, float* scratch) {
    const int64_t half = w->rows / 2;
    for (int64_t n = 0; n < half; n += CHUNK)
        kernels(level)->gated({x, stride, rows}, *w, n, half + n, n + CHUNK < half ? CHUNK : half - n,
                              *bias, activation, out + n, half, scratch);
}

int64_t hp_test_activation_bytes(int32_t type, int64_t cols) { return activation_bytes(type, cols); }

void hp_test_prepare(int32_t level, int32_t type, const float* x, int64_t cols, void* out) {
    kernels(level)->prepare(type, x, cols, out);
}

void hp_test_norm(int32_t level, const float* x, const Vector* weight, int64_t count, float eps,
                  int32_t add, float* out) {
    kernels(level)->norm(x, *weight, count, eps, add != 0, out);
}

void hp_test_layer_norm(int32_t level, const float* x, const Vector* weight, const Vector* bias,
                        int64_t count, float eps, float* out) {
    kernels(level)->layer_norm(x, *weight, *bias, count, eps, out);
}

void hp_test_embed(int32_t level, const Matrix* table, int64_t row, float scale, float* out) {
    kernels(level)->embed(*table, row, scale, out);
}

void hp_test_rotate(int32_t level, float* x, int64_t heads, int64_t head, int64_t turned,
                    const float* cos, const float* sin) {
    kernels(level)->rotate(x, heads, head, turned, cos, sin);
}

void hp_test_store(int32_t level, const float* x, int64_t heads, int64_t head, void* out,
                   int32_t type) {
    kernels(level)->store(x, heads, head, out, type);
}

void hp_test_attend(int32_t level, const Attention* work, float* scratch) {
    kernels(level)->attend(*work, scratch);
}

// The same, each span by itself.
void hp_test_attend_by_spans(int32_t level, const Attention* work, float* parts, float* scratch) {
    const Spans spans = spans_of(work->position, work->tokens, work->window);
    const int64_t size = work->tokens * work->group * (work->head + 2);
    for (int64_t span = spans.first; span < spans.last; span++)
        kernels(level)->attend_part(*work, span, parts + (span - spans.first) * size, scratch);
    kernels(level)->join(*work, spans.last - spans.first, parts);
}

void hp_test_activate(int32_t level, const float* x, int64_t count, int32_t activation, float* out) {
    kernels(level)->activate(x, x + count, count, activation, out);
}

void hp_test_route(int32_t level, const float* x, int64_t count, int64_t wanted, int32_t normalised,
                   float* out) {
    kernels(level)->route(x, count, wanted, normalised != 0, out);
}

void hp_test_rank(int32_t level, const float* x, int64_t count, int64_t place, Best* best) {
    kernels(level)->rank(x, count, place, *best);
}

int64_t hp_test_scratch(int64_t most_columns, int64_t group, int64_t head) {
    return scratch_size(most_columns, group, head);
}

}
#pragma GCC visibility pop
