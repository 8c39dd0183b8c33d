// Failures of a run, and counts of what its problems have covered.
#pragma once
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "anyflex_cpu.h"

namespace native_test {

inline std::atomic<int> failures{0};

inline void compare(const char* what, int64_t number, double found, double wanted, double limit) {
    if (found == wanted || (std::isnan(found) && std::isnan(wanted))) return;
    // Without this test a limit that grows with the wanted value would accept anything for an
    // infinite one.
    if (std::isfinite(wanted) && std::fabs(found - wanted) <= limit) return;
    if (failures++ < 20)
        std::printf("problem %" PRId64 ": %s is %g, wanted %g (limit %g), level %s\n", number, what,
                    found, wanted, limit, af_isa());
}

// How many problems had each property: a run that leaves one of them out proves less than it says.
struct coverage {
    std::atomic<int64_t> interpreted{0}, loads{0}, scatters{0}, halves{0}, bf16s{0}, strides{0},
        grouped_decodes{0}, split_decodes{0}, decodes_in_lanes{0}, decodes_in_panels{0},
        parted_backwards{0}, wide_tiles{0}, row_gaps{0}, column_gaps{0}, mixed_rows{0},
        mixed_columns{0}, nonfinite_seen{0}, nonfinite_unseen{0}, reads_outside{0},
        shared_batches{0}, packed{0}, paged{0}, dropouts{0}, masks_by_head{0},
        several_threads{0}, calls_on_teams{0};
    bool has_tiles = false;  // some level has

    // visit(name, count); -1: no level here could.
    template <class F> void each(const F& visit) const {
        visit("interpreted mods", interpreted);
        visit("captured loads", loads);
        visit("captured gradients by the interpreter", scatters);
        visit("float16", halves);
        visit("bfloat16", bf16s);
        visit("odd strides", strides);
        visit("decoding with several heads a key head", grouped_decodes);
        visit("decoding in splits", split_decodes);
        visit("decoding of more than 16 rows, a lane each", decodes_in_lanes);
        visit("decoding of more rows than a panel has lanes", decodes_in_panels);
        visit("backward in several parts of dQ", parted_backwards);
        visit("backward in AMX's tiles of 256 keys", has_tiles ? wide_tiles.load() : -1);
        visit("rows of a mask with gaps", row_gaps);
        visit("columns of a mask with gaps", column_gaps);
        visit("rows of a mask with FULL and PARTIAL runs", mixed_rows);
        visit("columns of a mask with FULL and PARTIAL runs", mixed_columns);
        visit("NaN or infinity that rows see", nonfinite_seen);
        visit("NaN or infinity that no row sees", nonfinite_unseen);
        visit("reads outside", reads_outside);
        visit("keys of one batch for all", shared_batches);
        visit("packed sequences", packed);
        visit("keys in pages", paged);
        visit("dropout", dropouts);
        visit("a mask a head", masks_by_head);
        visit("mods on several threads of a call", several_threads);
        visit("calls on another runtime's threads", calls_on_teams);
    }
};

}  // namespace native_test
