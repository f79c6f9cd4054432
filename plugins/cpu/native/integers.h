// Sums of products of int8, four columns of a row in each lane: what the levels differ in.
//
// AVX2 multiplies unsigned with signed bytes and adds neighbours up to 16 bits, where a sum of few
// products of small numbers may stay for a while. AVX512-VNNI adds all four up to 32 bits
// at once, and has no way to change a sign: there the weights are made unsigned by adding 128, and
// 128 times the activations is where sums begin. The portable level is that of VNNI in plain words.
#pragma once

#include "vectors.h"

namespace {

constexpr int PARTS = 16 / LANES;  // vectors that a panel's rows take
constexpr int STEP_BYTES = LANES * 4;

inline Ints load_ints(const void* from) {
    Ints out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline Ints four(const int8_t* from) {  // the same four bytes in every lane
    int32_t bits;
    memcpy(&bits, from, 4);
    return bits - Ints{};
}
inline Vec as_floats(Ints x) { return __builtin_convertvector(x, Vec); }
inline Ints load_unsigned(const uint8_t* from) {  // LANES numbers; converted in the compilers' own
#if defined(__AVX512F__)                          // notation they would come one by one
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef uint8_t Few __attribute__((vector_size(LANES)));
    Few few;
    memcpy(&few, from, sizeof few);
    return __builtin_convertvector(few, Ints);
#endif
}
inline Ints load_signed(const uint8_t* from) { return load_unsigned(from) << 24 >> 24; }
inline Vec load_bytes(const uint8_t* from) { return as_floats(load_unsigned(from)); }
inline Vec load_bfloats(const uint8_t* from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return (Vec)(__builtin_convertvector(halves, Words) << 16);
}
inline Vec load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Vec out;
    for (int i = 0; i < LANES; i++) out[i] = half_at(from + i * 2);
    return out;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)

typedef Ints Partial;  // sums of pairs, of 16 bits
constexpr bool UNSIGNED = false;  // whether weights of 8 bits are multiplied with 128 too much

// Sums of unsigned weights: at most eight of numbers to 15, or two of numbers to 63.
inline Partial add_unsigned(Partial sum, Ints weights, Ints x) {
    return (Partial)_mm256_add_epi16((__m256i)sum,
                                     _mm256_maddubs_epi16((__m256i)weights, (__m256i)x));
}
inline Ints whole(Partial sum) {
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}

// Sums of signed weights: their sizes times activations that take their signs.
template <int M, int COLUMNS>
inline void add_bytes(const uint8_t* from, const int8_t* const (&x)[M], Ints (&sum)[M][PARTS]) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 1
    for (int k = 0; k < COLUMNS; k += 4) {
        __m256i w[PARTS], sizes[PARTS];
#pragma GCC unroll 2
        for (int v = 0; v < PARTS; v++) {
            w[v] = (__m256i)load_ints(from + k * 16 + v * STEP_BYTES);
            sizes[v] = _mm256_abs_epi8(w[v]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            const __m256i number = (__m256i)four(x[i] + k);
#pragma GCC unroll 2
            for (int v = 0; v < PARTS; v++) {
                const __m256i pairs = _mm256_maddubs_epi16(sizes[v], _mm256_sign_epi8(number, w[v]));
                sum[i][v] += (Ints)_mm256_madd_epi16(pairs, ones);
            }
        }
    }
}

#else

typedef Ints Partial;
constexpr bool UNSIGNED = true;

inline Ints add_products(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#else
    for (int shift = 0; shift < 32; shift += 8) {
        const Ints a = (Ints)((Words)unsigned_bytes >> shift & 255u);
        const Ints b = (Ints)((Words)signed_bytes << (24 - shift)) >> 24;
        sum += a * b;
    }
    return sum;
#endif
}
inline Partial add_unsigned(Partial sum, Ints weights, Ints x) {
    return add_products(sum, weights, x);
}
inline Ints whole(Partial sum) { return sum; }

template <int M, int COLUMNS>
inline void add_bytes(const uint8_t* from, const int8_t* const (&x)[M], Ints (&sum)[M][PARTS]) {
#pragma GCC unroll 4
    for (int k = 0; k < COLUMNS; k += 4) {
        Ints w[PARTS];
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++)
            w[v] = (Ints)((Words)load_ints(from + k * 16 + v * STEP_BYTES) ^ 0x80808080u);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            const Ints number = four(x[i] + k);
#pragma GCC unroll 4
            for (int v = 0; v < PARTS; v++) sum[i][v] = add_products(sum[i][v], w[v], number);
        }
    }
}

#endif

}  // namespace
