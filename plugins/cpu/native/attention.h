// Attention over a paged cache, some keys at a time, with a running softmax.
#pragma once

#include "kernels.h"
#include "rows.h"

namespace {

// Add to M rows of sums, `head` numbers each, the values weighed by M rows of weights.
template <int M, int N, class T>
__attribute__((noinline)) void weigh(const float* weights, const T* const* values, int64_t keys,
                                     int64_t from, int64_t count, float* out, int64_t head) {
    Vec total[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float* at = out + i * head + from + j * LANES;
            total[i][j] = N == 1 ? load_part(at, count) : load(at);
        }
    for (int64_t key = 0; key < keys; key++) {
        const auto value = [&](int j) {
            const T* at = values[key] + from + j * LANES;
            return N == 1 && count < LANES ? load_part(at, count) : load(at);
        };
        Vec weight[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) weight[i] = in_register(all(weights[i * hardpoint::KEY_TILE + key]));
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            const Vec own = in_register(value(j));
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) total[i][j] += weight[i] * own;
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

// Scores of M rows of queries with LANES keys, which lie column by column: each is summed up in the
// very order of `products`, lane by lane along the head, then the halves of the lanes.
template <int M>
struct Scores {
    // The sums over every EVERY-th column from `first` on.
    template <int EVERY>
    inline __attribute__((always_inline)) void add_up(int first, Vec (&out)[M]) const {
        if constexpr (EVERY == LANES) {
            for (int i = 0; i < M; i++) out[i] = Vec{};
            for (int64_t k = first; k < head; k += LANES) {
                const Vec key = in_register(load(keys + k * hardpoint::KEY_TILE));
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) out[i] += all(query[i * head + k]) * key;
            }
        } else {
            Vec other[M];
            add_up<2 * EVERY>(first, out);
            add_up<2 * EVERY>(first + EVERY, other);
            for (int i = 0; i < M; i++) out[i] += other[i];
        }
    }
    const float* query;
    const float* keys;  // [head, KEY_TILE]
    int64_t head;
};

template <int M>
__attribute__((noinline)) void score_rows(const float* query, int64_t head, const float* keys,
                                          int64_t count, float* scores) {
    for (int64_t k = 0; k < count; k += LANES) {
        Vec found[M];
        Scores<M>{query, keys + k, head}.template add_up<1>(0, found);
        for (int i = 0; i < M; i++) save(scores + i * hardpoint::KEY_TILE + k, found[i]);
    }
}

// Rows as columns: to[i][row] = from[row][i].
inline void turn(const float* const* from, int64_t rows, int64_t head, float* to) {
    using hardpoint::KEY_TILE;
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        int64_t i = 0;
        for (; i + 4 <= head; i += 4) {
            Four in[4];
            for (int r = 0; r < 4; r++) memcpy(&in[r], from[row + r] + i, sizeof(Four));
            const Four a = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
            const Four b = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
            const Four c = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
            const Four d = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
            const Four out[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5),
                                 __builtin_shufflevector(a, b, 2, 3, 6, 7),
                                 __builtin_shufflevector(c, d, 0, 1, 4, 5),
                                 __builtin_shufflevector(c, d, 2, 3, 6, 7)};
            for (int r = 0; r < 4; r++) memcpy(to + (i + r) * KEY_TILE + row, &out[r], sizeof(Four));
        }
        for (; i < head; i++)
            for (int r = 0; r < 4; r++) to[i * KEY_TILE + row + r] = from[row + r][i];
    }
    for (; row < rows; row++)
        for (int64_t i = 0; i < head; i++) to[i * KEY_TILE + row] = from[row][i];
}

constexpr int SCORED = LANES == 16 ? 4 : 2;   // rows of queries that are scored together
constexpr int WEIGHED = LANES == 16 ? 6 : 3;  // and whose values are added up together

struct Softmax {  // of one row, so far
    float greatest, total;
};

// Turn a row of scores into weights; bring what was summed before to the new greatest score. Where
// no key was seen yet there is none, and all weights are zero.
inline void soften(float* scores, Softmax& state, float* out, int64_t head) {
    const float nothing = -__builtin_inff();
    Vec top = load(scores);
    for (int64_t k = LANES; k < hardpoint::KEY_TILE; k += LANES) {
        Vec next = load(scores + k);
        top = larger(next, top);
    }
    const float own = highest(top), greatest = own > state.greatest ? own : state.greatest;
    const float shift = greatest == nothing ? 0.0f : greatest;
    Vec total = {};
    for (int64_t k = 0; k < hardpoint::KEY_TILE; k += LANES) {
        Vec weight = exponential(load(scores + k) - shift);
        save(scores + k, weight);
        total += weight;
    }
    if (greatest != state.greatest) {
        const float factor = exponential(state.greatest - shift);
        for (int64_t i = 0; i < head; i++) out[i] *= factor;
        state = {greatest, state.total * factor};
    }
    state.total += sum(total);
}

