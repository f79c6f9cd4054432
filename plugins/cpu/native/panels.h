// Products with packed weights that are multiplied as float32: column after column, the rows of a
// panel side by side in registers.
#pragma once

#include "integers.h"
#include "tiles.h"

namespace {

constexpr int TALL_FLOAT = LANES == 16 ? 8 : LANES == 8 ? 6 : 2;
constexpr int64_t DEPTH = 256;  // columns of a panel that stay in the nearest cache

// Kinds of panels. COLUMNS: of a block of BYTES; GROUP: those that one scale makes numbers of, which
// `open` reads; RUN: those of a group that are kept alike, of which `load` gives STEP at once.

struct FloatPanels {
    static constexpr int COLUMNS = 1, GROUP = 1, RUN = 1, STEP = 1;
    static constexpr int64_t BYTES = hardpoint::PANEL * 4;
    void open(const uint8_t* block, int) { at = block; }
    void load(int, int, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++) w[0][v] = ::load((const float*)at + v * LANES);
    }
    const uint8_t* at;
};

struct BfloatPanels {
    static constexpr int COLUMNS = 2, GROUP = 2, RUN = 2, STEP = 2;
    static constexpr int64_t BYTES = hardpoint::PANEL * 4;
    void open(const uint8_t* block, int) { at = block; }
    void load(int, int, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++) {
            const Words both = (Words)load_ints(at + v * STEP_BYTES);
            w[0][v] = (Vec)(both << 16);
            w[1][v] = (Vec)(both & 0xffff0000u);
        }
    }
    const uint8_t* at;
};

template <int SIZE, bool BFLOAT>
struct BytePanels {
    static constexpr int COLUMNS = SIZE, GROUP = SIZE, RUN = SIZE, STEP = 4;
    static constexpr int64_t BYTES = hardpoint::HALVES + hardpoint::PANEL * SIZE;
    void open(const uint8_t* block, int) {
        at = block + hardpoint::HALVES;
        for (int v = 0; v < PARTS; v++)
            scale[v] = BFLOAT ? load_bfloats(block + v * LANES * 2) : load_halves(block + v * LANES * 2);
    }
    void load(int, int column, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++) {
            const Words bytes = (Words)load_ints(at + column * 16 + v * STEP_BYTES);
#pragma GCC unroll 4
            for (int s = 0; s < STEP; s++)
                w[s][v] = as_floats((Ints)(bytes << (24 - 8 * s)) >> 24) * scale[v];
        }
    }
    const uint8_t* at;
    Vec scale[PARTS];
};

// Unsigned numbers, four to a lane, as numbers * scale + least. Each is made a float where it is in
// the lane, which is a power of two too much: of that there is a scale for each place.
struct Line {
    void set(int v, Vec scale, Vec least_) {
        for (int s = 0; s < 4; s++) scales[s][v] = scale * (1.0f / float(1 << 8 * s));
        least[v] = least_;
    }
    void numbers(int v, Words four, uint32_t mask, Vec (&w)[4][PARTS]) const {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
            w[s][v] = as_floats((Ints)(four & (mask << 8 * s))) * scales[s][v] + least[v];
    }
    Vec scales[4][PARTS], least[PARTS];
};

template <bool LEAST>
struct NibblePanels {  // Q4_1, Q4_0
    static constexpr int COLUMNS = 32, GROUP = 32, RUN = 16, STEP = 4;
    static constexpr int64_t BYTES = (LEAST ? 2 : 1) * hardpoint::HALVES + hardpoint::NIBBLES;
    void open(const uint8_t* block, int) {
        at = block + BYTES - hardpoint::NIBBLES;
        for (int v = 0; v < PARTS; v++) {
            const uint8_t* own = block + v * LANES * 2;
            const Vec scale = load_halves(own);
            line.set(v, scale, LEAST ? load_halves(own + hardpoint::HALVES) : scale * -8.0f);
        }
    }
    void load(int run, int column, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++)
            line.numbers(v, (Words)load_ints(at + column * 16 + v * STEP_BYTES) >> 4 * run, 15, w);
    }
    const uint8_t* at;
    Line line;
};

