// A mixture of experts: the rows of each expert together, then each row's shares in the order of
// the experts.

#include <algorithm>
#include <cstring>

#include "execution.h"

namespace hardpoint {

// Sort the places (row, rank) that experts were chosen in by expert, in the order of rows: slots
// [starts[e], starts[e + 1]) are of expert e. A choice that is none (a NaN) is expert 0's, whose
// share is NaN.
void Program::route_experts(const hp_op& op, int64_t rows, Member& own) const {
    const int64_t wanted = op.per_token, stride = columns(op.second);
    const float* routes = at(op.second, 0);
    const auto expert_of = [&](int64_t place) {
        const float chosen = routes[place / wanted * stride + place % wanted];
        return chosen >= 0.0f && chosen < float(op.columns) ? int64_t(chosen) : 0;
    };
    own.starts.assign(size_t(op.columns + 1), 0);
    own.slots.resize(size_t(rows * wanted));
    for (int64_t place = 0; place < rows * wanted; place++)
        own.starts[size_t(expert_of(place) + 1)]++;
    for (int64_t e = 0; e < op.columns; e++) own.starts[size_t(e + 1)] += own.starts[size_t(e)];
    std::vector<int64_t>& next = own.first_piece;
    next.assign(own.starts.begin(), own.starts.end());
    for (int64_t place = 0; place < rows * wanted; place++)
        own.slots[size_t(next[size_t(expert_of(place))]++)] = place;
}

void Program::run_experts(int64_t place, Member& own) {
    const hp_op& op = ops_[size_t(place)];
    const int64_t rows = rows_of(op), wanted = op.per_token, slots = rows * wanted;
    const int64_t inner = op.other.cols, hidden = op.other.rows / op.columns;
    const float* in = at(op.in, op.in_column);
    route_experts(op, rows, own);
    // Chunks of each expert's outputs, by its rows: `each(expert, first slot, slots, first, last)`.
    const auto in_pieces = [&](Counter& next, int64_t columns, int64_t outputs, auto each) {
        const int64_t block = row_block(columns), chunks = (outputs + CHUNK - 1) / CHUNK;
        std::vector<int64_t>& first = own.first_piece;
        first.assign(size_t(op.columns + 1), 0);
        for (int64_t e = 0; e < op.columns; e++) {
            const int64_t count = own.starts[size_t(e + 1)] - own.starts[size_t(e)];
            first[size_t(e + 1)] = first[size_t(e)] + (count + block - 1) / block * chunks;
        }
        share(next, first.back(), [&](int64_t i) {
            const int64_t e = std::upper_bound(first.begin(), first.end(), i) - first.begin() - 1;
            const int64_t part = i - first[size_t(e)], begin = part % chunks * CHUNK;
            const int64_t slot = own.starts[size_t(e)] + part / chunks * block;
            each(e, slot, std::min(block, own.starts[size_t(e + 1)] - slot), begin,
                 std::min(outputs, begin + CHUNK));
        });
    };
    const bool prepares = activation_group(op.weight.type) > 0;
    const int64_t bytes =
        prepares ? activation_bytes(op.weight.type, op.weight.cols) : op.weight.cols * 4;
    share(counter(place, 0), slots, [&](int64_t slot) {
        const float* from = in + own.slots[size_t(slot)] / wanted * columns(op.in);
        char* to = gathered_.data() + slot * bytes;
        if (prepares)
            kernels_.prepare(op.weight.type, from, op.weight.cols, to);
        else
            memcpy(to, from, size_t(bytes));
    });
    team_.meet();
    in_pieces(counter(place, 1), op.weight.cols, inner,
              [&](int64_t e, int64_t slot, int64_t count, int64_t first, int64_t last) {
                  const int64_t gate = e * 2 * inner + first;
                  kernels_.gated({gathered_.data() + slot * bytes, bytes, count}, op.weight, gate,
                                 gate + inner, last - first, {nullptr, F32}, op.activation,
                                 inner_.data() + slot * inner + first, inner, own.scratch.data());
              });
    team_.meet();
    const bool again = activation_group(op.other.type) > 0;
    const int64_t inner_bytes = again ? activation_bytes(op.other.type, inner) : inner * 4;
    const char* within = (const char*)inner_.data();
    if (again) {
        share(counter(place, 2), slots, [&](int64_t slot) {
            kernels_.prepare(op.other.type, inner_.data() + slot * inner, inner,
                              activations_.data() + slot * inner_bytes);
        });
        team_.meet();
        within = activations_.data();
    }
    in_pieces(counter(place, 3), inner, hidden,
              [&](int64_t e, int64_t slot, int64_t count, int64_t first, int64_t last) {
                  kernels_.linear({within + slot * inner_bytes, inner_bytes, count}, op.other,
                                  e * hidden + first, e * hidden + last, {nullptr, F32}, 0.0f, false,
                                  outer_.data() + slot * hidden + first, hidden, own.scratch.data());
              });
    team_.meet();
    // A row's slots are in the order of the experts; its share of each is added up there.
    std::vector<int64_t>& slot_of = own.first_piece;
    slot_of.assign(size_t(slots), 0);
    std::vector<int64_t>& seen = own.starts;
    seen.assign(size_t(rows), 0);
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t row = own.slots[size_t(slot)] / wanted;
        slot_of[size_t(row * wanted + seen[size_t(row)]++)] = slot;
    }
    share(counter(place, 4), rows, [&](int64_t row) {
        float* total = outer_.data() + slot_of[size_t(row * wanted)] * hidden;
        const float* routes = at(op.second, 0) + row * columns(op.second) + wanted;
        for (int64_t i = 0; i < wanted; i++) {
            const int64_t slot = slot_of[size_t(row * wanted + i)];
            const float part = routes[own.slots[size_t(slot)] % wanted];
            float* from = outer_.data() + slot * hidden;
            if (i == 0)
                for (int64_t k = 0; k < hidden; k++) total[k] *= part;
            else
                kernels_.add_scaled(from, hidden, part, total);
        }
        kernels_.add_scaled(total, hidden, 1.0f,
                            at(op.out, op.out_column) + row * columns(op.out));
    });
}

}  // namespace hardpoint
