// Products with packed weights that are multiplied as float32: column after column, the rows of a
// panel side by side in registers.
#pragma once

#include "integers.h"
#include "tiles.h"

namespace {

constexpr int TALL_FLOAT = LANES == 16 ? 8 : LANES == 8 ? 6 : 2;
constexpr int64_t DEPTH = 256;  // columns of a panel that stay in the nearest cache

// Kinds of panels. COLUMNS: of a block of BYTES; GROUP: those that one scale makes numbers of, which
// `open` reads; RUN: those of a group that are kept alike, of which `load` gives STEP in each lane.

struct FloatPanels {
    static constexpr int COLUMNS = 1, GROUP = 1, RUN = 1, STEP = 1;
    static constexpr int64_t BYTES = hardpoint::PANEL * 4;
    void open(const uint8_t* block, int) { at = block; }
    Words load(int, int, int v) const { return (Words)load_ints(at + v * STEP_BYTES); }
    Vec number(Words x, int, int) const { return (Vec)x; }
    const uint8_t* at;
};

struct BfloatPanels {
    static constexpr int COLUMNS = 2, GROUP = 2, RUN = 2, STEP = 2;
    static constexpr int64_t BYTES = hardpoint::PANEL * 4;
    void open(const uint8_t* block, int) { at = block; }
    Words load(int, int, int v) const { return (Words)load_ints(at + v * STEP_BYTES); }
    Vec number(Words both, int s, int) const {
        return (Vec)(s ? both & 0xffff0000u : both << 16);
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
    Words load(int, int column, int v) const {
        return (Words)load_ints(at + column * 16 + v * STEP_BYTES);
    }
    Vec number(Words bytes, int s, int v) const {
        return as_floats((Ints)(bytes << (24 - 8 * s)) >> 24) * scale[v];
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
    Vec number(Words four, int s, int v, uint32_t mask) const {
        return as_floats((Ints)(four & (mask << 8 * s))) * scales[s][v] + least[v];
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
    Words load(int run, int column, int v) const {
        return (Words)load_ints(at + column * 16 + v * STEP_BYTES) >> 4 * run;
    }
    Vec number(Words four, int s, int v) const { return line.number(four, s, v, 15); }
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
    Words load(int run, int column, int v) const {
        return (Words)load_ints(at + column * 16 + v * STEP_BYTES) >> 4 * run;
    }
    Vec number(Words four, int s, int v) const { return line.number(four, s, v, 15); }
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
        own += half * PANEL;
        for (int v = 0; v < PARTS; v++, own += LANES, block += LANES * 2) {
            const Vec scale = load_halves(block) * as_floats(load_signed(own));
            line.set(v, scale, scale * -32.0f);
        }
    }
    Words load(int run, int column, int v) const {
        const uint8_t* own = low + column * 16 + v * STEP_BYTES;
        const Words four = (Words)load_ints(own + run * 128) >> 4 * half;
        const Words two = (Words)load_ints(own + hardpoint::NIBBLES) >> 4 * half >> 2 * run;
        return (four & 0x0f0f0f0fu) | (two & 0x03030303u) << 4;
    }
    Vec number(Words six, int s, int v) const { return line.number(six, s, v, 63); }
    const uint8_t* low;
    int half;
    Line line;
};

// For all columns of N panels, `bytes` each, a few at once: some(what opened their groups, run,
// column of the run, column of the panel, how many).
template <class W, int N, class Some>
inline __attribute__((always_inline)) void in_groups(const uint8_t* panel, int64_t bytes,
                                                     int64_t columns, Some some) {
    W groups[N];
    const auto open = [&](int64_t k) __attribute__((always_inline)) {
        const uint8_t* block = panel + k / W::COLUMNS * W::BYTES;
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) groups[n].open(block + n * bytes, int(k % W::COLUMNS / W::GROUP));
    };
    int64_t k = 0;
    for (; k + W::GROUP <= columns; k += W::GROUP) {
        open(k);
#pragma GCC unroll 2
        for (int run = 0; run < W::GROUP / W::RUN; run++)
#pragma GCC unroll 1
            for (int column = 0; column < W::RUN; column += W::STEP)
                some(groups, run, column, k + run * W::RUN + column, W::STEP);
    }
    if (W::GROUP > 1 && k < columns) {
        open(k);
        for (int column = 0; k + column < columns; column += W::STEP)
            some(groups, 0, column, k + column, int(least(W::STEP, columns - k - column)));
    }
}

// out[i][0..N * 16) of M rows of x, `columns` of them; `more`: on top of what out holds.
template <class W, int M, int N>
__attribute__((noinline)) void panel_tile(const uint8_t* panel, int64_t bytes, const float* x,
                                          int64_t stride, int64_t columns, bool more, float* out,
                                          int64_t out_stride) {
    Vec total[M][N * PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int v = 0; v < N * PARTS; v++)
            total[i][v] = more ? load(out + i * out_stride + v * LANES) : Vec{};
    const float* rows[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) rows[i] = x + i * stride;
    in_groups<W, N>(panel, bytes, columns, [&](const W (&groups)[N], int run, int column, int64_t k,
                                               int count) __attribute__((always_inline)) {
        Words kept[N * PARTS];
#pragma GCC unroll 8
        for (int v = 0; v < N * PARTS; v++) kept[v] = groups[v / PARTS].load(run, column, v % PARTS);
#pragma GCC unroll 4
        for (int s = 0; s < W::STEP; s++) {
            if (s >= count) break;
            if (M == 1) {  // with no number in a register for long
                const Vec number = all(rows[0][k + s]);
#pragma GCC unroll 8
                for (int v = 0; v < N * PARTS; v++)
                    total[0][v] += number * groups[v / PARTS].number(kept[v], s, v % PARTS);
                continue;
            }
            Vec w[N * PARTS];
#pragma GCC unroll 8
            for (int v = 0; v < N * PARTS; v++) w[v] = groups[v / PARTS].number(kept[v], s, v % PARTS);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) {
                const Vec number = all(rows[i][k + s]);
#pragma GCC unroll 8
                for (int v = 0; v < N * PARTS; v++) total[i][v] += number * w[v];
            }
        }
    });
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int v = 0; v < N * PARTS; v++) save(out + i * out_stride + v * LANES, total[i][v]);
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
    in_groups<W, 1>(panel, 0, columns, [&](const W (&groups)[1], int run, int column, int64_t k,
                                           int count) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) {
            const Words kept = groups[0].load(run, column, v);
#pragma GCC unroll 4
            for (int s = 0; s < W::STEP; s++)
                if (s < count)
                    save(out + (k + s) * hardpoint::PANEL + v * LANES, groups[0].number(kept, s, v));
        }
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
            panel_tile<decltype(kind), decltype(tall)::value, 1>(
                block, 0, x + row * stride + k, stride, columns, k > 0, to + row * to_stride,
                to_stride);
        });
    };
    int64_t panel = first / hardpoint::PANEL;
    if (rows == 1 && first % hardpoint::PANEL == 0)  // two at once: each sum waits for its last product
        for (; (panel + 2) * hardpoint::PANEL <= last; panel += 2)
            panel_tile<W, 1, 2>((const uint8_t*)w.data + panel * bytes, bytes, x, stride, w.cols, false,
                                out + panel * hardpoint::PANEL - first, out_stride);
    for (; panel * hardpoint::PANEL < last; panel++)
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
