// Products of quantised weights with activations that are rounded to int8, group by group: exact
// sums of integers, which the groups' scales make numbers of, in the order of the columns.
#pragma once

#include "integers.h"
#include "panels.h"
#include "tiles.h"

namespace {

constexpr int TALL_INTEGER = LANES == 16 ? 8 : LANES == 8 ? 4 : 2;

// One row of activations as `quantise` leaves it: for each group its scale, for each part of
// `sum_group` columns their sum times the scale (or what offset_of says), then the numbers.
struct Activations {
    Activations(const void* row, int32_t type, int64_t cols) {
        const int64_t group = hardpoint::activation_group(type);
        const int64_t groups = (cols + group - 1) / group;
        scales = (const float*)row;
        sums = scales + groups;
        numbers = (const int8_t*)(sums + groups * group / hardpoint::sum_group(type));
    }
    const int8_t* numbers;
    const float* scales;
    const float* sums;
};

template <int M>
struct Group {  // of M rows: where the numbers, scales and sums of a group begin
    const int8_t* numbers[M];
    const float* scales[M];
    const float* sums[M];
};

template <int M>
using Integers = Ints[M][PARTS];
template <int M>
using Floats = Vec[M][PARTS];

// Sums that begin with what the weights' offset will be too much.
template <int M>
inline void begin(const float* const (&x)[M], int64_t group, Integers<M>& sum) {
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
        int32_t first;
        memcpy(&first, x[i] + group, 4);
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) sum[i][v] = first - Ints{};
    }
}

template <int M>
inline void add_nibbles(const uint8_t* from, const int8_t* const (&x)[M], Integers<M>& sum) {
    Partial part[M][PARTS] = {};
    const auto add = [&](int s, int shift, int column) {
        Ints w[PARTS];
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++)
            w[v] = (Ints)((Words)load_ints(from + s * 64 + v * STEP_BYTES) >> shift & 0x0f0f0f0fu);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            const Ints number = four(x[i] + column);
#pragma GCC unroll 4
            for (int v = 0; v < PARTS; v++) part[i][v] = add_unsigned(part[i][v], w[v], number);
        }
    };
#pragma GCC unroll 1
    for (int s = 0; s < 4; s++) {
        add(s, 0, s * 4);
        add(s, 4, 16 + s * 4);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) sum[i][v] += whole(part[i][v]);
}

// Numbers of 6 bits; sixteen columns, then sixteen, each times an integer scale.
template <int M>
inline void add_sixes(const uint8_t* low, const uint8_t* high, const Ints (&scale)[2][PARTS],
                      const int8_t* const (&x)[M], Integers<M>& sum) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        Integers<M> own = {};
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            Partial part[M][PARTS] = {};
#pragma GCC unroll 2
            for (int t = 0; t < 2; t++) {
                const int step = pair * 2 + t, shift = half * 4 + pair * 2;
                Ints w[PARTS];
#pragma GCC unroll 4
                for (int v = 0; v < PARTS; v++) {
                    const Words four = (Words)load_ints(low + step * 64 + v * STEP_BYTES);
                    const Words two = (Words)load_ints(high + t * 64 + v * STEP_BYTES);
                    w[v] = (Ints)((four >> (half * 4) & 0x0f0f0f0fu) |
                                  (two >> shift & 0x03030303u) << 4);
                }
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) {
                    const Ints number = four(x[i] + half * 16 + step * 4);
#pragma GCC unroll 4
                    for (int v = 0; v < PARTS; v++)
                        part[i][v] = add_unsigned(part[i][v], w[v], number);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < M; i++)
#pragma GCC unroll 4
                for (int v = 0; v < PARTS; v++) own[i][v] += whole(part[i][v]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; i++)
#pragma GCC unroll 4
            for (int v = 0; v < PARTS; v++) sum[i][v] += own[i][v] * scale[half][v];
    }
}

template <int M>
inline void scale_up(const Integers<M>& sum, const Vec (&scale)[PARTS], const float* const (&x)[M],
                     int64_t group, Floats<M>& total) {
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
        const Vec own = all(x[i][group]);
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) total[i][v] += as_floats(sum[i][v]) * (scale[v] * own);
    }
}
template <int M>
inline void add_least(const Vec (&least)[PARTS], const float* const (&x)[M], int64_t group,
                      Floats<M>& total) {
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
        const Vec own = all(x[i][group]);
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) total[i][v] += least[v] * own;
    }
}

