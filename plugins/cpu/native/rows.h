// Products with rows of numbers as torch has them: lane by lane along both.
#pragma once

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int WIDE = 4;  // rows of a weight that are multiplied at once
constexpr int TALL = 3;  // rows of activations that are multiplied at once

// out[i][j] = x[i] . w[j]: lane by lane along both, then the lanes; the same for every M and N.
template <int M, int N, class T>
__attribute__((noinline)) void products(const float* const* x, const T* const* w, int64_t count,
                                        float (&out)[M][N]) {
    Vec total[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) total[i][j] = Vec{};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        Vec left[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) left[i] = load(x[i] + k);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            Vec right = load(w[j] + k);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) total[i][j] += left[i] * right;
        }
    }
    if (k < count) {
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            Vec right = load_part(w[j] + k, count - k);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) total[i][j] += load_part(x[i] + k, count - k) * right;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
        int j = 0;
#pragma GCC unroll 8
        for (; j + 4 <= N; j += 4) {
            Four four = sums(total[i][j], total[i][j + 1], total[i][j + 2], total[i][j + 3]);
            memcpy(&out[i][j], &four, sizeof four);
        }
        for (; j < N; j++) out[i][j] = sum(total[i][j]);
    }
}

// Multiply `rows` rows of x with N rows of w; `emit(row, j, product)`.
template <int N, class T, class Emit>
inline void products_of(const float* x, int64_t stride, int64_t rows, const T* const* w,
                        int64_t count, Emit emit) {
    auto some = [&](auto tall, int64_t row) {
        constexpr int M = decltype(tall)::value;
        const float* at[M];
        for (int i = 0; i < M; i++) at[i] = x + (row + i) * stride;
        float out[M][N];
        products<M, N>(at, w, count, out);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) emit(row + i, j, out[i][j]);
    };
    int64_t row = 0;
    for (; rows - row >= 5 || rows - row == TALL; row += TALL) some(Number<TALL>{}, row);
    for (; rows - row >= 2; row += 2) some(Number<2>{}, row);
    for (; row < rows; row++) some(Number<1>{}, row);
}

template <class T, class Emit>
void multiply(const float* x, int64_t stride, int64_t rows, const T* w, int64_t columns,
              int64_t first, int64_t last, Emit emit) {
    auto some = [&](auto wide, int64_t n) {
        constexpr int N = decltype(wide)::value;
        const T* at[N];
        for (int j = 0; j < N; j++) at[j] = w + (n + j) * columns;
        products_of<N>(x, stride, rows, at, columns,
                       [&](int64_t m, int j, float value) { emit(m, n + j, value); });
    };
    int64_t n = first;
    if (rows == 1) {  // more sums at once, or each addition waits for the one before
        const float* const at[1] = {x};
        for (; n + 2 * WIDE <= last; n += 2 * WIDE) {
            const T* row[2 * WIDE];
            for (int j = 0; j < 2 * WIDE; j++) row[j] = w + (n + j) * columns;
            float out[1][2 * WIDE];
            products<1, 2 * WIDE>(at, row, columns, out);
            for (int j = 0; j < 2 * WIDE; j++) emit(0, n + j, out[0][j]);
        }
    }
    for (; n + WIDE <= last; n += WIDE) some(Number<WIDE>{}, n);
    for (; n < last; n++) some(Number<1>{}, n);
}

// The same, with rows of a narrow type widened once where many rows of x use them.
template <class Emit>
void multiply_any(const float* x, int64_t stride, int64_t rows, const hardpoint::Matrix& w,
                  int64_t first, int64_t last, float* scratch, Emit emit) {
    int64_t columns = w.cols;
    if (w.type == hardpoint::F32) {
        multiply(x, stride, rows, (const float*)w.data, columns, first, last, emit);
        return;
    }
    const uint16_t* narrow_rows = (const uint16_t*)w.data;
    if (rows <= 2 * TALL) {
        multiply(x, stride, rows, narrow_rows, columns, first, last, emit);
        return;
    }
    for (int64_t n = first; n < last; n += WIDE) {
        int64_t some = least(WIDE, last - n), count = some * columns, i = 0;
        const uint16_t* from = narrow_rows + n * columns;
        for (; i + LANES <= count; i += LANES) save(scratch + i, load(from + i));
        for (; i < count; i++) scratch[i] = widen(from[i]);
        multiply(x, stride, rows, (const float*)scratch, columns, 0, some,
                 [&](int64_t m, int64_t j, float value) { emit(m, n + j, value); });
    }
}

}  // namespace