struct FourBitPanels {  // Q4_K
    static constexpr int COLUMNS = 256, GROUP = 32, RUN = 16, STEP = 4;
    static constexpr int64_t BYTES = 2 * hardpoint::HALVES + 8 * hardpoint::Q4_K_GROUP;
    void open(const uint8_t* block, int group) {
        using namespace hardpoint;
        const uint8_t* own = block + 2 * HALVES + group * Q4_K_GROUP;
        at = own + 2 * PANEL;
        for (int v = 0; v < PARTS; v++, own += LANES, block += LANES * 2)
            line.set(v, load_halves(block) * load_bytes(own),
                     load_halves(block + HALVES) * -load_bytes(own + PANEL));
    }
    void load(int run, int column, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++)
            line.numbers(v, (Words)load_ints(at + column * 16 + v * STEP_BYTES) >> 4 * run, 15, w);
    }
    const uint8_t* at;
    Line line;
};

struct SixBitPanels {  // Q6_K
    static constexpr int COLUMNS = 256, GROUP = 16, RUN = 8, STEP = 4;
    static constexpr int64_t BYTES = hardpoint::HALVES + 8 * hardpoint::Q6_K_GROUP;
    void open(const uint8_t* block, int group) {
        using namespace hardpoint;
        const uint8_t* own = block + HALVES + group / 2 * Q6_K_GROUP;
        low = own + 2 * PANEL;
        half = group % 2;
        for (int v = 0; v < PARTS; v++) {
            const Ints scale = load_signed(own + half * PANEL + v * LANES);
            const Vec both = load_halves(block + v * LANES * 2) * as_floats(scale);
            line.set(v, both, both * -32.0f);
        }
    }
    void load(int run, int column, Vec (&w)[STEP][PARTS]) const {
        const uint8_t* high = low + hardpoint::NIBBLES;
        for (int v = 0; v < PARTS; v++) {
            const Words four = (Words)load_ints(low + run * 128 + column * 16 + v * STEP_BYTES);
            const Words two = (Words)load_ints(high + column * 16 + v * STEP_BYTES);
            const Words six = (four >> 4 * half & 0x0f0f0f0fu) |
                              (two >> 2 * (2 * half + run) & 0x03030303u) << 4;
            line.numbers(v, six, 63, w);
        }
    }
    const uint8_t* low;
    int half;
    Line line;
};

// For all columns of a panel, a few at once: some(the group that has them, run, column of the run,
// column of the panel, how many).
template <class W, class Some>
inline __attribute__((always_inline)) void in_groups(const uint8_t* panel, int64_t columns, Some some) {
    W group;
    int64_t k = 0;
    for (; k + W::GROUP <= columns; k += W::GROUP) {
        group.open(panel + k / W::COLUMNS * W::BYTES, int(k % W::COLUMNS / W::GROUP));
#pragma GCC unroll 2
        for (int run = 0; run < W::GROUP / W::RUN; run++)
#pragma GCC unroll 1
            for (int column = 0; column < W::RUN; column += W::STEP)
                some(group, run, column, k + run * W::RUN + column, W::STEP);
    }
    if (W::GROUP > 1 && k < columns) {
        group.open(panel + k / W::COLUMNS * W::BYTES, 0);
        for (int column = 0; k + column < columns; column += W::STEP)
            some(group, 0, column, k + column, int(least(W::STEP, columns - k - column)));
    }
}

