// Weights into panels: GGUF's blocks as they are, anything else by rounding it.

#include <algorithm>
#include <memory>
#include <new>

#include "formats.h"
#include "numbers.h"

namespace hardpoint {
namespace {

struct Source {  // bytes of a block of GGUF's, and its columns
    int64_t columns, bytes;
};

Source source_of(int32_t type) {
    switch (type) {
    case F32: return {1, 4};
    case BF16:
    case F16: return {1, 2};
    case Q8_0: return {32, 34};
    case Q4_0: return {32, 18};
    case Q4_1: return {32, 20};
    case Q4_K: return {256, 144};
    case Q6_K: return {256, 210};
    default: return {0, 0};
    }
}

void put_nibbles(uint8_t* to, int64_t j, const uint8_t* q) {
    for (int64_t s = 0; s < 4; s++)
        for (int64_t c = 0; c < 4; c++)
            to[s * 64 + j * 4 + c] = uint8_t(q[s * 4 + c] | q[16 + s * 4 + c] << 4);
}

void put_half(uint8_t* to, int64_t j, uint16_t bits) { memcpy(to + j * 2, &bits, 2); }

// The 32 numbers of 4 bits that GGUF keeps in 16 bytes.
void split(const uint8_t* from, uint8_t* q) {
    for (int64_t k = 0; k < 16; k++) {
        q[k] = from[k] & 15;
        q[16 + k] = from[k] >> 4;
    }
}

// The eight 6-bit scales and mins of Q4_K.
void scales_of(const uint8_t* from, uint8_t* scales, uint8_t* mins) {
    for (int64_t g = 0; g < 4; g++) {
        scales[g] = from[g] & 63;
        mins[g] = from[g + 4] & 63;
        scales[g + 4] = uint8_t((from[g + 8] & 15) | from[g] >> 6 << 4);
        mins[g + 4] = uint8_t(from[g + 8] >> 4 | from[g + 4] >> 6 << 4);
    }
}

// The 256 numbers of 6 bits of Q6_K, in the order of their columns.
void six_bits_of(const uint8_t* from, uint8_t* q) {
    for (int64_t half = 0; half < 2; half++) {
        const uint8_t* low = from + half * 64;
        const uint8_t* high = from + 128 + half * 32;
        for (int64_t l = 0; l < 128; l++) {
            const uint8_t four = l < 64 ? low[l % 64] & 15 : low[l % 64] >> 4;
            q[half * 128 + l] = uint8_t(four | (high[l % 32] >> l / 32 * 2 & 3) << 4);
        }
    }
}

// One block of a row, in GGUF's own bytes, into row `j` of a panel's block.
void pack_own(int32_t type, const uint8_t* from, int64_t j, uint8_t* to) {
    uint8_t q[256];
    switch (type) {
    case Q8_0:
        memcpy(to + j * 2, from, 2);
        for (int64_t k = 0; k < 32; k += 4) memcpy(to + HALVES + k * 16 + j * 4, from + 2 + k, 4);
        return;
    case Q4_0:
    case Q4_1: {
        const int64_t halves = type == Q4_1 ? 2 : 1;
        for (int64_t i = 0; i < halves; i++) memcpy(to + i * HALVES + j * 2, from + i * 2, 2);
        split(from + halves * 2, q);
        put_nibbles(to + halves * HALVES, j, q);
        return;
    }
    case Q4_K: {
        uint8_t scales[8], mins[8];
        for (int64_t i = 0; i < 2; i++) memcpy(to + i * HALVES + j * 2, from + i * 2, 2);
        scales_of(from + 4, scales, mins);
        for (int64_t g = 0; g < 8; g++) {
            uint8_t* group = to + 2 * HALVES + g * Q4_K_GROUP;
            group[j] = scales[g];
            group[PANEL + j] = mins[g];
            const uint8_t* both = from + 16 + g / 2 * 32;
            for (int64_t k = 0; k < 32; k++) q[k] = g % 2 ? both[k] >> 4 : both[k] & 15;
            put_nibbles(group + 2 * PANEL, j, q);
        }
        return;
    }
    case Q6_K:
        memcpy(to + j * 2, from + 208, 2);
        six_bits_of(from, q);
        for (int64_t g = 0; g < 8; g++) {
            uint8_t* group = to + HALVES + g * Q6_K_GROUP;
            uint8_t* high = group + 2 * PANEL + NIBBLES;
            uint8_t low[32];
            for (int64_t i = 0; i < 2; i++) group[i * PANEL + j] = from[192 + g * 2 + i];
            for (int64_t k = 0; k < 32; k++) {
                low[k] = q[g * 32 + k] & 15;
                uint8_t& byte = high[high_byte(k) + j * 4];
                const int64_t shift = high_shift(k);
                byte = uint8_t((byte & ~(3 << shift)) | q[g * 32 + k] >> 4 << shift);
            }
            put_nibbles(group + 2 * PANEL, j, low);
        }
        return;
    }
}

float as_scale(float x) {  // the next bfloat16 that is not less
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x || !(x < __builtin_inff())) return x;
    bits = (bits + 0xffff) & 0xffff0000u;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// Loops below are over all numbers of a group, in words that compilers make vectors of.
constexpr float SHIFT = 12582912.0f;  // adding it rounds to the nearest, ties to even

inline float between(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

// The size of the greatest of x; NaN, if one of them is not finite.
template <int COUNT>
float greatest_size(const float* x) {
    int32_t most = 0;
    for (int64_t k = 0; k < COUNT; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000) return __builtin_nanf("");
    float out;
    memcpy(&out, &most, 4);
    return out;
}

void round_to_int8(const float* x, int64_t j, uint8_t* to) {
    const float scale = as_scale(greatest_size<64>(x) / 127.0f);
    put_half(to, j, narrow(scale));
    int8_t q[64] = {};
    if (scale > 0.0f) {
        const float factor = 1.0f / scale;
        for (int64_t k = 0; k < 64; k++)
            q[k] = int8_t(int32_t(between(x[k] * factor, -127.0f, 127.0f) + SHIFT - SHIFT));
    }
    for (int64_t k = 0; k < 64; k += 4) memcpy(to + HALVES + k * 16 + j * 4, q + k, 4);
}

struct Line {  // x is about q * scale + least
    float scale, least;
};

constexpr int64_t WAYS = 8;  // sums side by side

float round_to_line(const float* x, Line line, uint8_t* q) {  // the squared error
    const float factor = line.scale != 0.0f ? 1.0f / line.scale : 0.0f;
    float errors[WAYS] = {};
    float numbers[32];
    for (int64_t k = 0; k < 32; k += WAYS)
        for (int64_t i = 0; i < WAYS; i++) {
            const float turned = (x[k + i] - line.least) * factor;
            const float number = between(turned, 0.0f, 15.0f) + SHIFT - SHIFT;
            const float off = number * line.scale + line.least - x[k + i];
            numbers[k + i] = number;
            errors[i] += off * off;
        }
    for (int64_t k = 0; k < 32; k++) q[k] = uint8_t(int32_t(numbers[k]));
    float error = 0.0f;
    for (float some : errors) error += some;
    return error;
}

Line as_stored(Line line) {
    return {from_half(to_half(line.scale)), from_half(to_half(line.least))};
}

Line best_line(const float* x, const uint8_t* q) {  // by least squares
    float q_of[WAYS] = {}, qq_of[WAYS] = {}, x_of[WAYS] = {}, qx_of[WAYS] = {};
    for (int64_t k = 0; k < 32; k += WAYS)
        for (int64_t i = 0; i < WAYS; i++) {
            const float number = float(int32_t(q[k + i]));
            q_of[i] += number;
            qq_of[i] += number * number;
            x_of[i] += x[k + i];
            qx_of[i] += number * x[k + i];
        }
    float sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0;
    for (int64_t i = 0; i < WAYS; i++) {
        sum_q += q_of[i];
        sum_qq += qq_of[i];
        sum_x += x_of[i];
        sum_qx += qx_of[i];
    }
    const float spread = 32.0f * sum_qq - sum_q * sum_q;
    if (!(spread > 0.0f)) return {0.0f, sum_x / 32.0f};
    const float scale = (32.0f * sum_qx - sum_q * sum_x) / spread;
    return {scale, (sum_x - scale * sum_q) / 32.0f};
}

// Start from the least and the greatest, and from somewhat less than that; then draw the line
// through what the numbers were rounded to, as long as that is nearer.
void round_to_int4(const float* x, int64_t j, uint8_t* to) {
    const float size = greatest_size<32>(x);
    Line best = {size, size};
    uint8_t numbers[32] = {};
    if (size == size) {
        float low = x[0], high = x[0];
        for (int64_t k = 1; k < 32; k++) {
            low = std::min(low, x[k]);
            high = std::max(high, x[k]);
        }
        float least_error = __builtin_inff();
        for (float part : {1.0f, 0.92f, 0.84f}) {
            const float middle = (low + high) / 2, half = (high - low) / 2 * part;
            Line line = {half * 2 / 15.0f, middle - half};
            for (int pass = 0; pass < 3; pass++) {
                uint8_t q[32];
                line = as_stored(line);
                const float error = round_to_line(x, line, q);
                if (!(error < least_error)) break;
                least_error = error;
                best = line;
                memcpy(numbers, q, 32);
                line = best_line(x, q);
            }
        }
    }
    put_half(to, j, to_half(best.scale));
    put_half(to + HALVES, j, to_half(best.least));
    put_nibbles(to + 2 * HALVES, j, numbers);
}

// One block of float32 into row `j` of a panel's block.
void round_block(int32_t type, const float* x, int64_t j, uint8_t* to) {
    switch (type) {
    case F32_PANELS:
        memcpy(to + j * 4, x, 4);
        return;
    case BF16_PANELS:
        for (int64_t k = 0; k < 2; k++) put_half(to + k * 2, j * 2, narrow(x[k]));
        return;
    case INT8:
    case W8A8:
        round_to_int8(x, j, to);
        return;
    case W4A8:
        round_to_int4(x, j, to);
        return;
    }
}

// A block of GGUF's to float32: through a panel in which it is row 0.
void read_own(int32_t type, const uint8_t* from, float* out) {
    uint8_t block[4096];
    pack_own(type, from, 0, block);
    unpack_block(type, block, 0, out);
}

void read_row(int32_t type, const uint8_t* row, int64_t cols, float* out) {
    const Source source = source_of(type);
    if (source.columns == 1)
        unpack_row(type, row, cols, 0, out);
    else
        for (int64_t k = 0; k < cols; k += source.columns, row += source.bytes)
            read_own(type, row, out + k);
}

bool fits(int32_t type, int64_t cols) {
    const int64_t columns = type >= Q8_0 ? block_of(type).columns : 1;
    return cols % columns == 0;
}

}  // namespace
}  // namespace hardpoint

using namespace hardpoint;

int32_t hp_layout() { return LAYOUT; }

int64_t hp_pack_bytes(int32_t type, int64_t rows, int64_t cols) {
    if (!is_packed(type) || rows <= 0 || cols <= 0 || !fits(type, cols)) return -1;
    return (rows + PANEL - 1) / PANEL * panel_bytes(type, cols);
}

int32_t hp_pack(int32_t type, int32_t source_type, const void* source, int64_t first, int64_t count,
                int64_t rows, int64_t cols, void* out) {
    const Source from = source_of(source_type);
    const Block block = block_of(type);
    if (!from.columns || !block.columns || (type >= Q8_0 && source_type != type)) return 1;
    if (first < 0 || count < 0 || first + count > rows || cols <= 0 || cols % from.columns ||
        !fits(type, cols))
        return 2;
    const int64_t size = panel_bytes(type, cols), bytes = cols / from.columns * from.bytes;
    std::unique_ptr<float[]> x(new (std::nothrow) float[size_t(cols + block.columns)]());
    if (!x) return 3;
    for (int64_t row = first; row < first + count; row++) {
        const uint8_t* at = (const uint8_t*)source + (row - first) * bytes;
        uint8_t* to = (uint8_t*)out + row / PANEL * size;
        if (type >= Q8_0) {
            for (int64_t k = 0; k < cols; k += block.columns, at += from.bytes, to += block.bytes)
                pack_own(type, at, row % PANEL, to);
        } else {
            read_row(source_type, at, cols, x.get());
            for (int64_t k = 0; k < cols; k += block.columns, to += block.bytes)
                round_block(type, x.get() + k, row % PANEL, to);
        }
    }
    return 0;
}

int32_t hp_unpack(int32_t type, const void* data, int64_t rows, int64_t cols, int64_t first,
                  int64_t count, float* out) {
    if (type < 0 || type >= TYPES) return 1;
    if (first < 0 || count < 0 || first + count > rows || cols <= 0) return 2;
    if (is_packed(type) && !fits(type, cols)) return 2;
    for (int64_t row = 0; row < count; row++)
        unpack_row(type, data, cols, first + row, out + row * cols);
    return 0;
}
