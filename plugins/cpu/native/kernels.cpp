// The kernels of one level. Compiled once for each; LEVEL names the table.

#include "kernels.h"

#include "attention.h"
#include "panels.h"
#include "quantised.h"
#include "rows.h"
#include "rowwise.h"

namespace hardpoint {
namespace {

struct Scratch {
    explicit Scratch(float* at)
        : gates(at), ups(at + MOST_ROWS * CHUNK), aside(ups + MOST_ROWS * CHUNK),
          widened(aside + MOST_ROWS * PANEL) {}
    float* gates;
    float* ups;
    float* aside;
    float* widened;
};

// out[m][n - first] = x[m] . w[n] for n in [first, last). DOTS: there are products of two bfloat16.
template <bool DOTS>
void product(const Rows& x, const Matrix& w, int64_t first, int64_t last, float* out,
             int64_t out_stride, const Scratch& scratch) {
    const float* rows = (const float*)x.data;
    const int64_t stride = x.stride / 4;
    auto floats = [&](auto panels) {
        panel_product<decltype(panels)>(rows, stride, x.count, w, first, last, out, out_stride,
                                        scratch.aside, scratch.widened);
    };
    auto integers = [&](auto blocks) {
        quantised_product<decltype(blocks)>(x.data, x.stride, x.count, w, first, last, out,
                                            out_stride, scratch.aside);
    };
    switch (w.type) {
    case F32_PANELS: return floats(FloatPanels{});
    case BF16_PANELS: return floats(BfloatPanels{});
    case INT8: return floats(BytePanels<64, true>{});
    case Q8_0: return floats(BytePanels<32, false>{});
    case Q4_0: return floats(NibblePanels<false>{});
    case Q4_1: return floats(NibblePanels<true>{});
    case Q4_K: return floats(FourBitPanels{});
    case Q6_K: return floats(SixBitPanels{});
    case W8A8: return integers(ByteBlocks<64, true>{});
    case Q8_0_A8: return integers(ByteBlocks<32, false>{});
    case Q4_0_A8: return integers(NibbleBlocks<false>{});
    case W4A8:
    case Q4_1_A8: return integers(NibbleBlocks<true>{});
    case Q4_K_A8: return integers(FourBitBlocks{});
    case Q6_K_A8: return integers(SixBitBlocks{});
    default: {
        const auto emit = [&](int64_t m, int64_t n, const auto& some) {
            for (const auto& row : some) memcpy(out + m++ * out_stride + n - first, row, sizeof row);
        };
        const auto all_of = [&](auto x_rows, int64_t x_stride, auto data) {
            multiply<true>(x_rows, x_stride, x.count, w.cols, first, last,
                           [&](int64_t n) { return data + n * w.cols; }, emit);
        };
        if constexpr (DOTS)
            if (w.type == BF16_A16)
                return all_of((const uint16_t*)x.data, x.stride / 2, (const Paired*)w.data);
        w.type == F32 ? all_of(rows, stride, (const float*)w.data)
                      : all_of(rows, stride, (const Paired*)w.data);
    }
    }
}

template <bool DOTS>
void linear(const Rows& x, const Matrix& w, int64_t first, int64_t last, const Vector& bias,
            float cap, bool add, float* out, int64_t out_stride, float* room) {
    const Scratch scratch(room);
    if (!bias.data && !add && cap == 0.0f) {
        product<DOTS>(x, w, first, last, out, out_stride, scratch);
        return;
    }
    float* products = scratch.gates;
    product<DOTS>(x, w, first, last, products, CHUNK, scratch);
    for (int64_t m = 0; m < x.count; m++)
        in_vectors(last - first, [&](int64_t k, int64_t some) {
            float* to = out + m * out_stride + k;
            Vec value = load(products + m * CHUNK + k);
            if (bias.data) value += load_vector(bias, first + k, some);
            if (cap != 0.0f) value = tangent(value / cap) * cap;
            if (add) value = load_part(to, some) + value;
            save_part(to, value, some);
        });
}

template <bool DOTS>
void gated(const Rows& x, const Matrix& w, int64_t gate, int64_t up, int64_t count,
           const Vector& bias, int32_t activation, float* out, int64_t out_stride, float* room) {
    const Scratch scratch(room);
    for (int second = 0; second < 2; second++) {
        float* to = second ? scratch.ups : scratch.gates;
        const int64_t first = second ? up : gate;
        product<DOTS>(x, w, first, first + count, to, CHUNK, scratch);
        if (bias.data)
            for (int64_t m = 0; m < x.count; m++)
                in_vectors(count, [&](int64_t k, int64_t some) {
                    float* at = to + m * CHUNK + k;
                    save(at, load(at) + load_vector(bias, first + k, some));
                });
    }
    for (int64_t m = 0; m < x.count; m++)
        activate(scratch.gates + m * CHUNK, scratch.ups + m * CHUNK, count, activation,
                 out + m * out_stride);
}

template <bool DOTS>
void prepare(int32_t type, const float* x, int64_t cols, void* out) {
    if (DOTS && type == BF16_A16)
        narrow_row(x, cols, (uint16_t*)out);
    else if (type == BF16_A16)
        pair_row<true>(x, cols, (float*)out);
    else if (type == BF16)
        pair_row<false>(x, cols, (float*)out);
    else
        quantise_row(type, x, cols, out);
}

template <bool DOTS>
constexpr Kernels TABLE = {
    linear<DOTS>, gated<DOTS>, prepare<DOTS>, norm, layer_norm, embed, rotate, store, attend,
    attend_part, join, activate, route, add_scaled, open, rank};

}  // namespace

#define JOINED(level) level##_kernels
#define TABLE_OF(level) JOINED(level)
const Kernels* TABLE_OF(LEVEL)() { return &TABLE<false>; }
#if defined(__AVX512F__)
const Kernels* avx512_bf16_kernels() { return &TABLE<true>; }
#endif

}  // namespace hardpoint