// out[i][0..16) of M rows of x, `columns` of them; `more`: on top of what out holds.
template <class W, int M>
__attribute__((noinline)) void panel_tile(const uint8_t* panel, const float* x, int64_t stride,
                                          int64_t columns, bool more, float* out,
                                          int64_t out_stride) {
    Vec total[M][PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++)
            total[i][v] = more ? load(out + i * out_stride + v * LANES) : Vec{};
    const float* rows[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) rows[i] = x + i * stride;
    in_groups<W>(panel, columns, [&](const W& group, int run, int column, int64_t k, int count)
                                     __attribute__((always_inline)) {
        Vec w[W::STEP][PARTS];
        group.load(run, column, w);
#pragma GCC unroll 4
        for (int s = 0; s < W::STEP; s++) {
            if (s >= count) break;
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) {
                const Vec number = all(rows[i][k + s]);
#pragma GCC unroll 4
                for (int v = 0; v < PARTS; v++) total[i][v] += number * w[s][v];
            }
        }
    });
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) save(out + i * out_stride + v * LANES, total[i][v]);
}

// Where the numbers of one panel go: to `out` if all of them are wanted, else first to `aside`.
template <class Fill>
inline void fill_panel(int64_t panel, int64_t first, int64_t last, int64_t rows, float* out,
                       int64_t out_stride, float* aside, Fill fill) {
    const int64_t begin = panel * hardpoint::PANEL, end = begin + hardpoint::PANEL;
    if (begin >= first && end <= last) {
        fill(out + begin - first, out_stride);
        return;
    }
    fill(aside, hardpoint::PANEL);
    const int64_t from = most(begin, first), to = least(end, last);
    for (int64_t row = 0; row < rows; row++)
        memcpy(out + row * out_stride + from - first, aside + row * hardpoint::PANEL + from - begin,
               size_t(to - from) * 4);
}

// Columns of a panel as float32, at most DEPTH.
template <class W>
void widen_panel(const uint8_t* panel, int64_t columns, float* out) {
    in_groups<W>(panel, columns, [&](const W& group, int run, int column, int64_t k, int count)
                                     __attribute__((always_inline)) {
        Vec w[W::STEP][PARTS];
        group.load(run, column, w);
        for (int s = 0; s < count; s++)
            for (int v = 0; v < PARTS; v++) save(out + (k + s) * hardpoint::PANEL + v * LANES, w[s][v]);
    });
}

// out[m][n - first] = x[m] . w[n] for n in [first, last). What many rows of x are multiplied with is
// widened once; `widened` has room for DEPTH columns of a panel.
template <class W>
void panel_product(const float* x, int64_t stride, int64_t rows, const hardpoint::Matrix& w,
                   int64_t first, int64_t last, float* out, int64_t out_stride, float* aside,
                   float* widened) {
    const int64_t bytes = hardpoint::panel_bytes(w.type, w.cols);
    const bool many = rows > TALL_FLOAT;
    const int64_t depth = many ? DEPTH : w.cols;
    const auto multiply = [&](auto kind, const uint8_t* block, int64_t k, int64_t columns, float* to,
                              int64_t to_stride) {
        in_tiles<TALL_FLOAT>(rows, [&](auto tall, int64_t row) {
            panel_tile<decltype(kind), decltype(tall)::value>(
                block, x + row * stride + k, stride, columns, k > 0, to + row * to_stride, to_stride);
        });
    };
    for (int64_t panel = first / hardpoint::PANEL; panel * hardpoint::PANEL < last; panel++)
        fill_panel(panel, first, last, rows, out, out_stride, aside, [&](float* to, int64_t to_stride) {
            const uint8_t* from = (const uint8_t*)w.data + panel * bytes;
            for (int64_t k = 0; k < w.cols; k += depth) {
                const int64_t columns = least(depth, w.cols - k);
                const uint8_t* block = from + k / W::COLUMNS * W::BYTES;
                if (W::COLUMNS > 1 && many) {
                    widen_panel<W>(block, columns, widened);
                    multiply(FloatPanels{}, (const uint8_t*)widened, k, columns, to, to_stride);
                } else {
                    multiply(W{}, block, k, columns, to, to_stride);
                }
            }
        });
}

}  // namespace
