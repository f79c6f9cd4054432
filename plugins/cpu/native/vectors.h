// Vectors as wide as the level's registers, in the compilers' own notation. Included by one file
// that is compiled once for each level: everything here is local to it, since a function that two
// levels share would be linked once, with the instructions of either.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX512F__)
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
typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t Mask4 __attribute__((vector_size(16)));

inline Vec load(const float* from) {
    Vec out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline Vec load(const uint16_t* from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    Words words = __builtin_convertvector(halves, Words) << 16;
    return (Vec)words;
}
template <class T>
inline Vec load_part(const T* from, int64_t count) {  // the rest is zero
    T padded[LANES] = {};
    memcpy(padded, from, size_t(count) * sizeof(T));
    return load(padded);
}
inline void save(float* to, Vec x) { memcpy(to, &x, sizeof x); }
inline Vec all(float x) { return x - Vec{}; }

inline Four fold(Vec x) {  // the halves of a register added up until four lanes are left
#if LANES == 16
    Eight low, high;
    memcpy(&low, &x, 32);
    memcpy(&high, (const char*)&x + 32, 32);
    Eight half = low + high;
#elif LANES == 8
    Eight half = x;
#endif
#if LANES > 4
    Four first, second;
    memcpy(&first, &half, 16);
    memcpy(&second, (const char*)&half + 16, 16);
    return first + second;
#else
    return x;
#endif
}
inline float sum(Vec x) {
    Four y = fold(x);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
inline Four sums(Vec a, Vec b, Vec c, Vec d) {  // of each, in the very order of `sum`
    Four w = fold(a), x = fold(b), y = fold(c), z = fold(d);
    Four s = __builtin_shuffle(w, x, Mask4{0, 4, 1, 5}) + __builtin_shuffle(w, x, Mask4{2, 6, 3, 7});
    Four t = __builtin_shuffle(y, z, Mask4{0, 4, 1, 5}) + __builtin_shuffle(y, z, Mask4{2, 6, 3, 7});
    return __builtin_shuffle(s, t, Mask4{0, 1, 4, 5}) + __builtin_shuffle(s, t, Mask4{2, 3, 6, 7});
}

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

}  // namespace