inline void load_scales(const uint8_t* from, Vec (&scale)[PARTS]) {
    for (int v = 0; v < PARTS; v++) scale[v] = load_halves(from + v * LANES * 2);
}

// The types: add one block of a panel, whose first group is `group`, to the totals of M rows.

template <int COLUMNS, bool BFLOAT>
struct ByteBlocks {
    static constexpr int GROUPS = 1;
    template <int M>
    static inline void add(const uint8_t* block, const Group<M>& x, int64_t group, Floats<M>& total) {
        using namespace hardpoint;
        const int8_t* numbers[M];
        for (int i = 0; i < M; i++) numbers[i] = x.numbers[i] + group * COLUMNS;
        Integers<M> sum = {};
        if (UNSIGNED) begin<M>(x.sums, group, sum);
        add_bytes<M, COLUMNS>(block + HALVES, numbers, sum);
        Vec scale[PARTS];
        for (int v = 0; v < PARTS; v++)
            scale[v] = BFLOAT ? load_bfloats(block + v * LANES * 2) : load_halves(block + v * LANES * 2);
        scale_up<M>(sum, scale, x.scales, group, total);
    }
};

template <bool LEAST>
struct NibbleBlocks {
    static constexpr int GROUPS = 1;
    template <int M>
    static inline void add(const uint8_t* block, const Group<M>& x, int64_t group, Floats<M>& total) {
        using namespace hardpoint;
        const int8_t* numbers[M];
        for (int i = 0; i < M; i++) numbers[i] = x.numbers[i] + group * 32;
        Integers<M> sum = {};
        if (!LEAST) begin<M>(x.sums, group, sum);
        add_nibbles<M>(block + (LEAST ? 2 : 1) * HALVES, numbers, sum);
        Vec scale[PARTS], least[PARTS];
        load_scales(block, scale);
        scale_up<M>(sum, scale, x.scales, group, total);
        if (!LEAST) return;
        load_scales(block + HALVES, least);
        add_least<M>(least, x.sums, group, total);
    }
};

struct FourBitBlocks {  // Q4_K
    static constexpr int GROUPS = 8;
    template <int M>
    static inline void add(const uint8_t* block, const Group<M>& x, int64_t group, Floats<M>& total) {
        using namespace hardpoint;
        Vec scales[PARTS], mins[PARTS];
        load_scales(block, scales);
        load_scales(block + HALVES, mins);
        const uint8_t* at = block + 2 * HALVES;
        for (int g = 0; g < GROUPS; g++, at += Q4_K_GROUP) {
            const int8_t* numbers[M];
            for (int i = 0; i < M; i++) numbers[i] = x.numbers[i] + (group + g) * 32;
            Integers<M> sum = {};
            add_nibbles<M>(at + 2 * PANEL, numbers, sum);
            Vec scale[PARTS], least[PARTS];
            for (int v = 0; v < PARTS; v++) {
                scale[v] = scales[v] * load_bytes(at + v * LANES);
                least[v] = mins[v] * -load_bytes(at + PANEL + v * LANES);
            }
            scale_up<M>(sum, scale, x.scales, group + g, total);
            add_least<M>(least, x.sums, group + g, total);
        }
    }
};

struct SixBitBlocks {  // Q6_K
    static constexpr int GROUPS = 8;
    template <int M>
    static inline void add(const uint8_t* block, const Group<M>& x, int64_t group, Floats<M>& total) {
        using namespace hardpoint;
        Vec scales[PARTS];
        load_scales(block, scales);
        const uint8_t* at = block + HALVES;
        for (int g = 0; g < GROUPS; g++, at += Q6_K_GROUP) {
            const int8_t* numbers[M];
            for (int i = 0; i < M; i++) numbers[i] = x.numbers[i] + (group + g) * 32;
            Ints scale[2][PARTS];
            for (int half = 0; half < 2; half++)
                for (int v = 0; v < PARTS; v++)
                    scale[half][v] = load_signed(at + half * PANEL + v * LANES);
            Integers<M> sum = {};
            const uint8_t* low = at + 2 * PANEL;
            add_sixes<M>(low, low + NIBBLES, scale, numbers, sum);
            scale_up<M>(sum, scales, x.scales, group + g, total);
            for (int half = 0; half < 2; half++) {
                Vec least[PARTS];
                for (int v = 0; v < PARTS; v++)
                    least[v] = scales[v] * as_floats(scale[half][v]) * -32.0f;
                add_least<M>(least, x.sums, (group + g) * 2 + half, total);
            }
        }
    }
};

