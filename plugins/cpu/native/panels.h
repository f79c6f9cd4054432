// Products with packed weights that are multiplied as float32: column after column, the rows of a
// panel side by side in registers.
#pragma once

#include "integers.h"
#include "tiles.h"

namespace {

constexpr int TALL_FLOAT = LANES == 16 ? 8 : LANES == 8 ? 6 : 2;
constexpr int64_t DEPTH = 256;  // columns of a panel that stay in the nearest cache

struct FloatPanels {
    static constexpr int COLUMNS = 1, STEP = 1;  // of a block, and at once
    static constexpr int64_t BYTES = hardpoint::PANEL * 4;
    explicit FloatPanels(const uint8_t* block) : at(block) {}
    void load(int, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++) w[0][v] = ::load((const float*)at + v * LANES);
    }
    const uint8_t* at;
};

struct BfloatPanels {
    static constexpr int COLUMNS = 2, STEP = 2;
    static constexpr int64_t BYTES = hardpoint::PANEL * 4;
    explicit BfloatPanels(const uint8_t* block) : at(block) {}
    void load(int, Vec (&w)[STEP][PARTS]) const {
        for (int v = 0; v < PARTS; v++) {
            const Words both = (Words)load_ints(at + v * STEP_BYTES);
            w[0][v] = (Vec)(both << 16);
            w[1][v] = (Vec)(both & 0xffff0000u);
        }
    }
    const uint8_t* at;
};

struct BytePanels {
    static constexpr int COLUMNS = 64, STEP = 4;
    static constexpr int64_t BYTES = hardpoint::HALVES + hardpoint::PANEL * 64;
    explicit BytePanels(const uint8_t* block) : at(block + hardpoint::HALVES) {
        for (int v = 0; v < PARTS; v++) scale[v] = load_bfloats(block + v * LANES * 2);
    }
    void load(int column, Vec (&w)[STEP][PARTS]) const {
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
    auto add = [&](const W& block, int column, int64_t k, int count) {
        Vec w[W::STEP][PARTS];
        block.load(column, w);
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
    };
    int64_t k = 0;
    for (; k + W::COLUMNS <= columns; k += W::COLUMNS, panel += W::BYTES) {
        const W block(panel);
        for (int column = 0; column < W::COLUMNS; column += W::STEP)
            add(block, column, k + column, W::STEP);
    }
    if (W::COLUMNS > 1 && k < columns) {
        const W block(panel);
        for (int column = 0; k + column < columns; column += W::STEP)
            add(block, column, k + column, int(least(W::STEP, columns - k - column)));
    }
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
    for (int64_t k = 0; k < columns; k += W::COLUMNS, panel += W::BYTES) {
        const W block(panel);
        for (int column = 0; column < W::COLUMNS && k + column < columns; column += W::STEP) {
            Vec w[W::STEP][PARTS];
            block.load(column, w);
            for (int s = 0; s < W::STEP; s++)
                for (int v = 0; v < PARTS; v++)
                    save(out + (k + column + s) * hardpoint::PANEL + v * LANES, w[s][v]);
        }
    }
}

// out[m][n - first] = x[m] . w[n] for n in [first, last). What many rows of x are multiplied with is
// widened once; `widened` has room for DEPTH + 4 columns of a panel.
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
                    multiply(FloatPanels(nullptr), (const uint8_t*)widened, k, columns, to, to_stride);
                } else {
                    multiply(W(from), block, k, columns, to, to_stride);
                }
            }
        });
}

}  // namespace
