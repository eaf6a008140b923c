// Running a grid, and the entry points by which the server does. Part of neptrio_host.h.
//
// There are two ways to run a block:
//   loop   kernels that never wait for another thread: a plain loop over threadIdx around the
//          inlined kernel, which the compiler can vectorise;
//   fibers kernels with __syncthreads or warp operations (neptrio_fiber.h).
//
// Rules:
//  1. Blocks run one after the other on the calling thread.
//  2. threadIdx and its like are set before a thread runs or resumes and never in between.
#pragma once

namespace neptrio {

template <auto F> struct Kernel;
template <class... P, void (*F)(P...)> struct Kernel<F> {
    using Indices = std::index_sequence_for<P...>;

    static inline __attribute__((always_inline)) void loop(const unsigned* g, const unsigned* b, P... p) {
        const int bx = (int)b[0], by = (int)b[1], bz = (int)b[2];
        for (int z = 0; z < (int)g[2]; z++)
            for (int y = 0; y < (int)g[1]; y++)
                for (int x = 0; x < (int)g[0]; x++) {
                    blockIdx = {{x}, {y}, {z}};
                    for (int tz = 0; tz < bz; tz++)
                        for (int ty = 0; ty < by; ty++) {
                            threadIdx.z.v = tz;
                            threadIdx.y.v = ty;
                            for (int tx = 0; tx < bx; tx++) {
                                threadIdx.x.v = tx;
                                F(p...);
                            }
                        }
                }
    }

    template <size_t... I>
    static inline __attribute__((always_inline)) void start(void** a, const unsigned* g, const unsigned* b,
                                                            std::index_sequence<I...>) {
        loop(g, b, *(std::remove_cv_t<P>*)a[I]...);
    }

    static inline __attribute__((always_inline)) int run_loop(void** a, const unsigned* g, const unsigned* b) {
        gridDim = {{(int)g[0]}, {(int)g[1]}, {(int)g[2]}};
        blockDim = {{(int)b[0]}, {(int)b[1]}, {(int)b[2]}};
        start(a, g, b, Indices());
        return NEPTRIO_OK;
    }

    static inline void** arguments;
    template <size_t... I> static inline void call(std::index_sequence<I...>) {
        F(*(std::remove_cv_t<P>*)arguments[I]...);
    }
    static void one() { call(Indices()); }

    static int run_fibers(void** a, const unsigned* g, const unsigned* b) {
        if (!have_stacks()) return NEPTRIO_NO_STACKS;
        gridDim = {{(int)g[0]}, {(int)g[1]}, {(int)g[2]}};
        blockDim = {{(int)b[0]}, {(int)b[1]}, {(int)b[2]}};
        arguments = a;
        body = one;
        threads = (int)(b[0] * b[1] * b[2]);
        int t = 0;
        for (int z = 0; z < (int)b[2]; z++)
            for (int y = 0; y < (int)b[1]; y++)
                for (int x = 0; x < (int)b[0]; x++) place[t++] = {{x}, {y}, {z}};
        for (int z = 0; z < (int)g[2]; z++)
            for (int y = 0; y < (int)g[1]; y++)
                for (int x = 0; x < (int)g[0]; x++) {
                    blockIdx = {{x}, {y}, {z}};
                    const int status = run_block();
                    if (status) return status;
                }
        return NEPTRIO_OK;
    }
};
}  // namespace neptrio

#define NEPTRIO_EXPORT extern "C" __attribute__((visibility("default")))
#define NEPTRIO_LOOP(name)                                                                         \
    NEPTRIO_EXPORT int neptrio_run_##name(void** a, const unsigned* g, const unsigned* b) {        \
        return neptrio::Kernel<&name>::run_loop(a, g, b);                                          \
    }
#define NEPTRIO_FIBERS(name)                                                                       \
    NEPTRIO_EXPORT int neptrio_run_##name(void** a, const unsigned* g, const unsigned* b) {        \
        return neptrio::Kernel<&name>::run_fibers(a, g, b);                                        \
    }
// Gives the stacks back before the object is closed.
NEPTRIO_EXPORT void neptrio_close() {
    if (neptrio::stacks)
        munmap(neptrio::stacks, (size_t)(NEPTRIO_STACK + NEPTRIO_GUARD) * NEPTRIO_THREADS);
    neptrio::stacks = nullptr;
}
