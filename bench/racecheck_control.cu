// Control of racecheck: its hazards in two correct protocols, as Hopper's kernels have them, each
// over a ring of two slots: a word in shared memory from one warp to four others, handed over and
// given back by mbarriers; and (arrive) a number from each of four warps' threads to another four
// warps, by named barriers at which those that have nothing to wait for only arrive.
//
//   nvcc -arch=sm_90a -lineinfo -o control racecheck_control.cu
//   compute-sanitizer --tool racecheck ./control [tma|arrive]
//
// The four warps meet at a barrier of their own before one of their threads gives a slot back. The
// tool (CUDA 13.0) doesn't see that all 128 have read by then: it reports a hazard of each read
// except that thread's with the next write, with TMA and without.
// With (arrive) it reports reads and writes that a barrier has between them, but nothing while a
// single block runs whose threads hand over one word each: hence 64 blocks and four words.
#include <cstdint>
#include <cstdio>
__device__ uint32_t addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint64_t* bar, int parity) {
    uint32_t done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p; }"
                     : "=r"(done) : "r"(addr(bar)), "r"(parity) : "memory");
    } while (!done);
}
__global__ void ring(const int* from, int* out, int steps, int tma) {
    __shared__ __align__(128) int data[2][32];
    __shared__ int word[2];
    __shared__ __align__(8) uint64_t full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(addr(&full[s])) : "memory");
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(addr(&empty[s])) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        for (int i = 0; i < steps; ++i) {
            int s = i & 1;
            if (i >= 2) wait(&empty[s], ((i >> 1) - 1) & 1);
            if (threadIdx.x == 128) word[s] = i;
            __syncwarp();
            if (threadIdx.x == 128) {
                if (tma) {
                    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" ::"r"(addr(&full[s])) : "memory");
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                                 ::"r"(addr(data[s])), "l"(from + 32 * i), "r"(addr(&full[s])) : "memory");
                } else
                    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(addr(&full[s])) : "memory");
            }
            __syncwarp();
        }
    } else {
        int sum = 0;
        for (int i = 0; i < steps; ++i) {
            int s = i & 1;
            wait(&full[s], (i >> 1) & 1);
            sum += word[s];
            if (tma) sum += data[s][threadIdx.x & 31];
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(addr(&empty[s])) : "memory");
        }
        out[threadIdx.x] = sum;
    }
}
__device__ void sync(int bar) { asm volatile("bar.sync %0, 256;" ::"r"(bar) : "memory"); }
__device__ void arrive(int bar) { asm volatile("bar.arrive %0, 256;" ::"r"(bar) : "memory"); }
__global__ void relay(int* out, int steps) {
    __shared__ int data[2][4][128];
    const int placed = 12, taken = 14;
    if (threadIdx.x < 128) {
        for (int i = 0; i < steps; ++i) {
            int s = i & 1;
            if (i >= 2) sync(taken + s);
            for (int j = 0; j < 4; ++j) data[s][j][threadIdx.x] = i;
            arrive(placed + s);
        }
        for (int i = steps - 2; i < steps; ++i) sync(taken + (i & 1));
    } else {
        int sum = 0;
        for (int i = 0; i < steps; ++i) {
            int s = i & 1;
            sync(placed + s);
            for (int j = 0; j < 4; ++j) sum += data[s][j][threadIdx.x - 128];
            arrive(taken + s);
        }
        out[threadIdx.x - 128] = sum;
    }
}
int main(int argc, char** argv) {
    int *from, *out;
    cudaMalloc(&from, 4096 * 4); cudaMalloc(&out, 512); cudaMemset(from, 0, 4096 * 4);
    if (argc > 1 && argv[1][0] == 'a')
        relay<<<64, 256>>>(out, 64);
    else
        ring<<<1, 160>>>(from, out, 16, argc > 1);
    int r; cudaMemcpy(&r, out, 4, cudaMemcpyDeviceToHost);
    printf("%s %d %s\n", argc > 1 ? argv[1] : "plain", r, cudaGetErrorString(cudaDeviceSynchronize()));
}
