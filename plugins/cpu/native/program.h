// A program: what a model computes in a step, as a list of fused operations over buffers.
//
// The plain C interface of the library. No call raises or allocates for the caller; every call may
// be made without the interpreter's lock. One program belongs to one thread at a time.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "sampling.h"

#pragma GCC visibility push(default)
extern "C" {

enum hp_kind : int32_t {
    HP_EMBED = 0,    // out = rows of `weight` by the step's token ids, times `scale`
    HP_NORM = 1,     // out = in / rms(in) * weight
    HP_LINEAR = 2,   // out = in . weight + bias, capped
    HP_ADD = 3,      // out += in . weight + bias
    HP_GATED = 4,    // out = activation(in . first half of weight) * (in . second half)
    HP_ROTATE = 5,   // in = queries, keys and values: normed, turned, written to the caches
    HP_ATTEND = 6,   // out = attention of the queries in `in` over the caches
    HP_GATHER = 7,   // out = rows of `in` that the step wants
    HP_ADD_NORM = 8,     // out += in / rms(in) * weight
    HP_LAYER_NORM = 9,   // out = (in - mean) / deviation * weight + bias
    HP_ACTIVATE = 10,    // out = activation(first `columns` of in) * the next `columns`
    HP_ROUTE = 11,       // out = the `per_token` greatest of in's `columns`: places, then shares
    HP_EXPERTS = 12,     // out += of each expert chosen in `second`, its share of what it makes of in:
                         // `weight` has the gates and ups of each of `columns`, `other` the downs
    HP_SIGMOID_ADD = 13,  // out += in * sigmoid(the first column of `second`), `columns` of them
};

struct hp_op {
    int32_t kind;
    int32_t in, out;       // buffers; -1: the caller's logits
    int32_t picked;        // whether it works on the rows that the step wants, or on all tokens
    hardpoint::Matrix weight, other;
    const void* bias;      // may be null, as the norms
    const void* query_norm;
    const void* key_norm;  // both [head]
    void* keys;            // the layer's caches
    void* values;
    const float* cos;      // [positions, turned / 2]
    const float* sin;
    int64_t window;        // 0: all
    int64_t in_column, out_column;  // the first column that is read, and written
    int64_t columns;       // of ACTIVATE's and SIGMOID_ADD's result; how many experts
    int32_t vector_type;   // of bias and norms of queries and keys: float32 or bfloat16
    int32_t activation;    // 0: silu, 1: gelu by tanh
    int32_t turned;        // columns of each head that rotary positions turn; 0: all
    int32_t second;        // a second buffer that is read
    int32_t per_token, normalised;  // of ROUTE and EXPERTS
    float eps, scale;
    float cap;             // of logits and scores, cap * tanh(x / cap); 0: none
};

struct hp_shape {
    int64_t most_tokens, most_rows;    // of a step
    int64_t vocabulary, positions, blocks, block_size;
    int64_t heads, kv_heads, head;
    int32_t cache_type, buffers;
    const int64_t* columns;            // of each buffer
};

struct hp_step {
    int64_t tokens, requests, rows, table_columns;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    const int64_t* picked;      // [rows] places of tokens
    const int32_t* starts;      // [requests + 1]
    const int32_t* table;       // [requests, table_columns]
    float* logits;              // [rows, vocabulary]; null: only the best are wanted
    int64_t* best;              // [rows] the place of the greatest logit, as hp_program_best; or null
};

// Bits of the levels that are compiled here and that this processor has.
int32_t hp_levels();
int32_t hp_abi();
// Null for a level that is not there, for operations that read or write beside their buffers, or
// without memory.
void* hp_program_new(int32_t level, int32_t threads, const hp_op* ops, int64_t count,
                     const hp_shape* shape);
void hp_program_free(void* program);
// Have all runs end between two pieces of work, within milliseconds, while *ended is not 0.
void hp_program_watch(void* program, const int32_t* ended);
// Run the operations [first, last). 0, or 1 + the place in hp_step's list of what is out of range;
// -1: it was ended, and what it should have computed is not there.
int32_t hp_program_run(void* program, const hp_step* step, int64_t first, int64_t last);
// best[i]: the place of the greatest of logits [rows, count], -1 where there is none.
void hp_program_best(void* program, const float* logits, int64_t rows, int64_t count,
                     int64_t* best);
// tokens[i]: what wishes[i] chooses of logits [rows, count]; -1 where there is nothing to choose from,
// -2 where the reference must decide.
void hp_program_choose(void* program, const float* logits, int64_t rows, int64_t count,
                       const hp_wish* wishes, int64_t* tokens);
// A buffer, [most_tokens, its columns]; null if there is none. Good until the next run.
float* hp_program_buffer(void* program, int64_t index);

}
#pragma GCC visibility pop
