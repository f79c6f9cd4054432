// The kernels of one level. Compiled once for each; LEVEL names the table.

#include "kernels.h"
#include "vectors.h"

namespace hardpoint {
namespace {

constexpr int WIDE = 4;  // rows of a weight that are multiplied at once
constexpr int TALL = 3;  // rows of activations that are multiplied at once

template <int N>
struct Number {
    static constexpr int value = N;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// out[i][j] = x[i] . w[j]: lane by lane along both, then the lanes; the same for every M and N.
template <int M, int N, class T>
__attribute__((noinline)) void products(const float* const* x, const T* const* w, int64_t count, float (&out)[M][N]) {
    Vec total[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) total[i][j] = Vec{};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        Vec left[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) left[i] = load(x[i] + k);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            Vec right = load(w[j] + k);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) total[i][j] += left[i] * right;
        }
    }
    if (k < count) {
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            Vec right = load_part(w[j] + k, count - k);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) total[i][j] += load_part(x[i] + k, count - k) * right;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
        int j = 0;
#pragma GCC unroll 8
        for (; j + 4 <= N; j += 4) {
            Four four = sums(total[i][j], total[i][j + 1], total[i][j + 2], total[i][j + 3]);
            memcpy(&out[i][j], &four, sizeof four);
        }
        for (; j < N; j++) out[i][j] = sum(total[i][j]);
    }
}

// Multiply `rows` rows of x with N rows of w; `emit(row, j, product)`.
template <int N, class T, class Emit>
inline void products_of(const float* x, int64_t stride, int64_t rows, const T* const* w,
                        int64_t count, Emit emit) {
    auto some = [&](auto tall, int64_t row) {
        constexpr int M = decltype(tall)::value;
        const float* at[M];
        for (int i = 0; i < M; i++) at[i] = x + (row + i) * stride;
        float out[M][N];
        products<M, N>(at, w, count, out);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) emit(row + i, j, out[i][j]);
    };
    int64_t row = 0;
    for (; rows - row >= 5 || rows - row == TALL; row += TALL) some(Number<TALL>{}, row);
    for (; rows - row >= 2; row += 2) some(Number<2>{}, row);
    for (; row < rows; row++) some(Number<1>{}, row);
}

inline float number(const void* from, int32_t type, int64_t index) {
    return type == BF16 ? widen(((const uint16_t*)from)[index]) : ((const float*)from)[index];
}

template <class T, class Emit>
void multiply(const float* x, int64_t stride, int64_t rows, const T* w, int64_t columns,
              int64_t first, int64_t last, Emit emit) {
    auto some = [&](auto wide, int64_t n) {
        constexpr int N = decltype(wide)::value;
        const T* at[N];
        for (int j = 0; j < N; j++) at[j] = w + (n + j) * columns;
        products_of<N>(x, stride, rows, at, columns,
                       [&](int64_t m, int j, float value) { emit(m, n + j, value); });
    };
    int64_t n = first;
    if (rows == 1) {  // more sums at once, or each addition waits for the one before
        const float* const at[1] = {x};
        for (; n + 2 * WIDE <= last; n += 2 * WIDE) {
            const T* row[2 * WIDE];
            for (int j = 0; j < 2 * WIDE; j++) row[j] = w + (n + j) * columns;
            float out[1][2 * WIDE];
            products<1, 2 * WIDE>(at, row, columns, out);
            for (int j = 0; j < 2 * WIDE; j++) emit(0, n + j, out[0][j]);
        }
    }
    for (; n + WIDE <= last; n += WIDE) some(Number<WIDE>{}, n);
    for (; n < last; n++) some(Number<1>{}, n);
}

// The same, with rows of a narrow type widened once where many rows of x use them.
template <class Emit>
void multiply_any(const float* x, int64_t stride, int64_t rows, const Matrix& w, int64_t first,
                  int64_t last, float* scratch, Emit emit) {
    int64_t columns = w.cols;
    if (w.type == F32) {
        multiply(x, stride, rows, (const float*)w.data, columns, first, last, emit);
        return;
    }
    const uint16_t* narrow_rows = (const uint16_t*)w.data;
    if (rows <= 2 * TALL) {
        multiply(x, stride, rows, narrow_rows, columns, first, last, emit);
        return;
    }
    for (int64_t n = first; n < last; n += WIDE) {
        int64_t some = least(WIDE, last - n), count = some * columns, i = 0;
        const uint16_t* from = narrow_rows + n * columns;
        for (; i + LANES <= count; i += LANES) save(scratch + i, load(from + i));
        for (; i < count; i++) scratch[i] = widen(from[i]);
        multiply(x, stride, rows, (const float*)scratch, columns, 0, some,
                 [&](int64_t m, int64_t j, float value) { emit(m, n + j, value); });
    }
}

void linear(const float* x, int64_t stride, int64_t rows, const Matrix& w, int64_t first,
            int64_t last, const Vector& bias, bool add, float* out, int64_t out_stride,
            float* scratch) {
    multiply_any(x, stride, rows, w, first, last, scratch, [&](int64_t m, int64_t n, float value) {
        float& to = out[m * out_stride + n];
        if (bias.data) value += number(bias.data, bias.type, n);
        to = add ? to + value : value;
    });
}

