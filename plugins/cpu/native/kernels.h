// What one level of instructions computes: a table of functions over plain memory.
//
// Activations are float32, row by row; weights and caches have types of their own. Each output is
// summed in an order that does not depend on how many rows are computed together, so that a token's
// numbers are the same alone, in a batch and in any chunk of a prompt.
#pragma once

#include <cstdint>

#include "formats.h"

namespace hardpoint {

enum Level : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, LEVELS = 4 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

constexpr int64_t CHUNK = 32;       // rows of a weight that one piece of work takes
constexpr int64_t MOST_ROWS = 96;   // rows of activations that it takes
constexpr int64_t KEY_TILE = 64;    // keys that attention weighs at once
constexpr int64_t QUERY_TILE = 16;  // query tokens that share a pass over the keys
constexpr int64_t SPAN = 512;       // keys that attention sums up by themselves

struct Rows {  // of activations: float32, or what `prepare` made for the type of the weight
    const void* data;
    int64_t stride;  // bytes
    int64_t count;
};

struct Attention {           // some query tokens of one request under one key head
    const float* query;      // the first token's first query head of the group
    int64_t query_stride;    // floats from one token to the next
    float* out;              // likewise
    int64_t out_stride;
    const void* keys;        // the layer's caches [blocks, block_size, kv_heads, head]
    const void* values;
    int32_t type;            // float32, bfloat16, or int8: the head's numbers, then their scale
    const int32_t* table;    // the request's blocks
    int64_t block_size, kv_heads, kv_head, group, head;
    int64_t position;        // of the first query token
    int64_t tokens;
    int64_t window;          // how many positions a token sees; 0: all
    float scale;
    float cap;               // of scores; 0: none
};

// The place of the first key that is weighed for tokens from `position` on.
inline int64_t first_tile(int64_t position, int64_t window) {
    const int64_t first = window > 0 ? position - window + 1 : 0;
    return first > 0 ? first / KEY_TILE * KEY_TILE : 0;
}

struct Spans {
    int64_t first, last;
};
inline Spans spans_of(int64_t position, int64_t tokens, int64_t window) {
    return {first_tile(position, window) / SPAN, (position + tokens + SPAN - 1) / SPAN};
}

struct Best {
    float value;
    int64_t place;
    bool wrong;  // a NaN was seen
};

struct Kernels {
    // out[m][n - first] = x[m] . w[n] + bias[n] for n in [first, last), at most CHUNK, capped;
    // `add`: on top of what out holds. At most MOST_ROWS rows of x.
    void (*linear)(const Rows& x, const Matrix& w, int64_t first, int64_t last, const Vector& bias,
                   float cap, bool add, float* out, int64_t out_stride, float* scratch);
    // out[m][i] = activation(x[m] . w[gate + i] + bias) * (x[m] . w[up + i] + bias), i < count.
    void (*gated)(const Rows& x, const Matrix& w, int64_t gate, int64_t up, int64_t count,
                  const Vector& bias, int32_t activation, float* out, int64_t out_stride,
                  float* scratch);
    // A row of activations for weights of the type, activation_bytes of it.
    void (*prepare)(int32_t type, const float* x, int64_t cols, void* out);
    void (*norm)(const float* x, const Vector& weight, int64_t count, float eps, bool add,
                 float* out);
    void (*layer_norm)(const float* x, const Vector& weight, const Vector& bias, int64_t count,
                       float eps, float* out);
    void (*embed)(const Matrix& table, int64_t row, float scale, float* out);
    // Turn the halves of each head's first `turned` columns by a token's angles, turned / 2 each.
    void (*rotate)(float* x, int64_t heads, int64_t head, int64_t turned, const float* cos,
                   const float* sin);
    void (*store)(const float* x, int64_t heads, int64_t head, void* out, int32_t type);
    void (*attend)(const Attention& work, float* scratch);
    // The same in parts: floats [rows, head + 2] of one span of keys, rows = tokens * group; and
    // what the parts of all spans, next to each other, come to.
    void (*attend_part)(const Attention& work, int64_t span, float* out, float* scratch);
    void (*join)(const Attention& work, int64_t spans, float* parts);
    void (*activate)(const float* gates, const float* ups, int64_t count, int32_t activation,
                     float* out);
    void (*route)(const float* x, int64_t count, int64_t wanted, bool normalised, float* out);
    void (*add_scaled)(const float* x, int64_t count, float factor, float* out);
    float (*open)(float x);  // 1 / (1 + e ** -x)
    // Let `best` be the greatest of x, the first of equal ones, where that is greater; x begins at
    // `place`.
    void (*rank)(const float* x, int64_t count, int64_t place, Best& best);
};

// Floats of scratch that a thread needs.
int64_t scratch_size(int64_t most_columns, int64_t group, int64_t head);

// Rows of activations that one piece of work takes: as many as stay in a core's own cache.
inline int64_t row_block(int64_t columns) {
    int64_t rows = 65536 / (columns > 0 ? columns : 1) / 12 * 12;
    return rows < 12 ? 12 : rows > MOST_ROWS ? MOST_ROWS : rows;
}

// The bytes of a head in a cache.
inline int64_t cached_bytes(int32_t type, int64_t head) {
    return type == INT8 ? head + 4 : type == BF16 ? head * 2 : head * 4;
}

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where they are not compiled
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();  // the same, but for products of two bfloat16

// The table of a level, null if this processor or this build has not got it.
const Kernels* kernels(int32_t level);

}  // namespace hardpoint
