// Numbers of 16 bits, and one row of a matrix as float32. Local to each file that includes it, as
// it is compiled for several levels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace {

inline float widen(float x) { return x; }
inline float widen(uint16_t x) {  // bfloat16
    uint32_t bits = uint32_t(x) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline uint16_t narrow(float x) {  // to nearest, ties to even; a NaN stays one
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_half(uint16_t x) {  // IEEE's binary16, exactly
    const uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
    uint32_t bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        bits = sign | (rest + 0x1c000) << 13;
    } else {
        const float small = float(rest) * (1.0f / 16777216.0f);
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline uint16_t to_half(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const float size = __builtin_fabsf(x);
    if (!(size < 65520.0f)) return uint16_t(sign | (x != x ? 0x7e00 : 0x7c00));
    if (size < 6.103515625e-5f) return uint16_t(sign | uint16_t(nearbyintf(size * 16777216.0f)));
    bits &= 0x7fffffff;
    bits += 0xfff + (bits >> 13 & 1);
    return uint16_t(sign | uint16_t((bits >> 13) - 0x1c000));
}

inline float half_at(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return from_half(bits);
}
inline float bfloat_at(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return widen(bits);
}

// 32 numbers of 4 bits of row `j` of a panel, in the order of their columns.
inline void nibbles_at(const uint8_t* from, int64_t j, uint8_t* out) {
    for (int64_t s = 0; s < 4; s++)
        for (int64_t c = 0; c < 4; c++) {
            const uint8_t both = from[s * 64 + j * 4 + c];
            out[s * 4 + c] = both & 15;
            out[16 + s * 4 + c] = both >> 4;
        }
}
// Where the two high bits of column `k` of 32 are: the byte of row 0, and the shift.
inline int64_t high_byte(int64_t k) { return (k / 4 & 1) * 64 + k % 4; }
inline int64_t high_shift(int64_t k) { return k / 8 * 2; }

// One block of row `j` of a panel.
inline void unpack_block(int32_t type, const uint8_t* block, int64_t j, float* out) {
    using namespace hardpoint;
    uint8_t q[32];
    switch (type) {
    case F32_PANELS:
        memcpy(out, block + j * 4, 4);
        return;
    case BF16_PANELS:
        for (int64_t k = 0; k < 2; k++) out[k] = bfloat_at(block + j * 4 + k * 2);
        return;
    case INT8:
    case W8A8:
    case Q8_0: {
        const float scale = type == Q8_0 ? half_at(block + j * 2) : bfloat_at(block + j * 2);
        const int64_t columns = block_of(type).columns;
        for (int64_t k = 0; k < columns; k++)
            out[k] = float(int8_t(block[HALVES + k / 4 * 64 + j * 4 + k % 4])) * scale;
        return;
    }
    case Q4_0: {
        const float scale = half_at(block + j * 2);
        nibbles_at(block + HALVES, j, q);
        for (int64_t k = 0; k < 32; k++) out[k] = float(q[k] - 8) * scale;
        return;
    }
    case W4A8:
    case Q4_1: {
        const float scale = half_at(block + j * 2), least = half_at(block + HALVES + j * 2);
        nibbles_at(block + 2 * HALVES, j, q);
        for (int64_t k = 0; k < 32; k++) out[k] = float(q[k]) * scale + least;
        return;
    }
    case Q4_K: {
        const float scales = half_at(block + j * 2), mins = half_at(block + HALVES + j * 2);
        for (int64_t g = 0; g < 8; g++) {
            const uint8_t* group = block + 2 * HALVES + g * Q4_K_GROUP;
            const float scale = scales * group[j], least = mins * group[PANEL + j];
            nibbles_at(group + 2 * PANEL, j, q);
            for (int64_t k = 0; k < 32; k++) out[g * 32 + k] = scale * q[k] - least;
        }
        return;
    }
    case Q6_K: {
        const float scales = half_at(block + j * 2);
        for (int64_t g = 0; g < 8; g++) {
            const uint8_t* group = block + HALVES + g * Q6_K_GROUP;
            const uint8_t* high = group + 2 * PANEL + NIBBLES;
            nibbles_at(group + 2 * PANEL, j, q);
            for (int64_t k = 0; k < 32; k++) {
                const int two = high[high_byte(k) + j * 4] >> high_shift(k) & 3;
                const float scale = scales * int8_t(group[k / 16 * PANEL + j]);
                out[g * 32 + k] = scale * float((q[k] | two << 4) - 32);
            }
        }
        return;
    }
    }
}

inline void unpack_row(int32_t type, const void* data, int64_t cols, int64_t row, float* out) {
    using namespace hardpoint;
    type = held_as(type);
    if (type == F32) {
        memcpy(out, (const float*)data + row * cols, size_t(cols) * 4);
    } else if (type == BF16 || type == F16) {
        const uint16_t* from = (const uint16_t*)data + row * cols;
        for (int64_t k = 0; k < cols; k++) out[k] = type == F16 ? from_half(from[k]) : widen(from[k]);
    } else {
        const Block shape = block_of(type);
        const uint8_t* block = (const uint8_t*)data + row / PANEL * panel_bytes(type, cols);
        for (int64_t k = 0; k < cols; k += shape.columns, block += shape.bytes) {
            if (k + shape.columns <= cols) {
                unpack_block(type, block, row % PANEL, out + k);
            } else {
                float rest[256];
                unpack_block(type, block, row % PANEL, rest);
                memcpy(out + k, rest, size_t(cols - k) * 4);
            }
        }
    }
}

}  // namespace
