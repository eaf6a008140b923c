/* One end of a ring (cext/rings/ring.pyx says what that is) without Python: a library that any interpreter loads with
   ctypes, whatever its version. A model with an environment of its own takes its batches through it.

   All functions but plain_wait() are called with the GIL held (ctypes.PyDLL), which makes each of them one step: rule 1
   of cext/rings/ring.pyx. They never block. */
#include <string.h>

#include "words.h"

#define LINE 64
#define RING_HEAD 256
#define ENTRY 32
#define EXPORTED __attribute__((visibility("default")))

typedef struct {
    uint32_t kind, size;
    uint64_t id, offset, length;
} entry_t;

typedef struct {
    char *base;
    uint64_t entries, own;
} ring_t;

/* 1; 0 when it is full; -1 when the consumer's index cannot be */
EXPORTED int plain_push(ring_t *ring, const entry_t *entry) {
    uint64_t used = ring->own - SHARED_LOAD64(ring->base + LINE);
    if (used >= ring->entries) return used == ring->entries ? 0 : -1;
    memcpy(ring->base + RING_HEAD + (ring->own & (ring->entries - 1)) * ENTRY, entry, ENTRY);
    ring->own += 1;
    SHARED_STORE64(ring->base, ring->own);
    return 1;
}

/* 1 and the next entry; 0 when there is none; -1 when the producer's index cannot be */
EXPORTED int plain_peek(ring_t *ring, entry_t *entry) {
    uint64_t waiting = SHARED_LOAD64(ring->base) - ring->own;
    if (waiting == 0) return 0;
    if (waiting > ring->entries) return -1;
    memcpy(entry, ring->base + RING_HEAD + (ring->own & (ring->entries - 1)) * ENTRY, ENTRY);
    return 1;
}

/* the entry that was peeked at when `own` was the index is done with: 1; 0 when it had been passed already */
EXPORTED int plain_advance(ring_t *ring, uint64_t own) {
    if (ring->own != own) return 0;
    ring->own += 1;
    SHARED_STORE64(ring->base + LINE, ring->own);
    return 1;
}

/* whether something waits */
EXPORTED int plain_waiting(ring_t *ring) { return SHARED_LOAD64(ring->base) != ring->own; }

/* how many entries the other side has taken, ever */
EXPORTED uint64_t plain_head(ring_t *ring) { return SHARED_LOAD64(ring->base + LINE); }

/* after a push: the consumer sleeps, and is to be woken by the caller */
EXPORTED int plain_must_wake(ring_t *ring) {
    SHARED_FENCE();
    return SHARED_LOAD32(ring->base + 2 * LINE) != 0 && SHARED_SWAP32(ring->base + 2 * LINE, 0) != 0;
}

/* sleeps until something comes: 1, 0 when woken for nothing, -1 after a signal. Without the GIL (ctypes.CDLL). */
EXPORTED int plain_wait(ring_t *ring) {
    int how;
    if (SHARED_LOAD64(ring->base) != ring->own) return 1;
    SHARED_STORE32(ring->base + 2 * LINE, 1);
    SHARED_FENCE();
    if (SHARED_LOAD64(ring->base) != ring->own) {
        SHARED_STORE32(ring->base + 2 * LINE, 0);
        return 1;
    }
    how = shared_sleep(ring->base + 2 * LINE, 1, -1);
    SHARED_STORE32(ring->base + 2 * LINE, 0);
    if (SHARED_LOAD64(ring->base) != ring->own) return 1;
    return how < 0 ? -1 : 0;
}
