/* Calls a kernel so that a fault in it (SIGFPE, SIGSEGV, SIGBUS, SIGILL) ends the call and not the process.

   The problem: kernels come from models and get clients' values. On a GPU a division by zero gives some number and a wrong
   address ends a context; on the host both are a signal, whose default is the end of the server. The choice: the thread that
   runs a kernel notes where to jump to, and the handler jumps there. That costs some nanoseconds for each launch.

   Rules:
    1. The handler jumps only for a fault that the processor has reported (no kill()), on a thread that is in a kernel, at an
       instruction of that kernel's object or of memcpy, memmove or memset, which hold no lock. Everything else gets the
       handler that was there before, as if this one were not.
    2. A signal's handler runs on a stack of its own: a kernel may have used up its stack. Each thread gets one at its first
       kernel and gives it back at its end; where the thread has one already (faulthandler), that is used.
    3. What a jump leaves behind is the kernel's: its static variables, and outputs and work memory half written. A failed
       run's outputs are not sent, and fibers begin anew with each block. What a wrong address has overwritten before it
       met a page that is not there can't be undone.
    4. The handler blocks no signals (SA_NODEFER), so a jump need not restore the mask, and a launch calls no system.
    5. The handler is set again with each object that is loaded, if others have set theirs meanwhile. */
#pragma once
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>
#include <link.h>

enum { GUARD_STACK = 65536, GUARD_NEAR = 4096, GUARD_SIGNALS = 4, GUARD_STATUS = 100 };

typedef struct guard {
    sigjmp_buf at;
    uintptr_t low, high; /* the code of the kernel's object */
    struct guard *outer;
} guard;

/* in the thread's first block of variables, so that a handler never has to allocate it */
static __thread guard *guard_here __attribute__((tls_model("initial-exec")));
static __thread int guard_has_stack;
static const int guard_signals[GUARD_SIGNALS] = {SIGFPE, SIGSEGV, SIGBUS, SIGILL};
static struct sigaction guard_before[GUARD_SIGNALS];
static volatile sig_atomic_t guard_passed[GUARD_SIGNALS];
static pthread_mutex_t guard_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t guard_stacks;
static pthread_once_t guard_once = PTHREAD_ONCE_INIT;

static uintptr_t guard_place(void *context) {
#if defined(__x86_64__)
    return (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)((ucontext_t *)context)->uc_mcontext.pc;
#else
    (void)context;
    return 0;
#endif
}

static int guard_is_copying(uintptr_t at) {
    return at - (uintptr_t)memcpy < GUARD_NEAR || at - (uintptr_t)memmove < GUARD_NEAR ||
           at - (uintptr_t)memset < GUARD_NEAR;
}

static void guard_handler(int number, siginfo_t *info, void *context) {
    guard *here = guard_here;
    if (here != NULL && info->si_code > 0) {
        const uintptr_t at = guard_place(context);
        if ((at >= here->low && at < here->high) || guard_is_copying(at)) siglongjmp(here->at, number);
    }
    for (int i = 0; i < GUARD_SIGNALS; i++) {
        if (guard_signals[i] != number) continue;
        if (guard_passed[i]) {
            signal(number, SIG_DFL); /* the one before has passed it back */
        } else {
            guard_passed[i] = 1;
            sigaction(number, &guard_before[i], NULL);
        }
    }
    if (info->si_code <= 0) raise(number); /* a fault comes again when the instruction is repeated */
}

static void guard_free_stack(void *stack) {
    stack_t none;
    memset(&none, 0, sizeof(none));
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, NULL);
    free(stack);
}

static void guard_make_key(void) { pthread_key_create(&guard_stacks, guard_free_stack); }

/* Sets the handlers, where they are not set. Any thread. */
static void guard_install(void) {
    struct sigaction mine, now;
    pthread_once(&guard_once, guard_make_key);
    memset(&mine, 0, sizeof(mine));
    mine.sa_sigaction = guard_handler;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&mine.sa_mask);
    pthread_mutex_lock(&guard_lock);
    for (int i = 0; i < GUARD_SIGNALS; i++) {
        if (sigaction(guard_signals[i], NULL, &now) != 0) continue;
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == guard_handler) continue;
        guard_before[i] = now;
        guard_passed[i] = 0;
        sigaction(guard_signals[i], &mine, NULL);
    }
    pthread_mutex_unlock(&guard_lock);
}

static void guard_give_stack(void) {
    stack_t now, mine;
    guard_has_stack = 1;
    if (sigaltstack(NULL, &now) != 0 || !(now.ss_flags & SS_DISABLE)) return;
    memset(&mine, 0, sizeof(mine));
    mine.ss_size = GUARD_STACK;
    mine.ss_sp = malloc(GUARD_STACK);
    if (mine.ss_sp == NULL) return;
    if (sigaltstack(&mine, NULL) != 0 || pthread_setspecific(guard_stacks, mine.ss_sp) != 0) free(mine.ss_sp);
}

typedef struct {
    const void *inside;
    uintptr_t low, high;
} guard_search;

static int guard_look(struct dl_phdr_info *info, size_t size, void *data) {
    guard_search *wanted = (guard_search *)data;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const uintptr_t low = (uintptr_t)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        const uintptr_t high = low + info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X) &&
            (uintptr_t)wanted->inside >= low && (uintptr_t)wanted->inside < high) {
            wanted->low = low;
            wanted->high = high;
            return 1;
        }
    }
    return 0;
}

/* The code of the object in which a function lies: its ends, zeros where that is not known. */
static void guard_code_of(const void *function, uintptr_t *low, uintptr_t *high) {
    guard_search wanted = {function, 0, 0};
    dl_iterate_phdr(guard_look, &wanted);
    *low = wanted.low;
    *high = wanted.high;
}

typedef int (*guard_entry)(void **, const unsigned *, const unsigned *);

/* entry(arguments, grid, block), or GUARD_STATUS and the number of the signal that has ended it. */
static __attribute__((noinline)) int guard_call(guard_entry entry, void **arguments, const unsigned *grid,
                                                const unsigned *block, uintptr_t low, uintptr_t high) {
    guard here;
    int status;
    if (!guard_has_stack) guard_give_stack();
    here.low = low;
    here.high = high;
    here.outer = guard_here;
    status = sigsetjmp(here.at, 0);
    if (status) {
        guard_here = here.outer;
        return GUARD_STATUS + status;
    }
    guard_here = &here;
    status = entry(arguments, grid, block);
    guard_here = here.outer;
    return status;
}