void gated(const float* x, int64_t stride, int64_t rows, const Matrix& w, int64_t first,
           int64_t last, const Vector& bias, float* out, int64_t out_stride, float* scratch) {
    int64_t half = w.rows / 2, width = last - first;
    int64_t most_rows = row_block(w.cols);
    float* gates = scratch;
    float* ups = gates + most_rows * CHUNK;
    float* rest = ups + most_rows * CHUNK;
    for (int part = 0; part < 2; part++) {
        float* to = part ? ups : gates;
        int64_t shift = part ? half : 0;
        multiply_any(x, stride, rows, w, first + shift, last + shift, rest,
                     [&](int64_t m, int64_t n, float value) {
                         if (bias.data) value += number(bias.data, bias.type, n);
                         to[m * CHUNK + n - first - shift] = value;
                     });
    }
    for (int64_t m = 0; m < rows; m++) {
        for (int64_t n = 0; n < width; n += LANES) {
            int64_t count = least(LANES, width - n);
            Vec gate = load_part(gates + m * CHUNK + n, count);
            Vec up = load_part(ups + m * CHUNK + n, count);
            Vec value = gate / (1.0f + exponential(-gate)) * up;
            memcpy(out + m * out_stride + first + n, &value, size_t(count) * 4);
        }
    }
}

template <class T>
void norm_of(const float* x, const T* weight, int64_t count, float eps, float* out) {
    Vec squares = {};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) squares += load(x + k) * load(x + k);
    if (k < count) {
        Vec rest = load_part(x + k, count - k);
        squares += rest * rest;
    }
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(count) + eps);
    for (k = 0; k + LANES <= count; k += LANES)
        save(out + k, load(x + k) * factor * load(weight + k));
    for (; k < count; k++) out[k] = x[k] * factor * widen(weight[k]);
}

void norm(const float* x, int64_t stride, int64_t rows, const Matrix& weight, float eps, float* out,
          int64_t out_stride) {
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * stride;
        float* to = out + row * out_stride;
        if (weight.type == BF16)
            norm_of(from, (const uint16_t*)weight.data, weight.cols, eps, to);
        else
            norm_of(from, (const float*)weight.data, weight.cols, eps, to);
    }
}

void embed(const Matrix& table, int64_t row, float scale, float* out) {
    for (int64_t k = 0; k < table.cols; k++)
        out[k] = number(table.data, table.type, row * table.cols + k) * scale;
}

void rotate(float* x, int64_t heads, int64_t head, const float* cos, const float* sin) {
    int64_t half = head / 2;
    for (int64_t h = 0; h < heads; h++, x += head) {
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
            save(x + i, a * c - b * s);
            save(x + half + i, b * c + a * s);
        }
        for (; i < half; i++) {
            float a = x[i], b = x[half + i];
            x[i] = a * cos[i] - b * sin[i];
            x[half + i] = b * cos[i] + a * sin[i];
        }
    }
}

void store(const float* x, int64_t count, void* out, int32_t type) {
    if (type == F32) {
        memcpy(out, x, size_t(count) * 4);
        return;
    }
    uint16_t* to = (uint16_t*)out;
    for (int64_t i = 0; i < count; i++) to[i] = narrow(x[i]);
}

