// The jobs of the units in flight: where partitions begin, what jobs cost, and their order.
#pragma once
#include <stdlib.h>

#include "backward_plan.h"
#include "backward_visits.h"

namespace AF_LEVEL {

struct backward_job {
    int64_t cost;
    int32_t unit;       // of those in flight
    int32_t partition;
    int32_t partial;    // of captured sums
};

struct job_table {
    int64_t* tile_cost;    // [kv_tiles + 1]
    int32_t* bound;        // [units_in_flight][partitions + 1]: first kv tile of each partition
    backward_job* jobs;    // [units_in_flight * partitions], dearest first
    int64_t count;

    static job_table take(arena& memory, const backward_plan& plan) {
        job_table table;
        table.tile_cost = memory.take<int64_t>(plan.kv_tiles + 1);
        table.bound = memory.take<int32_t>(plan.units_in_flight * (plan.partitions + 1));
        table.jobs = memory.take<backward_job>(plan.units_in_flight * plan.partitions);
        table.count = 0;
        return table;
    }

    const int32_t* bounds(const backward_plan& plan, int64_t unit) const {
        return bound + unit * (plan.partitions + 1);
    }

    // Jobs of units [first, first + count_of_units).
    void fill(const af_problem& p, const backward_plan& plan, int64_t first, int64_t units,
              int64_t partials, bool owned) {
        const bool alike =
            !p.has_mask || (p.transposed.batch == 1 && p.transposed.heads == 1);
        count = 0;
        for (int64_t u = 0; u < units; ++u) {
            if (u == 0 || !alike) find_costs(p, plan, first + u);
            int32_t* bounds = bound + u * (plan.partitions + 1);
            const int64_t total = tile_cost[plan.kv_tiles];
            int64_t tile = 0;
            for (int64_t i = 0; i <= plan.partitions; ++i) {
                // In parts, so that no product overflows.
                const int64_t goal = total / plan.partitions * i +
                                     total % plan.partitions * i / plan.partitions;
                while (tile < plan.kv_tiles && tile_cost[tile] < goal) ++tile;
                bounds[i] = static_cast<int32_t>(i == plan.partitions ? plan.kv_tiles : tile);
            }
            for (int64_t i = 0; i < plan.partitions; ++i)
                jobs[count++] = {tile_cost[bounds[i + 1]] - tile_cost[bounds[i]],
                                 static_cast<int32_t>(u), static_cast<int32_t>(i), 0};
        }
        qsort(jobs, count, sizeof *jobs, compare);
        if (owned && !(plan.owns_batch && plan.owns_head))
            for (int64_t j = 0; j < count; ++j)
                jobs[j].partial =
                    static_cast<int32_t>(plan.group_of(first + jobs[j].unit) % partials);
        else
            share_out(partials);
    }

  private:
    // Prefix sums of the pairs that each kv tile of a unit works on.
    void find_costs(const af_problem& p, const backward_plan& plan, int64_t unit) {
        const int64_t packing = 2 * plan.kv_rows * plan.kv_rows;
        const bool alike =
            !p.has_mask || (p.transposed.batch == 1 && p.transposed.heads == 1);
        const int64_t kv_batch = unit / p.kv_heads, kv_head = unit % p.kv_heads;
        tile_cost[0] = 0;
        for (int64_t tile = 0; tile < plan.kv_tiles; ++tile) {
            const int64_t key = tile * plan.kv_rows;
            const int64_t keys = smaller(p.kv_length - key, plan.kv_rows);
            int64_t cost = 0;
            for (int64_t s = 0; s < (alike ? smaller(plan.streams, 1) : plan.streams); ++s) {
                if (!p.has_mask) {
                    cost = p.q_length * keys;
                    continue;
                }
                const int64_t b = kv_batch + s / plan.q_per_kv;
                const int64_t h = kv_head * plan.q_per_kv + s % plan.q_per_kv;
                int64_t end;
                for (int64_t at = key; at < key + keys; at = end) {
                    const int64_t block = at / p.kv_block;
                    end = smaller((block + 1) * p.kv_block, key + keys);
                    cost += (end - at) * cost_of(runs_of(p.transposed, b, h, block, p.q_block,
                                                         p.q_length));
                }
            }
            tile_cost[tile + 1] =
                tile_cost[tile] + packing + cost * (alike ? plan.streams : 1);
        }
    }

    // Dearest first, and equal ones in their order.
    static int compare(const void* x, const void* y) {
        const backward_job &a = *static_cast<const backward_job*>(x),
                           &b = *static_cast<const backward_job*>(y);
        if (a.cost != b.cost) return a.cost > b.cost ? -1 : 1;
        return a.unit != b.unit ? a.unit - b.unit : a.partition - b.partition;
    }

    // Each job to the partial with the least to do.
    void share_out(int64_t partials) {
        int64_t load[most_partials] = {};
        for (int64_t j = 0; partials > 0 && j < count; ++j) {
            int32_t least = 0;
            for (int32_t i = 1; i < partials; ++i)
                if (load[i] < load[least]) least = i;
            jobs[j].partial = least;
            load[least] += jobs[j].cost;
        }
    }
};

}  // namespace AF_LEVEL
