// Which columns of a tile are worth computing.
#pragma once
#include <string.h>

#include "softmax.h"
#include "tiles.h"

namespace AF_LEVEL {

// Stretches of 32-column steps in which rows [first, first + rows) have a live pair; `all` says
// that every pair of them is live. `part` has room for half as many stretches as there are steps,
// rounded up.
static int live_parts(const live_tile& live, int first, int rows, int64_t columns, stretch* part,
                      bool* all) {
    int parts = 0;
    *all = true;
    for (int32_t c = 0; c < columns; c += 32) {
        uint32_t any = 0, every = 0xffffffffu;
        for (int r = first; r < first + rows; ++r) {
            uint32_t bits;
            memcpy(&bits, live.live + r * live.ld + c / 16, 4);
            any |= bits;
            every &= bits;
        }
        *all &= every == 0xffffffffu;
        if (!any) continue;
        if (parts > 0 && part[parts - 1].end == c)
            part[parts - 1].end = c + 32;
        else
            part[parts++] = {c, c + 32};
    }
    return parts;
}

}  // namespace AF_LEVEL
