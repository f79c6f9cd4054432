// What is computed of one row at a time: norms, embeddings, rotary positions, caches, choices.
#pragma once

#include "kernels.h"
#include "vectors.h"
#include "tiles.h"

namespace {

using hardpoint::Matrix;
using hardpoint::Vector;

inline Vec load_vector(const Vector& x, int64_t at, int64_t count) {
    return x.type == hardpoint::BF16 ? load_part((const uint16_t*)x.data + at, count)
                                     : load_part((const float*)x.data + at, count);
}

// each(first, how many) for all of `count`, a register at a time.
template <class Each>
inline void in_vectors(int64_t count, Each each) {
    for (int64_t k = 0; k < count; k += LANES) each(k, least(LANES, count - k));
}

template <class T, bool ADD>
void norm_of(const float* x, const T* weight, int64_t count, float eps, float* out) {
    Vec squares = {};
    in_vectors(count, [&](int64_t k, int64_t some) {
        const Vec part = load_part(x + k, some);
        squares += part * part;
    });
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(count) + eps);
    in_vectors(count, [&](int64_t k, int64_t some) {
        Vec value = load_part(x + k, some) * factor * load_part(weight + k, some);
        if (ADD) value = load_part(out + k, some) + value;
        save_part(out + k, value, some);
    });
}

void norm(const float* x, const Vector& weight, int64_t count, float eps, bool add, float* out) {
    const bool narrow = weight.type == hardpoint::BF16;
    if (narrow && add)
        norm_of<uint16_t, true>(x, (const uint16_t*)weight.data, count, eps, out);
    else if (narrow)
        norm_of<uint16_t, false>(x, (const uint16_t*)weight.data, count, eps, out);
    else if (add)
        norm_of<float, true>(x, (const float*)weight.data, count, eps, out);
    else
        norm_of<float, false>(x, (const float*)weight.data, count, eps, out);
}

void layer_norm(const float* x, const Vector& weight, const Vector& bias, int64_t count, float eps,
                float* out) {
    Vec total = {}, squares = {};
    in_vectors(count, [&](int64_t k, int64_t some) { total += load_part(x + k, some); });
    const float mean = sum(total) / float(count);
    in_vectors(count, [&](int64_t k, int64_t some) {
        for (int64_t i = 0; i < some; i++) out[k + i] = x[k + i] - mean;
        const Vec part = load_part(out + k, some);
        squares += part * part;
    });
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(count) + eps);
    in_vectors(count, [&](int64_t k, int64_t some) {
        Vec value = load_part(out + k, some) * factor * load_vector(weight, k, some);
        if (bias.data) value += load_vector(bias, k, some);
        save_part(out + k, value, some);
    });
}

void embed(const Matrix& table, int64_t row, float scale, float* out) {
    unpack_row(table.type, table.data, table.cols, row, out);
    for (int64_t k = 0; k < table.cols; k++) out[k] *= scale;
}

// Turn the halves of the first `turned` columns of each head.
void rotate(float* x, int64_t heads, int64_t head, int64_t turned, const float* cos,
            const float* sin) {
    const int64_t half = turned / 2;
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

void store(const float* x, int64_t heads, int64_t head, void* out, int32_t type) {
    using namespace hardpoint;
    if (type == F32) {
        memcpy(out, x, size_t(heads * head) * 4);
    } else if (type == BF16) {
        in_vectors(heads * head, [&](int64_t k, int64_t some) {
            save_part((uint16_t*)out + k, load_part(x + k, some), some);
        });
    } else {
        int8_t* to = (int8_t*)out;
        for (int64_t h = 0; h < heads; h++, x += head, to += head + 4) {
            float greatest = 0.0f, wrong = 0.0f;
            for (int64_t i = 0; i < head; i++) {
                const float size = __builtin_fabsf(x[i]);
                greatest = size > greatest ? size : greatest;
                wrong += x[i] * 0.0f;
            }
            const bool good = wrong == 0.0f && greatest > 1e-30f;
            const float factor = good ? 127.0f / greatest : 0.0f;
            const float scale = good ? greatest / 127.0f : wrong;
            for (int64_t i = 0; i < head; i++)
                to[i] = good ? int8_t(__builtin_rintf(x[i] * factor)) : int8_t(0);
            memcpy(to + head, &scale, 4);
        }
    }
}

inline Vec activated(Vec x, int32_t activation) {
    if (activation == hardpoint::SILU) return x / (1.0f + exponential(-x));
    const Vec inner = (x * x * x * 0.044715f + x) * 0.7978845608f;  // gelu, by its tangent
    return 0.5f * x * (1.0f + tangent(inner));
}

void activate(const float* gates, const float* ups, int64_t count, int32_t activation, float* out) {
    in_vectors(count, [&](int64_t k, int64_t some) {
        const Vec gate = load_part(gates + k, some), up = load_part(ups + k, some);
        save_part(out + k, activated(gate, activation) * up, some);
    });
}

// out: the places of the `wanted` greatest of x, the first of equal ones, then their shares. Where
// one is NaN all shares are.
void route(const float* x, int64_t count, int64_t wanted, bool normalised, float* out) {
    float top = x[0], total = 0.0f, wrong = 0.0f, taken = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        top = x[i] > top ? x[i] : top;
        wrong += x[i] * 0.0f;
    }
    for (int64_t i = 0; i < count; i++) total += exponential(x[i] - top);
    for (int64_t rank = 0; rank < wanted; rank++) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++) {
            bool used = false;
            for (int64_t r = 0; r < rank; r++) used |= out[r] == float(i);
            if (!used && (best < 0 || x[i] > x[best])) best = i;
        }
        out[rank] = float(best);
        const float share = exponential(x[best] - top) / total + wrong;
        out[wanted + rank] = share;
        taken += share;
    }
    if (normalised)
        for (int64_t rank = 0; rank < wanted; rank++) out[wanted + rank] /= taken;
}

void add_scaled(const float* x, int64_t count, float factor, float* out) {
    in_vectors(count, [&](int64_t k, int64_t some) {
        save_part(out + k, load_part(out + k, some) + load_part(x + k, some) * factor, some);
    });
}

inline float open(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The greatest of x and its place, if it is greater than what `best` holds already.
void rank(const float* x, int64_t count, int64_t place, hardpoint::Best& best) {
    Vec top = all(-__builtin_inff());
    Ints unequal = {};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        Vec next = load(x + k);
        unequal |= (next != next);
        top = larger(next, top);
    }
    float greatest = highest(top);
    best.wrong |= any(unequal);
    for (; k < count; k++) {
        best.wrong |= x[k] != x[k];
        greatest = x[k] > greatest ? x[k] : greatest;
    }
    if (!(greatest > best.value)) return;
    for (k = 0; k < count && x[k] != greatest;) k++;
    best.value = greatest;
    best.place = place + k;
}

}  // namespace
