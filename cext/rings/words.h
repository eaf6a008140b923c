/* Words in memory that two processes share, and sleeping until one changes. Used by ring.pyx and plain_ring.c. */
#ifndef NEPTRIO_RINGS_WORDS_H
#define NEPTRIO_RINGS_WORDS_H

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define SHARED_LOAD64(p) __atomic_load_n((uint64_t *)(p), __ATOMIC_ACQUIRE)
#define SHARED_STORE64(p, v) __atomic_store_n((uint64_t *)(p), (v), __ATOMIC_RELEASE)
#define SHARED_LOAD32(p) __atomic_load_n((uint32_t *)(p), __ATOMIC_ACQUIRE)
#define SHARED_STORE32(p, v) __atomic_store_n((uint32_t *)(p), (v), __ATOMIC_SEQ_CST)
#define SHARED_SWAP32(p, v) __atomic_exchange_n((uint32_t *)(p), (v), __ATOMIC_SEQ_CST)
#define SHARED_FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() do { } while (0)
#endif

static inline int64_t shared_now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}
static inline void shared_wake(void *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}
/* 0: woken or changed, 1: time, -1: a signal */
static inline int shared_sleep(void *word, uint32_t value, int64_t ns) {
#ifdef __linux__
    struct timespec ts = { ns / 1000000000, ns % 1000000000 };
    if (syscall(SYS_futex, word, FUTEX_WAIT, value, ns < 0 ? NULL : &ts, NULL, 0) == 0) return 0;
    if (errno == EINTR) return -1;
    return errno == ETIMEDOUT;
#else
    usleep(100);
    return 0;
#endif
}

#endif
