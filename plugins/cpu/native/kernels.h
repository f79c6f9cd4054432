// What one level of instructions computes: a table of functions over plain memory.
//
// Activations are float32, row by row. Weights and caches are read where they are, in their own
// type. Each output is summed in an order that does not depend on how many rows are computed
// together, so that a token's numbers are the same alone, in a batch and in any chunk of a prompt.
#pragma once

#include <cstdint>

#include "formats.h"

namespace hardpoint {

enum Level : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

constexpr int64_t CHUNK = 32;       // rows of a weight that one piece of work takes
constexpr int64_t KEY_TILE = 64;    // keys that attention weighs at once
constexpr int64_t QUERY_TILE = 16;  // query tokens that share a pass over the keys

struct Attention {           // some query tokens of one request under one key head
    const float* query;      // the first token's first query head of the group
    int64_t query_stride;    // floats from one token to the next
    float* out;              // likewise
    int64_t out_stride;
    const void* keys;        // the layer's caches [blocks, block_size, kv_heads, head]
    const void* values;
    int32_t type;
    const int32_t* table;    // the request's blocks
    int64_t block_size, kv_heads, kv_head, group, head;
    int64_t position;        // of the first query token
    int64_t tokens;
    int64_t window;          // how many positions a token sees; 0: all
    float scale;
};

struct Kernels {
    // out[m][n] = x[m] . w[n] + bias[n] for n in [first, last); `add`: on top of what out holds.
    void (*linear)(const float* x, int64_t x_stride, int64_t rows, const Matrix& w, int64_t first,
                   int64_t last, const Vector& bias, bool add, float* out, int64_t out_stride,
                   float* scratch);
    // out[m][n] = silu(x[m] . w[n] + bias[n]) * (x[m] . w[n + half] + ...), half = w.rows / 2.
    void (*gated)(const float* x, int64_t x_stride, int64_t rows, const Matrix& w, int64_t first,
                  int64_t last, const Vector& bias, float* out, int64_t out_stride, float* scratch);
    void (*norm)(const float* x, int64_t x_stride, int64_t rows, const Matrix& weight, float eps,
                 float* out, int64_t out_stride);
    void (*embed)(const Matrix& table, int64_t row, float scale, float* out);
    // Turn the halves of each head by a token's angles: cos and sin of head / 2 each.
    void (*rotate)(float* x, int64_t heads, int64_t head, const float* cos, const float* sin);
    void (*store)(const float* x, int64_t count, void* out, int32_t type);
    void (*attend)(const Attention& work, float* scratch);
    // The place of the greatest number, the first of equal ones; -1 if that is not finite or one is
    // NaN.
    int64_t (*best)(const float* x, int64_t count);
};

// Floats of scratch that a thread needs.
int64_t scratch_size(int64_t most_columns, int64_t group, int64_t head);

// Rows of activations that one piece of work takes: as many as stay in a core's own cache.
inline int64_t row_block(int64_t columns) {
    int64_t rows = 65536 / (columns > 0 ? columns : 1) / 3 * 3;
    return rows < 12 ? 12 : rows > 96 ? 96 : rows;
}

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where they are not compiled
const Kernels* avx512_kernels();

// The table of a level, null if this processor or this build has not got it.
const Kernels* kernels(int32_t level);

}  // namespace hardpoint
