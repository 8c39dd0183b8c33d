// Scale of scores, and where it is applied.
#pragma once
#include "anyflex_cpu.h"

namespace AF_LEVEL {

// With a score program scores are stored scaled. Without one the scale waits for exp2 if it is
// positive, because it must keep the order of scores, and at most 1, because an overflow must show
// in the stored score.
struct score_scale {
    float stored;   // scores are stored with it
    float factor;   // of a stored score on its way into exp2
    double natural;  // a stored score times this is the score
};

static inline score_scale scale_of(const af_problem& p) {
    const float scale = static_cast<float>(p.scale);
    if (!p.score && scale > 0.0f && scale <= 1.0f)
        return {1.0f, static_cast<float>(p.scale * 1.4426950408889634), p.scale};
    return {scale, 1.4426950408889634f, 1.0};
}

}  // namespace AF_LEVEL