// Add to M rows of sums, `head` numbers each, the values weighed by M rows of weights.
template <int M, int N, class T>
__attribute__((noinline)) void weigh(const float* weights, const T* const* values, int64_t keys, int64_t from,
                  int64_t count, float* out, int64_t head) {
    Vec total[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float* at = out + i * head + from + j * LANES;
            total[i][j] = N == 1 ? load_part(at, count) : load(at);
        }
    for (int64_t key = 0; key < keys; key++) {
        Vec value[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            const T* at = values[key] + from + j * LANES;
            value[j] = N == 1 && count < LANES ? load_part(at, count) : load(at);
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            Vec weight = all(weights[i * KEY_TILE + key]);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) total[i][j] += weight * value[j];
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            memcpy(out + i * head + from + j * LANES, &total[i][j],
                   N == 1 ? size_t(count) * 4 : sizeof(Vec));
}

template <int M, class T>
void weigh_rows(const float* weights, const T* const* values, int64_t keys, float* out,
                       int64_t head) {
    int64_t from = 0;
    for (; from + 4 * LANES <= head; from += 4 * LANES)
        weigh<M, 4>(weights, values, keys, from, LANES, out, head);
    for (; from < head; from += LANES)
        weigh<M, 1>(weights, values, keys, from, least(LANES, head - from), out, head);
}

struct Softmax {  // of one row, so far
    float greatest, total;
};

// Turn a row of scores into weights; bring what was summed before to the new greatest score. Where
// no key was seen yet there is none, and all weights are zero.
inline void soften(float* scores, Softmax& state, float* out, int64_t head) {
    const float nothing = -__builtin_inff();
    Vec top = load(scores);
    for (int64_t k = LANES; k < KEY_TILE; k += LANES) {
        Vec next = load(scores + k);
        top = next > top ? next : top;
    }
    float greatest = state.greatest;
    for (int lane = 0; lane < LANES; lane++) greatest = top[lane] > greatest ? top[lane] : greatest;
    const float shift = greatest == nothing ? 0.0f : greatest;
    Vec total = {};
    for (int64_t k = 0; k < KEY_TILE; k += LANES) {
        Vec weight = exponential(load(scores + k) - shift);
        save(scores + k, weight);
        total += weight;
    }
    const float factor = exponential(all(state.greatest - shift))[0];
    state.total = state.total * factor + sum(total);
    state.greatest = greatest;
    if (factor != 1.0f)
        for (int64_t i = 0; i < head; i++) out[i] *= factor;
}

template <class T>
void attend_of(const Attention& work, float* scratch) {
    const int64_t head = work.head, group = work.group, rows = work.tokens * group;
    float* query = scratch;
    float* out = query + rows * head;
    float* scores = out + rows * head;
    Softmax state[QUERY_TILE * 64];  // `group` is at most 64
    for (int64_t row = 0; row < rows; row++) {
        const float* from = work.query + row / group * work.query_stride + row % group * head;
        for (int64_t i = 0; i < head; i++) query[row * head + i] = from[i] * work.scale;
        state[row] = {-__builtin_inff(), 0.0f};
    }
    memset(out, 0, size_t(rows * head) * 4);
    const int64_t end = work.position + work.tokens;
    int64_t begin = 0;
    if (work.window > 0)
        begin = most(0, work.position - work.window + 1) / KEY_TILE * KEY_TILE;
    for (int64_t tile = begin; tile < end; tile += KEY_TILE) {
        const int64_t keys = least(KEY_TILE, end - tile);
        const T* key_at[KEY_TILE];
        const T* value_at[KEY_TILE];
        for (int64_t k = 0; k < keys; k++) {
            int64_t at = tile + k, block = work.table[at / work.block_size];
            int64_t slot = block * work.block_size + at % work.block_size;
            int64_t place = (slot * work.kv_heads + work.kv_head) * head;
            key_at[k] = (const T*)work.keys + place;
            value_at[k] = (const T*)work.values + place;
        }
        int64_t key = 0;
        for (; key + WIDE <= keys; key += WIDE)
            products_of<WIDE>(query, head, rows, key_at + key, head,
                              [&](int64_t row, int j, float value) {
                                  scores[row * KEY_TILE + key + j] = value;
                              });
        for (; key < keys; key++)
            products_of<1>(query, head, rows, key_at + key, head,
                           [&](int64_t row, int, float value) {
                               scores[row * KEY_TILE + key] = value;
                           });
        for (int64_t row = 0; row < rows; row++) {
            float* mine = scores + row * KEY_TILE;
            int64_t position = work.position + row / group;
            int64_t seen = most(0, least(keys, position + 1 - tile));
            for (int64_t k = seen; k < KEY_TILE; k++) mine[k] = -__builtin_inff();
            if (work.window > 0) {
                int64_t hidden = least(seen, position - work.window + 1 - tile);
                for (int64_t k = 0; k < hidden; k++) mine[k] = -__builtin_inff();
            }
            soften(mine, state[row], out + row * head, head);
        }
        int64_t row = 0;
        for (; row + TALL <= rows; row += TALL)
            weigh_rows<TALL>(scores + row * KEY_TILE, value_at, keys, out + row * head, head);
        for (; row < rows; row++)
            weigh_rows<1>(scores + row * KEY_TILE, value_at, keys, out + row * head, head);
    }
    for (int64_t row = 0; row < rows; row++) {
        float* to = work.out + row / group * work.out_stride + row % group * head;
        float factor = 1.0f / state[row].total;
        for (int64_t i = 0; i < head; i++) to[i] = out[row * head + i] * factor;
    }
}

void attend(const Attention& work, float* scratch) {
    if (work.type == BF16)
        attend_of<uint16_t>(work, scratch);
    else
        attend_of<float>(work, scratch);
}

int64_t best(const float* x, int64_t count) {
    const float low = -__builtin_inff();
    Vec top = all(low);
    Ints unequal = {};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        Vec next = load(x + k);
        unequal |= (next != next);
        top = next > top ? next : top;
    }
    float greatest = low;
    bool nan = false;
    for (int lane = 0; lane < LANES; lane++) {
        nan |= unequal[lane] != 0;
        greatest = top[lane] > greatest ? top[lane] : greatest;
    }
    for (; k < count; k++) {
        nan |= x[k] != x[k];
        greatest = x[k] > greatest ? x[k] : greatest;
    }
    if (nan || greatest - greatest != 0.0f) return -1;
    for (k = 0; k < count; k++)
        if (x[k] == greatest) return k;
    return -1;
}

const Kernels table = {linear, gated, norm, embed, rotate, store, attend, best};

}  // namespace

#define JOINED(level) level##_kernels
#define TABLE_OF(level) JOINED(level)
const Kernels* TABLE_OF(LEVEL)() { return &table; }

}  // namespace hardpoint
