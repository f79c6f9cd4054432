// How rows of activations are cut up for registers. No number depends on it.
#pragma once

#include <cstdint>

namespace {

template <int N>
struct Number {
    static constexpr int value = N;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Call some(Number<M>, row) for all rows, M at most TALL; few different M, as each is code.
template <int TALL, class Some>
inline void in_tiles(int64_t rows, Some some) {
    int64_t row = 0;
    for (; row + TALL <= rows; row += TALL) some(Number<TALL>{}, row);
    if constexpr (TALL > 4)
        for (; row + 4 <= rows; row += 4) some(Number<4>{}, row);
    if constexpr (TALL > 2)
        for (; row + 2 <= rows; row += 2) some(Number<2>{}, row);
    for (; row < rows; row++) some(Number<1>{}, row);
}

}  // namespace
