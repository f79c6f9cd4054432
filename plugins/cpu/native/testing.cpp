// Each kernel of each level by itself, for the library's tests.

#include "kernels.h"

using namespace hardpoint;

#pragma GCC visibility push(default)
extern "C" {

void hp_test_linear(int32_t level, const float* x, int64_t rows, const Matrix* w, const Vector* bias,
                    int32_t add, float* out, float* scratch) {
    kernels(level)->linear(x, w->cols, rows, *w, 0, w->rows, *bias, add != 0, out, w->rows, scratch);
}

void hp_test_gated(int32_t level, const float* x, int64_t rows, const Matrix* w, const Vector* bias,
                   float* out, float* scratch) {
    const int64_t half = w->rows / 2;
    for (int64_t n = 0; n < half; n += CHUNK)
        kernels(level)->gated(x, w->cols, rows, *w, n, n + CHUNK < half ? n + CHUNK : half, *bias,
                              out,
                              half, scratch);
}

void hp_test_norm(int32_t level, const float* x, int64_t rows, const Matrix* weight, float eps,
                  float* out) {
    kernels(level)->norm(x, weight->cols, rows, *weight, eps, out, weight->cols);
}

void hp_test_rotate(int32_t level, float* x, int64_t heads, int64_t head, const float* cos,
                    const float* sin) {
    kernels(level)->rotate(x, heads, head, cos, sin);
}

void hp_test_store(int32_t level, const float* x, int64_t count, void* out, int32_t type) {
    kernels(level)->store(x, count, out, type);
}

void hp_test_attend(int32_t level, const Attention* work, float* scratch) {
    kernels(level)->attend(*work, scratch);
}

int64_t hp_test_best(int32_t level, const float* x, int64_t count) {
    return kernels(level)->best(x, count);
}

int64_t hp_test_scratch(int64_t most_columns, int64_t group, int64_t head) {
    return scratch_size(most_columns, group, head);
}

}
#pragma GCC visibility pop
