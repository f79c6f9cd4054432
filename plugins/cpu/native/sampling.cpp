#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "vectors.h"

namespace hardpoint {
namespace {

constexpr float MARGIN = 1e-5f;     // relative, of what a race compares
constexpr double SUM_MARGIN = 2e-4; // relative, of sums over the vocabulary in float32
constexpr float SHARE = float((1.0 - 1.0 / (1 << 24)) / double(int64_t(1) << 40));
constexpr int BUCKETS = 1024, PER_UNIT = 16;  // of logits below the greatest

typedef std::pair<float, int64_t> Place;  // a logit and its token

inline bool before(const Place& a, const Place& b) {  // in falling order, the lower token first
    return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// The 40 bits of a token's number, the lowest set.
inline int64_t number_of(uint64_t key, int64_t token) {
    uint64_t z = key + uint64_t(token + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return int64_t((z ^ (z >> 31)) >> 24) | 1;
}

int64_t greatest(const float* x, int64_t count) {
    const float low = -__builtin_inff();
    Vec top = all(low);
    Ints unequal = {};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        Vec next = load(x + k);
        unequal |= (next != next);
        top = next > top ? next : top;
    }
    float best = low;
    bool nan = false;
    for (int lane = 0; lane < LANES; lane++) {
        nan |= unequal[lane] != 0;
        best = top[lane] > best ? top[lane] : best;
    }
    for (; k < count; k++) {
        nan |= x[k] != x[k];
        best = x[k] > best ? x[k] : best;
    }
    if (nan || best - best != 0.0f) return NO_NUMBERS;
    for (k = 0; k < count; k++)
        if (x[k] == best) return k;
    return NO_NUMBERS;
}

// Which tokens a row's cuts keep.
struct Cuts {
    float least = -__builtin_inff();      // scaled logits below are cut by top-k
    float sure = 0.0f, perhaps = 0.0f;    // weights: kept from here on, cut below, by min-p
    bool by_share = false;
    Place last_kept{0.0f, 0}, first_cut{0.0f, 0};

    // 1: kept, 0: cut, -1: at the edge.
    int status(float scaled, float weight, int64_t token) const {
        if (scaled < least || weight < perhaps || weight <= 0.0f) return 0;
        if (weight < sure) return -1;
        if (!by_share) return 1;
        const Place here{scaled, token};
        if (!before(last_kept, here)) return 1;
        return before(here, first_cut) ? -1 : 0;
    }
};

float kth_greatest(const float* x, int64_t count, int64_t k, std::vector<float>& heap) {
    heap.assign(x, x + k);
    auto greater = [](float a, float b) { return a > b; };
    std::make_heap(heap.begin(), heap.end(), greater);  // the least is in front
    for (int64_t i = k; i < count; i++) {
        if (x[i] <= heap.front()) continue;
        std::pop_heap(heap.begin(), heap.end(), greater);
        heap.back() = x[i];
        std::push_heap(heap.begin(), heap.end(), greater);
    }
    return heap.front();
}

inline int bucket_of(float scaled) {
    const float at = -scaled * PER_UNIT;
    return at < BUCKETS - 1 ? int(at) : BUCKETS - 1;
}

// Find where the best tokens' share of what is left reaches top_p. Whether that can be told.
bool cut_by_share(const float* scaled, const float* weights, int64_t count, double top_p,
                  Cuts& cuts) {
    double sums[BUCKETS] = {}, total = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const int status = cuts.status(scaled[i], weights[i], i);
        if (status < 0) return false;
        if (status > 0) sums[bucket_of(scaled[i])] += weights[i];
    }
    for (double sum : sums) total += sum;
    const double low = top_p * total * (1 - SUM_MARGIN), high = top_p * total * (1 + SUM_MARGIN);
    int first = BUCKETS, last = -1;  // the buckets in which it may be reached
    double sum = 0.0, sum_before = 0.0;
    for (int b = 0; b < BUCKETS && sum <= high; b++) {
        if (sum + sums[b] >= low) {
            if (first > b) {
                first = b;
                sum_before = sum;
            }
            last = b;
        }
        sum += sums[b];
    }
    std::vector<Place> edge;
    for (int64_t i = 0; i < count; i++) {
        if (cuts.status(scaled[i], weights[i], i) == 0) continue;
        const int b = bucket_of(scaled[i]);
        if (b >= first && b <= last) edge.push_back({scaled[i], i});
    }
    std::sort(edge.begin(), edge.end(), before);
    const float none = -__builtin_inff();
    cuts.by_share = true;
    // Better buckets are kept whole; with nothing behind them, everything is.
    Place kept{-float(first) / PER_UNIT, -1}, cut{none, 0};
    for (const Place& each : edge) {
        if (sum_before > high) {
            cut = each;
            break;
        }
        if (sum_before < low || sum_before == 0.0) kept = each;
        sum_before += weights[each.second];
    }
    if (cut.first == none && last < BUCKETS - 1 && last >= 0)
        cut = {-float(last + 1) / PER_UNIT, -1};
    cuts.last_kept = kept;
    cuts.first_cut = cut;
    return true;
}

}  // namespace

int64_t choose(const float* logits, int64_t count, const hp_wish& wish,
               std::vector<float>& scratch) {
    const int64_t best = greatest(logits, count);
    if (best < 0 || wish.temperature == 0.0f) return best;
    scratch.resize(size_t(2 * count + LANES));
    float* scaled = scratch.data();
    float* weights = scaled + count;
    const float top = logits[best] / wish.temperature;
    for (int64_t i = 0; i < count; i++) {
        const float heated = logits[i] / wish.temperature;
        scaled[i] = heated - top;
    }
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) save(weights + k, exponential(load(scaled + k)));
    for (; k < count; k++) weights[k] = exponential(all(scaled[k]))[0];

    Cuts cuts;
    if (wish.min_p > 0.0f) {
        cuts.perhaps = wish.min_p * (1.0f - MARGIN);
        cuts.sure = wish.min_p * (1.0f + MARGIN);
    }
    if (wish.top_k > 0 && wish.top_k < count) {
        std::vector<float> heap;
        cuts.least = kth_greatest(scaled, count, wish.top_k, heap);
    }
    if (wish.top_p < 1.0f && !cut_by_share(scaled, weights, count, wish.top_p, cuts))
        return UNDECIDED;

    const bool all_kept =
        !cuts.by_share && cuts.perhaps == 0.0f && cuts.least == -__builtin_inff();
    float first = 0.0f, second = 0.0f;  // of the race, the greatest quotients
    int64_t winner = UNDECIDED;
    for (int64_t i = 0; i < count; i++) {
        const float weight = weights[i];
        // The divisor is at least the share, and no share is below 2 ** -40.
        if (weight * 1.1e12f < first) continue;
        const int status = all_kept ? weight > 0.0f : cuts.status(scaled[i], weight, i);
        if (status == 0) continue;
        const float share = float(number_of(wish.key, i)) * SHARE;
        if (weight < share * first * 0.9999f) continue;
        const float quotient = weight / -log1pf(-share);
        if (quotient > first) {
            second = first;
            first = quotient;
            winner = status > 0 ? i : UNDECIDED;
        } else {
            second = quotient > second ? quotient : second;
        }
    }
    return second > first * (1.0f - MARGIN) ? UNDECIDED : winner;
}

}  // namespace hardpoint
