#include "scoring.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "vectors.h"

namespace hardpoint {
namespace {

typedef std::pair<float, int64_t> Place;  // a value and its token

constexpr int64_t STRETCH = 64 * LANES;  // numbers that are summed in float32

inline bool before(const Place& a, const Place& b) {  // in falling order, the lower token first
    return a.first > b.first || (a.first == b.first && a.second < b.second);
}

inline bool some(Ints flags) {
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= flags[lane];
    return any != 0;
}

// The greatest; NaN where there is one.
float greatest(const float* x, int64_t count) {
    Vec top = all(-__builtin_inff()), wrong = all(0.0f);
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        const Vec next = load(x + k);
        wrong = next != next ? next : wrong;
        top = next > top ? next : top;
    }
    float best = -__builtin_inff();
    for (int lane = 0; lane < LANES; lane++) {
        if (wrong[lane] != wrong[lane]) return wrong[lane];
        best = top[lane] > best ? top[lane] : best;
    }
    for (; k < count; k++) {
        if (x[k] != x[k]) return x[k];
        best = x[k] > best ? x[k] : best;
    }
    return best;
}

double sum_of_powers(const float* x, int64_t count, float top) {
    double total = 0.0;
    for (int64_t start = 0; start < count; start += STRETCH) {
        const int64_t end = std::min(start + STRETCH, count);
        Vec part = all(0.0f);
        int64_t k = start;
        for (; k + LANES <= end; k += LANES) part += exponential(load(x + k) - top);
        for (int lane = 0; lane < LANES; lane++) total += part[lane];
        for (; k < end; k++) total += exponential(x[k] - top);
    }
    return total;
}

// What of a row is asked for: values are (x - top) - log_sum.
struct Row {
    const float* x;
    int64_t count;
    float top, log_sum;

    float value(int64_t k) const { return (x[k] - top) - log_sum; }
    Vec values(int64_t k) const { return (load(x + k) - top) - log_sum; }

    int64_t not_below(float bound) const {
        Ints found = {};
        int64_t k = 0, number = 0;
        for (; k + LANES <= count; k += LANES) found -= (values(k) >= bound);
        for (int lane = 0; lane < LANES; lane++) number += found[lane];
        for (; k < count; k++) number += value(k) >= bound;
        return number;
    }

    // The `most` first, in no order; a heap whose front is the last of them.
    void collect(int64_t most, std::vector<Place>& heap) const {
        int64_t k = 0;
        for (; k < most; k++) heap.push_back({value(k), k});
        std::make_heap(heap.begin(), heap.end(), before);
        auto enter = [&](int64_t place) {
            const Place next{value(place), place};
            if (!before(next, heap.front())) return;
            std::pop_heap(heap.begin(), heap.end(), before);
            heap.back() = next;
            std::push_heap(heap.begin(), heap.end(), before);
        };
        for (; k + LANES <= count; k += LANES)
            if (some(values(k) > heap.front().first))
                for (int lane = 0; lane < LANES; lane++) enter(k + lane);
        for (; k < count; k++) enter(k);
    }
};

}  // namespace
}  // namespace hardpoint

using hardpoint::Place;

int32_t hp_score(const float* logits, int64_t count, int32_t normalised, int64_t token,
                 int64_t most, const int64_t* listed, int64_t num_listed, float* values,
                 int64_t* best, int64_t* ranks) {
    const float top = hardpoint::greatest(logits, count);
    if (!std::isfinite(top)) return 1;
    hardpoint::Row row{logits, count, 0.0f, 0.0f};
    if (normalised) {
        row.top = top;
        row.log_sum = float(std::log(hardpoint::sum_of_powers(logits, count, top)));
    }
    most = std::min(most, count);
    std::vector<Place> heap;
    if (most > 0) {
        try {
            heap.reserve(size_t(most));
        } catch (const std::bad_alloc&) {
            return 2;
        }
        row.collect(most, heap);
        std::sort(heap.begin(), heap.end(), hardpoint::before);
        ranks[1] = row.not_below(heap.back().first);
    }
    values[0] = row.value(token);
    ranks[0] = row.not_below(values[0]);
    for (int64_t i = 0; i < most; i++) {
        values[1 + i] = heap[size_t(i)].first;
        best[i] = heap[size_t(i)].second;
    }
    for (int64_t i = 0; i < num_listed; i++) values[1 + most + i] = row.value(listed[i]);
    return 0;
}
