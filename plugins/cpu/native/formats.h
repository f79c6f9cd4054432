// How matrices are held: rows as others have them, or packed for the kernels.
//
// A packed matrix is cut into panels of 16 rows. A panel is a run of blocks, each some columns of
// all its rows: first their scales, then their numbers, four columns of a row side by side (two of
// bfloat16). The bytes are the same at every level. Rows and columns that fill up the last panel
// and the last block are zero.
#pragma once

#include <cstdint>

namespace hardpoint {

enum Type : int32_t {
    F32 = 0,   // rows
    BF16 = 1,  // rows
    F16 = 2,   // rows, to be packed only
    F32_PANELS = 3,
    BF16_PANELS = 4,
    INT8 = 5,  // int8 with a bfloat16 scale for 64 columns; also the type of 8-bit caches
    W8A8 = 6,  // the same, multiplied with int8 activations
    W4A8 = 7,  // as Q4_1, from any weights
    Q8_0 = 8,  // these are GGUF's
    Q4_0 = 9,
    Q4_1 = 10,
    Q4_K = 11,
    Q6_K = 12,
    Q8_0_A8 = 13,  // the same bytes, multiplied with int8 activations
    Q4_0_A8 = 14,
    Q4_1_A8 = 15,
    Q4_K_A8 = 16,
    Q6_K_A8 = 17,
    BF16_A16 = 18,  // the bytes of BF16, multiplied with bfloat16 activations
    TYPES = 19,
};

// The type that has the same bytes and is packed to.
inline int32_t held_as(int32_t type) {
    return type == BF16_A16 ? BF16 : type >= Q8_0_A8 ? type - Q8_0_A8 + Q8_0 : type;
}

constexpr int32_t LAYOUT = 2;   // changed with any change of the bytes
constexpr int64_t PANEL = 16;   // rows

struct Matrix {  // `rows` of `cols` numbers
    const void* data;
    int64_t rows, cols;
    int32_t type;
};

struct Vector {  // float32 or bfloat16; null: there is none
    const void* data;
    int32_t type;
};

struct Block {  // of a panel
    int64_t columns, bytes;
};

constexpr int64_t HALVES = PANEL * 2;        // bytes of one 16-bit number for each row
constexpr int64_t NIBBLES = PANEL * 32 / 2;  // bytes of 32 columns of 4 bits
constexpr int64_t Q4_K_GROUP = 2 * PANEL + NIBBLES;                  // scales, mins, numbers
constexpr int64_t Q6_K_GROUP = 2 * PANEL + NIBBLES + NIBBLES / 2;    // two scales, numbers

inline Block block_of(int32_t type) {
    switch (held_as(type)) {
    case F32_PANELS: return {1, PANEL * 4};
    case BF16_PANELS: return {2, PANEL * 4};
    case INT8:
    case W8A8: return {64, HALVES + PANEL * 64};
    case Q8_0: return {32, HALVES + PANEL * 32};
    case Q4_0: return {32, HALVES + NIBBLES};
    case W4A8:
    case Q4_1: return {32, 2 * HALVES + NIBBLES};
    case Q4_K: return {256, 2 * HALVES + 8 * Q4_K_GROUP};
    case Q6_K: return {256, HALVES + 8 * Q6_K_GROUP};
    default: return {0, 0};  // not packed
    }
}

inline bool is_packed(int32_t type) { return block_of(type).columns > 0; }

inline int64_t panel_bytes(int32_t type, int64_t cols) {
    const Block block = block_of(type);
    return (cols + block.columns - 1) / block.columns * block.bytes;
}

// Columns of activations that are prepared together for a type: that share a scale as int8, or that
// are put into another order for rows of bfloat16. 0: they are multiplied as they are.
inline int64_t activation_group(int32_t type) {
    return type == W8A8 ? 64 : type == BF16 || type == W4A8 || type >= Q8_0_A8 ? 32 : 0;
}

// Columns whose sum is kept beside them.
inline int64_t sum_group(int32_t type) { return type == Q6_K_A8 ? 16 : activation_group(type); }

// What is too much in each number as it is multiplied. Of such types a row of activations keeps, in
// the place of its sums, minus so many times the sum of each group, an int32: sums of products begin
// there.
inline int32_t offset_of(int32_t type) {
    return type == W8A8 || type == Q8_0_A8 ? 128 : type == Q4_0_A8 ? 8 : 0;
}

// Bytes of a row of prepared activations.
inline int64_t activation_bytes(int32_t type, int64_t cols) {
    const int64_t group = activation_group(type);
    const int64_t groups = (cols + group - 1) / group;
    if (held_as(type) == BF16) return groups * group * 4;
    return (groups * (group + 4 + 4 * (group / sum_group(type))) + 63) / 64 * 64;
}

}  // namespace hardpoint

#pragma GCC visibility push(default)
extern "C" {

int32_t hp_layout();
// Bytes of a packed matrix; -1 for what cannot be packed.
int64_t hp_pack_bytes(int32_t type, int64_t rows, int64_t cols);
// Pack `count` rows, from `first` on, of a matrix of `rows` into `out`, which is zero where nothing
// was packed before. `source_type`: of rows, or GGUF's own blocks. 0; 1: the types do not go
// together; 2: out of range; 3: no memory.
int32_t hp_pack(int32_t type, int32_t source_type, const void* source, int64_t first, int64_t count,
                int64_t rows, int64_t cols, void* out);
// The numbers of `count` rows from `first` on, as float32 [count, cols].
int32_t hp_unpack(int32_t type, const void* data, int64_t rows, int64_t cols, int64_t first,
                  int64_t count, float* out);

}
#pragma GCC visibility pop
