/* Coverage for libFuzzer from modules that gcc has built.
 *
 * libFuzzer counts in arrays that clang's instrumentation would fill; gcc only calls a function at the
 * beginning of every block. This is that function: it hashes where it was called from into an array of the
 * module's own. It is linked into each module and hidden, because the sanitizer's library has one of
 * the same name that does nothing. Under `make test-sanitized` nobody reads the counters.
 */
#include <stdint.h>

static uint8_t counters[1 << 13];

void __sanitizer_cov_8bit_counters_init(uint8_t *start, uint8_t *stop);

__attribute__((visibility("hidden"))) void __sanitizer_cov_trace_pc(void) {
    uint64_t where = (uint64_t)(uintptr_t)__builtin_return_address(0);
    counters[where * 0x9E3779B97F4A7C15u >> 51]++;
}

/* libFuzzer has no use for comparisons of floating-point numbers, so nobody else has these two */
__attribute__((visibility("hidden"))) void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
__attribute__((visibility("hidden"))) void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }

__attribute__((constructor)) static void announce(void) {
    __sanitizer_cov_8bit_counters_init(counters, counters + sizeof counters);
}
