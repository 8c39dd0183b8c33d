// Products on AMX tiles, one k step of 2 x 2 tiles at a time, so that other work of the thread can
// be spread between them: the tile unit computes a step in 64 cycles while vector units do theirs.
//
// A step is a few dozen instructions. Alternating it with a vector row of like length lets
// out-of-order execution overlap both; whole products one after the other would not fit its
// window.
#pragma once
#include "gemm.h"

namespace AF_LEVEL {

#if defined(__AMX_BF16__)

// C (+)= A B of up to 32 rows: see gemm_pairs for the operands.
struct tile_product_of {
    const uint16_t* a;
    const uint32_t* b;
    float* c;
    const float* alpha;  // of into::rescale
    int64_t a_row, b_panel, ldc;
    int32_t panels, steps;  // steps: k / 32
    int32_t row_tiles;
    into how;
    float scale;  // of into::store
};

class tile_queue {
   public:
    void clear() { count_ = at_ = panel_ = k_ = done_ = total_ = 0; }

    void push(const tile_product_of& product) {
        if (product.panels == 0 || product.steps == 0) return;
        list_[count_++] = product;
        total_ += product.panels * product.steps;
    }

    // Runs steps until `part` of `whole` are done.
    AF_INLINE_MEMBER void keep_up(int part, int whole) {
        while (done_ * whole < total_ * part) step();
    }
    void drain() {
        while (done_ < total_) step();
    }

   private:
    AF_INLINE_MEMBER void step() {
        const tile_product_of& p = list_[at_];
        if (p.row_tiles == 2)
            step_of<2>(p);
        else
            step_of<1>(p);
        ++done_;
        if (++k_ < p.steps) return;
        k_ = 0;
        if (++panel_ < p.panels) return;
        panel_ = 0;
        ++at_;
    }

    template <int ROW_TILES>
    AF_INLINE_MEMBER void step_of(const tile_product_of& p) {
        float* c = p.c + panel_ * NR;
        if (k_ == 0) {
            if (p.how == into::store) {
                tiles_zero<ROW_TILES>();
            } else {
                if (p.how == into::rescale) rescale_rows(16 * ROW_TILES, c, p.ldc, p.alpha);
                tiles_load<ROW_TILES>(c, p.ldc);
            }
        }
        tile_product<ROW_TILES>(32, p.a + k_ * 32, p.a_row,
                                p.b + panel_ * p.b_panel + int64_t(k_) * 16 * NR);
        if (k_ + 1 < p.steps) return;
        tiles_store<ROW_TILES>(c, p.ldc);
        if (p.how == into::store) scale_rows(16 * ROW_TILES, c, p.ldc, p.scale);
    }

    static constexpr int most = 16;
    tile_product_of list_[most];
    int32_t count_ = 0, at_ = 0, panel_ = 0, k_ = 0, done_ = 0, total_ = 0;
};

#endif

}  // namespace AF_LEVEL
