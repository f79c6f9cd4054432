// Choosing a token of each row of logits: the greatest, or one that is drawn by the rule of
// hardpoint/draws.py. What a row gets depends on that row alone.
//
// A draw compares numbers that another implementation rounds otherwise in their last bits. Where
// that could change the token, because two come in almost together or one stands at the very edge
// of a cut, the row is left undecided, for the reference to decide.
#pragma once

#include <cstdint>
#include <vector>

#pragma GCC visibility push(default)
extern "C" {

struct hp_wish {
    float temperature;  // 0: the greatest
    float min_p, top_p;  // 0 and 1: off
    int64_t top_k;       // 0: off
    uint64_t key;        // of the draw
};

}
#pragma GCC visibility pop

namespace hardpoint {

constexpr int64_t NO_NUMBERS = -1;  // a logit is NaN, or the greatest is not finite
constexpr int64_t UNDECIDED = -2;

// The place of the token, NO_NUMBERS or UNDECIDED; `scratch` grows to 2 * count.
int64_t choose(const float* logits, int64_t count, const hp_wish& wish, std::vector<float>& scratch);

}  // namespace hardpoint