inline void merge(float* out, Softmax& state, const float* other, const Softmax& next, int64_t head) {
    const float top = next.greatest > state.greatest ? next.greatest : state.greatest;
    const float shift = top == -__builtin_inff() ? 0.0f : top;
    const float own = exponential(state.greatest - shift);
    const float added = exponential(next.greatest - shift);
    for (int64_t i = 0; i < head; i++) out[i] = out[i] * own + other[i] * added;
    state = {top, state.total * own + next.total * added};
}

inline float scale_behind(const int8_t* numbers, int64_t head) {
    float scale;
    memcpy(&scale, numbers + head, 4);
    return scale;
}

inline void widen_rows(const float* const* from, int64_t rows, int64_t, float*, const float** at) {
    for (int64_t row = 0; row < rows; row++) at[row] = from[row];
}
template <class T>
inline void widen_rows(const T* const* from, int64_t rows, int64_t head, float* to, const float** at) {
    for (int64_t row = 0; row < rows; row++, to += head) {
        int64_t i = 0;
        for (; i + LANES <= head; i += LANES) save(to + i, load(from[row] + i));
        if (i < head) save_part(to + i, load_part(from[row] + i, head - i), head - i);
        at[row] = to;
    }
}

// The keys that some queries see, tile by tile of [begin, end): sums of values, not yet divided.
template <class T>
void attend_keys(const hardpoint::Attention& work, const float* query, int64_t begin, int64_t end,
                 float* scores, float* widened, float* out, Softmax* state) {
    using hardpoint::KEY_TILE;
    constexpr bool SCALED = sizeof(T) == 1;
    const int64_t head = work.head, group = work.group, rows = work.tokens * group;
    const int64_t bytes = hardpoint::cached_bytes(work.type, head);
    for (int64_t row = 0; row < rows; row++) state[row] = {-__builtin_inff(), 0.0f};
    memset(out, 0, size_t(rows * head) * 4);
    for (int64_t tile = begin; tile < end; tile += KEY_TILE) {
        const int64_t keys = least(KEY_TILE, end - tile);
        const T* key_at[KEY_TILE];
        const T* value_at[KEY_TILE];
        const int32_t* block = work.table + tile / work.block_size;
        for (int64_t k = 0, inside = tile % work.block_size; k < keys; k++, inside++) {
            if (inside == work.block_size) inside = 0, block++;
            const int64_t slot = *block * work.block_size + inside;
            const int64_t place = (slot * work.kv_heads + work.kv_head) * bytes;
            key_at[k] = (const T*)((const char*)work.keys + place);
            value_at[k] = (const T*)((const char*)work.values + place);
        }
        float key_scales[KEY_TILE], value_scales[KEY_TILE];
        if constexpr (SCALED)
            for (int64_t k = 0; k < keys; k++) {
                key_scales[k] = scale_behind(key_at[k], head);
                value_scales[k] = scale_behind(value_at[k], head);
            }
        // With many rows it pays to widen keys and values once, and to turn the keys.
        const bool many = rows > 8;
        float* wide = widened + KEY_TILE * head;
        const float *wide_keys[KEY_TILE], *wide_values[KEY_TILE];
        if (many) {
            widen_rows(key_at, keys, head, wide, wide_keys);
            turn(wide_keys, keys, head, widened);
            in_tiles<SCORED>(rows, [&](auto tall, int64_t row) {
                score_rows<decltype(tall)::value>(query + row * head, head, widened, keys,
                                                  scores + row * KEY_TILE);
            });
            widen_rows(value_at, keys, head, wide, wide_values);
        } else {
            multiply<false>(query, head, rows, head, 0, keys, [&](int64_t key) { return key_at[key]; },
                            [&](int64_t row, int64_t key, const auto& some) {
                                for (const auto& own : some)
                                    memcpy(scores + row++ * KEY_TILE + key, own, sizeof own);
                            });
        }
        for (int64_t row = 0; row < rows; row++) {
            float* mine = scores + row * KEY_TILE;
            const int64_t position = work.position + row / group;
            const int64_t seen = most(0, least(keys, position + 1 - tile));
            if constexpr (SCALED)
                for (int64_t k = 0; k < seen; k++) mine[k] *= key_scales[k];
            if (work.cap != 0.0f)
                for (int64_t k = 0; k < seen; k += LANES)
                    save(mine + k, tangent(load(mine + k) / work.cap) * work.cap);
            for (int64_t k = seen; k < KEY_TILE; k++) mine[k] = -__builtin_inff();
            if (work.window > 0) {
                const int64_t hidden = least(seen, position - work.window + 1 - tile);
                for (int64_t k = 0; k < hidden; k++) mine[k] = -__builtin_inff();
            }
            soften(mine, state[row], out + row * head, head);
            if constexpr (SCALED)
                for (int64_t k = 0; k < keys; k++) mine[k] *= value_scales[k];
        }
        const auto add_up = [&](auto at) {
            in_tiles<WEIGHED>(rows, [&](auto tall, int64_t row) {
                weigh_rows<decltype(tall)::value>(scores + row * KEY_TILE, at, keys, out + row * head,
                                                  head);
            });
        };
        many ? add_up((const float* const*)wide_values) : add_up((const T* const*)value_at);
    }
}

