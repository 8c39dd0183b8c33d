// Columns of a tile that are worth computing.
#pragma once
#include <string.h>

#include "softmax.h"
#include "tiles.h"

namespace AF_LEVEL {

// The columns of a tile of up to 1024 columns with a live pair in some of a few rows.
template <int COLUMNS>
struct live_columns {
    int parts;
    stretch part[COLUMNS / 64 + 1];
    uint32_t whole_steps;  // bit c / 32: every pair of this step is live
    bool all;              // of every step
};

// Finds the parts in steps of 32 columns, for rows [first, first + rows).
template <int COLUMNS>
static live_columns<COLUMNS> live_columns_of(const live_tile& live, int first, int rows,
                                             int64_t columns) {
    static_assert(COLUMNS <= 1024, "a bit a step");
    live_columns<COLUMNS> of = {};
    of.all = true;
    for (int32_t c = 0; c < columns; c += 32) {
        uint32_t any = 0, every = 0xffffffffu;
        for (int r = first; r < first + rows; ++r) {
            uint32_t bits;
            memcpy(&bits, live.live + r * live.ld + c / 16, 4);
            any |= bits;
            every &= bits;
        }
        const bool whole = every == 0xffffffffu;
        of.all &= whole;
        of.whole_steps |= uint32_t(whole) << (c / 32);
        if (!any) continue;
        if (of.parts > 0 && of.part[of.parts - 1].end == c)
            of.part[of.parts - 1].end = c + 32;
        else
            of.part[of.parts++] = {c, c + 32};
    }
    return of;
}

// All columns are live.
template <int COLUMNS>
static live_columns<COLUMNS> every_column(int64_t columns) {
    live_columns<COLUMNS> of = {};
    of.parts = 1;
    of.part[0] = {0, static_cast<int32_t>(round_up(columns, tile_step))};
    of.whole_steps = 0xffffffffu;
    of.all = true;
    return of;
}

}  // namespace AF_LEVEL
