// Products with rows of numbers as torch has them: lane by lane along both.
#pragma once

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int WIDE = 4;  // rows of a weight that are multiplied at once
constexpr int TALL = 3;  // rows of activations that are multiplied at once
constexpr int64_t AHEAD = 8192;  // bytes that are asked for before they are wanted

// How columns of a row come into registers: PARTS registers of LANES columns each, from `at` on.
template <class T>
struct Columns {
    static constexpr int PARTS = 1;
    static inline Vec number(const T* at, int) { return load(at); }
};

struct Paired {  // bfloat16, each beside the next in a lane; x has even columns first, then odd ones
    uint16_t bits;
};
template <>
struct Columns<Paired> {
    static constexpr int PARTS = 2;
    static inline Vec number(const Paired* at, int part) {
        Words both;
        memcpy(&both, at, sizeof both);
        return (Vec)(part ? both & 0xffff0000u : both << 16);
    }
};

// out[i][j] = x[i] . w[j]: lane by lane along both, then the lanes; the same for every M and N.
// STREAMS: w is read from memory, in its order, and what comes next is asked for ahead.
template <int M, int N, class T, bool STREAMS = false>
__attribute__((noinline)) void products(const float* const* x, const T* const* w, int64_t count,
                                        float (&out)[M][N]) {
    constexpr int STEP = LANES * Columns<T>::PARTS;
    constexpr size_t BYTES = N * STEP * sizeof(T);
    Vec total[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) total[i][j] = Vec{};
    int64_t k = 0;
    const char* next = (const char*)w[0] + AHEAD;
    for (; k + STEP <= count; k += STEP) {
        if (STREAMS) {
#pragma GCC unroll 8
            for (size_t line = 0; line < BYTES; line += 64) __builtin_prefetch(next + line);
            next += BYTES;
        }
#pragma GCC unroll 2
        for (int part = 0; part < Columns<T>::PARTS; part++) {
            Vec left[M];
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) left[i] = load(x[i] + k + part * LANES);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) {
                Vec right = Columns<T>::number(w[j] + k, part);
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) total[i][j] += left[i] * right;
            }
        }
    }
    if (k < count) {
        T rest[N][STEP] = {};
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) memcpy(rest[j], w[j] + k, size_t(count - k) * sizeof(T));
#pragma GCC unroll 2
        for (int part = 0; part < Columns<T>::PARTS; part++)
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) {
                const Vec left = Columns<T>::PARTS > 1 ? load(x[i] + k + part * LANES)
                                                       : load_part(x[i] + k, count - k);
#pragma GCC unroll 8
                for (int j = 0; j < N; j++) total[i][j] += left * Columns<T>::number(rest[j], part);
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
template <int N, bool STREAMS = false, class T, class Emit>
inline void products_of(const float* x, int64_t stride, int64_t rows, const T* const* w,
                        int64_t count, Emit emit) {
    auto some = [&](auto tall, int64_t row) {
        constexpr int M = decltype(tall)::value;
        const float* at[M];
        for (int i = 0; i < M; i++) at[i] = x + (row + i) * stride;
        float out[M][N];
        products<M, N, T, M == 1 && STREAMS>(at, w, count, out);
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
        products_of<N, true>(x, stride, rows, at, columns,
                             [&](int64_t m, int j, float value) { emit(m, n + j, value); });
    };
    int64_t n = first;
    for (; n + WIDE <= last; n += WIDE) some(Number<WIDE>{}, n);
    for (; n < last; n++) some(Number<1>{}, n);
}

// A row of x for Paired ones: the even columns of each 2 * LANES first, then the odd ones, and zeros
// behind the last.
inline void pair_row(const float* x, int64_t columns, float* out) {
    float rest[2 * LANES] = {};
    for (int64_t k = 0; k < columns; k += 2 * LANES, out += 2 * LANES) {
        const float* from = x + k;
        if (columns - k < 2 * LANES) {
            memcpy(rest, from, size_t(columns - k) * 4);
            from = rest;
        }
        for (int64_t i = 0; i < LANES; i++) {
            out[i] = from[2 * i];
            out[LANES + i] = from[2 * i + 1];
        }
    }
}

}  // namespace
