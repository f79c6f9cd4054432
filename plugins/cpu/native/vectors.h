// Vectors as wide as the level's registers, in the compilers' own notation. Included by one file
// that is compiled once for each level: everything here is local to it, since a function that two
// levels share would be linked once, with the instructions of either.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// MIRROR: the widest level's code, in words that every processor has. For tests of it elsewhere.
#if defined(__AVX512F__) || (defined(MIRROR) && !defined(__AVX2__))
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

inline Vec load(const float* from) {
    Vec out;
    memcpy(&out, from, sizeof out);
    return out;
}
// Conversions in the compilers' own notation come half by half.
inline Vec load(const uint16_t* from) {  // bfloat16
#if defined(__AVX512F__)
    const Words words = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    const Words words = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words);
#endif
    return (Vec)(words << 16);
}
inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
    const Ints ints = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    const Ints ints = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    const Ints ints = __builtin_convertvector(bytes, Ints);
#endif
    return __builtin_convertvector(ints, Vec);
}
template <class T>
inline Vec load_part(const T* from, int64_t count) {  // the rest is zero
    if (__builtin_expect(count == LANES, 1)) return load(from);
    T padded[LANES] = {};
    memcpy(padded, from, size_t(count) * sizeof(T));
    return load(padded);
}
inline void save(float* to, Vec x) { memcpy(to, &x, sizeof x); }
inline void save_part(float* to, Vec x, int64_t count) {
    if (__builtin_expect(count == LANES, 1))
        save(to, x);
    else
        memcpy(to, &x, size_t(count) * 4);
}
// x, loaded once: compilers would fold the load into each use, of which a core does fewer at once.
inline Vec in_register(Vec x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#endif
    return x;
}
// The nearest bfloat16, ties to even, as the upper half of each lane; a NaN stays one.
inline Words rounded(Vec x) {
    const Words bits = (Words)x, even = bits >> 16 & 1u;
    return (x != x ? bits | 0x400000u : bits + 0x7fffu + even) & 0xffff0000u;
}
inline void save_part(uint16_t* to, Vec x, int64_t count) {  // as bfloat16
    const Words halves = rounded(x) >> 16;
#if defined(__AVX512F__)
    const Halves out = (Halves)_mm512_cvtepi32_epi16((__m512i)halves);
#else
    const Halves out = __builtin_convertvector(halves, Halves);
#endif
    if (__builtin_expect(count == LANES, 1))
        memcpy(to, &out, sizeof out);
    else
        memcpy(to, &out, size_t(count) * 2);
}
inline Vec all(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b, where one is NaN
inline Vec size_of(Vec x) { return (Vec)((Words)x & 0x7fffffffu); }

// The halves of a register joined until four lanes are left. As shuffles: what is taken out of a
// register by way of memory keeps the compilers from leaving sums in registers.
template <class Join>
inline Four folded(Vec x, Join join) {
#if LANES == 16
    const Eight half = join(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                            __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#elif LANES == 8
    const Eight half = x;
#endif
#if LANES > 4
    return join(__builtin_shufflevector(half, half, 0, 1, 2, 3),
                __builtin_shufflevector(half, half, 4, 5, 6, 7));
#else
    return x;
#endif
}
inline Four fold(Vec x) {
    return folded(x, [](auto a, auto b) { return a + b; });
}
inline float highest(Vec x) {  // any of them, where one is NaN
    const auto higher = [](auto a, auto b) { return a > b ? a : b; };
    const Four y = folded(x, higher);
    return higher(higher(y[0], y[2]), higher(y[1], y[3]));
}
inline bool any(Ints x) {
    int64_t both[LANES / 2], found = 0;
    memcpy(both, &x, sizeof x);
    for (int64_t each : both) found |= each;
    return found != 0;
}
inline float sum(Vec x) {
    Four y = fold(x);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
inline Four sums(Vec a, Vec b, Vec c, Vec d) {  // of each, in the very order of `sum`
    Four w = fold(a), x = fold(b), y = fold(c), z = fold(d);
    Four s = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
    Four t = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
    return __builtin_shufflevector(s, t, 0, 1, 4, 5) + __builtin_shufflevector(s, t, 2, 3, 6, 7);
}

#if LANES == 16
// Of the first W lanes of each number's run, the halves added up: runs of x, then those of y, half as
// long. In the order of `fold` and `sum`.
template <int W>
inline Vec halved(Vec x, Vec y) {
    Vec low, high;
    if constexpr (W == 16) {
        low = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        high = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    } else if constexpr (W == 8) {
        low = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        high = __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    } else if constexpr (W == 4) {
        low = __builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
        high = __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    } else {
        low = __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        high = __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    }
    return low + high;
}
inline Vec pairs_of_eight(const Vec (&x)[8]) {
    const Vec first = halved<8>(halved<16>(x[0], x[1]), halved<16>(x[2], x[3]));
    const Vec second = halved<8>(halved<16>(x[4], x[5]), halved<16>(x[6], x[7]));
    return halved<4>(first, second);
}
#endif

// e ** x to about two units in the last place (Cephes, expf); 0 below -87, a NaN stays one.
inline Vec exponential(Vec x) {
    const Vec least = all(-87.0f), most = all(88.0f), shift = all(12582912.0f);
    Vec clamped = x < least ? least : x;
    clamped = clamped > most ? most : clamped;
    Vec shifted = clamped * 1.44269504f + shift;  // its last bits are the rounded power of two
    Vec power = shifted - shift;
    Vec r = clamped - power * 0.693359375f;
    r = r + power * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Words scale = ((Words)shifted - (Words)shift + 127u) << 23;
    p = p * (Vec)scale;
    return x < least ? Vec{} : p;
}

inline float exponential(float x) { return exponential(all(x))[0]; }

inline Vec tangent(Vec x) {  // hyperbolic
    const Vec square = x * x;
    Vec p = square * -0.05396825f + 0.13333333f;
    p = p * square - 0.33333333f;
    const Vec near = p * square * x + x;
    const Vec far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return size_of(x) < 0.2f ? near : far;
}

}  // namespace
