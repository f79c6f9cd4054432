// Log-probabilities of one row of logits, as a request asks for them.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Of `logits` [count]: values[0] is that of `token`, then the `most` best, best first and among
// equals the lower ids, whose ids come to `best`, then those of the `listed` ids. ranks[0] is how
// many values are not below the token's, ranks[1] not below the last of the best. Values are
// log-probabilities, or the logits where they are not `normalised`. 1, and nothing is written, for
// a row with NaN or whose greatest is not finite; 2 where there is no memory; else 0.
int32_t hp_score(const float* logits, int64_t count, int32_t normalised, int64_t token,
                 int64_t most, const int64_t* listed, int64_t num_listed, float* values,
                 int64_t* best, int64_t* ranks);

}
#pragma GCC visibility pop