template <class W, int M>
__attribute__((noinline)) void quantised_tile(const uint8_t* panel, int64_t block_bytes,
                                              int64_t blocks, const Group<M>& x, float* out,
                                              int64_t out_stride) {
    Floats<M> total = {};
    for (int64_t block = 0; block < blocks; block++, panel += block_bytes)
        W::template add<M>(panel, x, block * W::GROUPS, total);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) save(out + i * out_stride + v * LANES, total[i][v]);
}

// As panel_product, of rows that `quantise` made, `stride` bytes each.
template <class W>
void quantised_product(const void* x, int64_t stride, int64_t rows, const hardpoint::Matrix& w,
                       int64_t first, int64_t last, float* out, int64_t out_stride, float* aside) {
    using namespace hardpoint;
    const int64_t bytes = panel_bytes(w.type, w.cols), block_bytes = block_of(w.type).bytes;
    const int64_t blocks = bytes / block_bytes;
    const Activations start(x, w.type, w.cols);  // of the first row; the others are alike
    for (int64_t panel = first / PANEL; panel * PANEL < last; panel++)
        fill_panel(panel, first, last, rows, out, out_stride, aside, [&](float* to, int64_t to_stride) {
            const uint8_t* from = (const uint8_t*)w.data + panel * bytes;
            in_tiles<TALL_INTEGER>(rows, [&](auto tall, int64_t row) {
                constexpr int M = decltype(tall)::value;
                Group<M> group;
                for (int i = 0; i < M; i++) {
                    const int64_t own = (row + i) * stride;
                    group.numbers[i] = start.numbers + own;
                    group.scales[i] = (const float*)((const char*)start.scales + own);
                    group.sums[i] = (const float*)((const char*)start.sums + own);
                }
                quantised_tile<W, M>(from, block_bytes, blocks, group, to + row * to_stride,
                                     to_stride);
            });
        });
}

// The numbers of a group to the nearest 127th of the greatest of them. One that is not finite makes
// the scale NaN, and with it all that comes of the group.
inline void quantise_row(int32_t type, const float* x, int64_t cols, void* out) {
    using namespace hardpoint;
    const int64_t group = activation_group(type), sum_columns = sum_group(type);
    const int32_t offset = offset_of(type);
    const Activations own(out, type, cols);
    int8_t* numbers = const_cast<int8_t*>(own.numbers);
    float* scales = const_cast<float*>(own.scales);
    float* sums = const_cast<float*>(own.sums);
    for (int64_t k = 0; k < cols; k += group, numbers += group) {
        const int64_t count = least(group, cols - k);
        Vec greatest = {}, wrong = {};
        for (int64_t i = 0; i < count; i += LANES) {
            const Vec part = load_part(x + k + i, least(LANES, count - i));
            greatest = larger(size_of(part), greatest);
            wrong += part * 0.0f;
        }
        const float high = highest(greatest);
        const float nan = sum(wrong);
        const bool good = nan == 0.0f && high > 1e-30f;
        const float scale = good ? high / 127.0f : 0.0f, factor = good ? 127.0f / high : 0.0f;
        const Vec shift = all(12582912.0f);  // adding it rounds to the nearest, ties to even
        for (int64_t i = 0; i < group; i += LANES) {
            Vec part = {};
            if (good && i < count) part = load_part(x + k + i, least(LANES, count - i));
            const Ints q = (Ints)(part * factor + shift) - (Ints)shift;
            const Bytes bytes = __builtin_convertvector(q, Bytes);
            memcpy(numbers + i, &bytes, sizeof bytes);
        }
        *scales++ = scale + nan;
        for (int64_t i = 0; i < group; i += sum_columns) {
            int32_t total = 0;
            for (int64_t c = 0; c < sum_columns; c++) total += numbers[i + c];
            const int32_t first = -offset * total;
            const float both = float(total) * (scale + nan);
            memcpy(sums++, offset ? (const void*)&first : &both, 4);
        }
    }
}

}  // namespace
