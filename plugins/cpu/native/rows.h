// Products with rows of numbers as torch has them: lane by lane along both.
#pragma once

#include "tiles.h"
#include "vectors.h"

namespace {

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

// The sum of each of COUNT registers, which take few shuffles when there are many.
template <int COUNT>
inline void sum_up(const Vec* from, float* to) {
    int i = 0;
#if LANES == 16
#pragma GCC unroll 4
    for (; i + 8 <= COUNT; i += 8) {
        const Vec pairs = pairs_of_eight({from[i], from[i + 1], from[i + 2], from[i + 3], from[i + 4],
                                          from[i + 5], from[i + 6], from[i + 7]});
        const Vec eight = halved<2>(pairs, pairs);
        memcpy(to + i, &eight, 32);
    }
#endif
#pragma GCC unroll 8
    for (; i + 4 <= COUNT; i += 4) {
        const Four four = sums(from[i], from[i + 1], from[i + 2], from[i + 3]);
        memcpy(to + i, &four, sizeof four);
    }
#pragma GCC unroll 4
    for (; i < COUNT; i++) to[i] = sum(from[i]);
}

// out[i][j] = x[i] . w[j]: lane by lane along both, then the lanes; the same for every M and N.
// `ahead`: so many bytes behind w, which lies there in its order, as much is asked for; 0: nothing.
template <int M, int N, class T>
__attribute__((noinline)) void products(const float* const* x, const T* const* w, int64_t count,
                                        int64_t ahead, float (&out)[M][N]) {
    constexpr int STEP = LANES * Columns<T>::PARTS;
    constexpr size_t BYTES = N * STEP * sizeof(T);
    Vec total[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) total[i][j] = Vec{};
    int64_t k = 0;
    const char* next = (const char*)w[0] + ahead;
    for (; k + STEP <= count; k += STEP) {
        if (ahead) {
#pragma GCC unroll 8
            for (size_t line = 0; line < BYTES; line += 64) __builtin_prefetch(next + line);
            next += BYTES;
        }
#pragma GCC unroll 2
        for (int part = 0; part < Columns<T>::PARTS; part++) {
            Vec left[M];
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) left[i] = in_register(load(x[i] + k + part * LANES));
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) {
                Vec right = in_register(Columns<T>::number(w[j] + k, part));
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) total[i][j] += left[i] * right;
            }
        }
    }
    if (k < count) {  // the last of a row
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
    sum_up<M * N>(total[0], out[0]);
}

#if defined(__AVX512F__)
// The same of rows of x that are bfloat16, up to the next 32 columns: two columns of a lane at once.
template <int M, int N>
__attribute__((noinline, target("avx512bf16"))) void products(const uint16_t* const* x,
                                                              const Paired* const* w, int64_t count,
                                                              int64_t ahead, float (&out)[M][N]) {
    constexpr int STEP = 2 * LANES;
    Vec total[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) total[i][j] = Vec{};
    const char* next = (const char*)w[0] + ahead;
    for (int64_t k = 0; k < count; k += STEP) {
        if (ahead) {
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) __builtin_prefetch(next + 64 * j);
            next += 64 * N;
        }
        const __mmask32 there = uint32_t(-1) >> (STEP - least(STEP, count - k));
        Vec left[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) left[i] = in_register((Vec)_mm512_loadu_si512(x[i] + k));
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            const Vec right = in_register((Vec)_mm512_maskz_loadu_epi16(there, w[j] + k));
#pragma GCC unroll 8
            for (int i = 0; i < M; i++)
                total[i][j] = _mm512_dpbf16_ps(total[i][j], (__m512bh)left[i], (__m512bh)right);
        }
    }
    sum_up<M * N>(total[0], out[0]);
}
#endif

// Multiply M rows of x with rows of w, `at(n)` for n in [first, last), N at once; `emit(n, M x K
// products)`.
template <int M, int N, class X, class At, class Emit>
inline void rows_by(const X* x, int64_t stride, int64_t count, int64_t first, int64_t last,
                    int64_t ahead, At at, Emit emit) {
    const X* left[M];
    for (int i = 0; i < M; i++) left[i] = x + i * stride;
    const auto some = [&](auto wide, int64_t n) {
        constexpr int K = decltype(wide)::value;
        decltype(at(n)) right[K];
        for (int j = 0; j < K; j++) right[j] = at(n + j);
        float out[M][K];
        products<M, K>(left, right, count, ahead, out);
        emit(n, out);
    };
    int64_t n = first;
    for (; n + N <= last; n += N) some(Number<N>{}, n);
    for (; n < last; n++) some(Number<1>{}, n);
}

// Multiply rows of x with rows of w, `at(n)` for n in [first, last): few rows of x, which stay in the
// nearest cache, with all of w. `emit(row, n, products)`. STREAMS: w is read from memory.
template <bool STREAMS, class X, class At, class Emit>
void multiply(const X* x, int64_t stride, int64_t rows, int64_t count, int64_t first,
              int64_t last, At at, Emit emit) {
    const auto some = [&](auto tall, auto wide, int64_t row) {
        constexpr int M = decltype(tall)::value, N = decltype(wide)::value;
        const auto own = [&](int64_t n, const auto& out) { emit(row, n, out); };
        // The first pass waits for w; in the last one it is near, and what comes next may come.
        int64_t ahead = 0;
        if (STREAMS && row == 0)
            ahead = AHEAD;
        else if (STREAMS && row + M == rows)
            ahead = (const char*)at(last) - (const char*)at(first);
        rows_by<M, N>(x + row * stride, stride, count, first, last, ahead, at, own);
    };
    int64_t row = 0;
    if (LANES == 16)
        for (; rows - row >= 6; row += 6) some(Number<6>{}, Number<4>{}, row);
    for (; rows - row >= 5 || rows - row == 3; row += 3) some(Number<3>{}, Number<4>{}, row);
    for (; rows - row >= 4; row += 4) some(Number<4>{}, Number<2>{}, row);
    if (rows - row == 2) some(Number<2>{}, Number<4>{}, row);
    if (rows - row == 1) some(Number<1>{}, Number<4>{}, row);
}

// A row of x for Paired ones: the even columns of each 2 * LANES first, then the odd ones, and zeros
// behind the last. NARROW: each rounded to bfloat16.
template <bool NARROW>
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
        if (NARROW)
            for (int64_t i = 0; i < 2 * LANES; i += LANES) save(out + i, (Vec)rounded(load(out + i)));
    }
}

inline void narrow_row(const float* x, int64_t columns, uint16_t* out) {  // and zeros up to 32
    const int64_t end = (columns + 31) / 32 * 32;
    for (int64_t k = 0; k < end; k += LANES) {
        const int64_t some = most(0, least(LANES, columns - k));
        save_part(out + k, some > 0 ? load_part(x + k, some) : Vec{}, LANES);
    }
}

}  // namespace