struct Parts {  // of a piece of attention's scratch, each [rows, ...]
    Parts(const hardpoint::Attention& work, float* scratch) {
        const int64_t size = work.tokens * work.group * work.head;
        query = scratch;
        out = query + size;
        other = out + size;
        scores = other + size;
        widened = scores + work.tokens * work.group * hardpoint::KEY_TILE;
    }
    float *query, *out, *other, *scores;
    float* widened;  // keys and values of a tile
};

constexpr int64_t MOST_GROUP = 64;

inline void take_queries(const hardpoint::Attention& work, float* query) {
    const int64_t head = work.head, group = work.group;
    for (int64_t row = 0; row < work.tokens * group; row++) {
        const float* from = work.query + row / group * work.query_stride + row % group * head;
        for (int64_t i = 0; i < head; i++) query[row * head + i] = from[i] * work.scale;
    }
}

inline void attend_span(const hardpoint::Attention& work, const Parts& parts, int64_t span,
                        float* out, Softmax* state) {
    using namespace hardpoint;
    const int64_t begin = most(span * SPAN, first_tile(work.position, work.window));
    const int64_t end = least((span + 1) * SPAN, work.position + work.tokens);
    if (work.type == BF16)
        attend_keys<uint16_t>(work, parts.query, begin, end, parts.scores, parts.widened, out, state);
    else if (work.type == INT8)
        attend_keys<int8_t>(work, parts.query, begin, end, parts.scores, parts.widened, out, state);
    else
        attend_keys<float>(work, parts.query, begin, end, parts.scores, parts.widened, out, state);
}

inline void put(const hardpoint::Attention& work, const float* out, const Softmax* state) {
    const int64_t head = work.head, group = work.group;
    for (int64_t row = 0; row < work.tokens * group; row++) {
        float* to = work.out + row / group * work.out_stride + row % group * head;
        const float factor = 1.0f / state[row].total;
        for (int64_t i = 0; i < head; i++) to[i] = out[row * head + i] * factor;
    }
}

// Keys are taken span by span wherever they are computed, so that several threads may take a span
// each: the sums are the same.
void attend(const hardpoint::Attention& work, float* scratch) {
    using namespace hardpoint;
    const Parts parts(work, scratch);
    const int64_t head = work.head, rows = work.tokens * work.group;
    Softmax state[QUERY_TILE * MOST_GROUP], next[QUERY_TILE * MOST_GROUP];
    take_queries(work, parts.query);
    const Spans spans = spans_of(work.position, work.tokens, work.window);
    attend_span(work, parts, spans.first, parts.out, state);
    for (int64_t span = spans.first + 1; span < spans.last; span++) {
        attend_span(work, parts, span, parts.other, next);
        for (int64_t row = 0; row < rows; row++)
            merge(parts.out + row * head, state[row], parts.other + row * head, next[row], head);
    }
    put(work, parts.out, state);
}

// One span of it: `out` gets [rows, head] sums, then [rows, 2] of what the softmax knows.
void attend_part(const hardpoint::Attention& work, int64_t span, float* out, float* scratch) {
    const Parts parts(work, scratch);
    const int64_t rows = work.tokens * work.group;
    Softmax state[hardpoint::QUERY_TILE * MOST_GROUP];
    take_queries(work, parts.query);
    attend_span(work, parts, span, out, state);
    memcpy(out + rows * work.head, state, size_t(rows) * sizeof(Softmax));
}

// What the spans' parts, next to each other, come to; changes them.
void join(const hardpoint::Attention& work, int64_t spans, float* parts) {
    const int64_t head = work.head, rows = work.tokens * work.group, size = rows * (head + 2);
    Softmax* state = (Softmax*)(parts + rows * head);
    for (int64_t span = 1; span < spans; span++) {
        const float* other = parts + span * size;
        const Softmax* next = (const Softmax*)(other + rows * head);
        for (int64_t row = 0; row < rows; row++)
            merge(parts + row * head, state[row], other + row * head, next[row], head);
    }
    put(work, parts, state);
}

}  // namespace
