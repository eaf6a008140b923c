/* Latencies in a histogram, failures, and the JSON object that says both. */
#include "loadgen.h"

#define BUCKETS (64 * 64)
static uint64_t histogram[BUCKETS], counted, sum_ns, max_ns, failures, mismatches;
static uint64_t late[BUCKETS], late_counted, late_max;
static char first_failure[512];
uint64_t t_begin, t_measure, t_end, unanswered;
int preparing;

static int bucket(uint64_t v) {
    int e;
    if (v < 64) return (int)v;
    e = 63 - __builtin_clzll(v);
    return (e - 5) * 64 + (int)((v >> (e - 6)) & 63);
}

static uint64_t bucket_value(int b) {
    if (b < 64) return b;
    int e = b / 64 + 5;
    return (1ull << e) + ((uint64_t)(b % 64) << (e - 6)) + (1ull << (e - 7 < 0 ? 0 : e - 7));
}

void record(uint64_t start) {
    uint64_t t = now_ns(), ns = t - start, at = opt.rate > 0 ? start : t;
    if (preparing || at < t_measure || at > t_end) return;
    histogram[bucket(ns)]++;
    counted++;
    sum_ns += ns;
    if (ns > max_ns) max_ns = ns;
}

void failed(const char *what, const char *detail, size_t n) {
    if (!failures++) snprintf(first_failure, sizeof first_failure, "%s: %.*s", what, (int)(n > 300 ? 300 : n), detail);
}

static ssize_t usual = -1;      /* where in an answer the expected bytes were last */

int usual_is_known(void) { return usual >= 0; }

int same_as_usual(const char *data, ssize_t at, ssize_t n) {
    ssize_t end = usual + (ssize_t)opt.expect_n, from = at > usual ? at : usual, to = at + n < end ? at + n : end;
    return from >= to || !memcmp(data + (from - at), opt.expect + (from - usual), to - from);
}

void fill_as_usual(char *data, ssize_t n) {
    if (n <= 0) return;
    memset(data, 0, n);
    if (n > usual) memcpy(data + usual, opt.expect, n - usual < (ssize_t)opt.expect_n ? n - usual : (ssize_t)opt.expect_n);
}

void answer_as_usual(uint64_t start, ssize_t n) {
    if (n >= usual + (ssize_t)opt.expect_n) record(start);
    else if (!mismatches++) fprintf(stderr, "first mismatch: an answer of %zd bytes\n", n);
}

static int contains(const char *data, size_t n) {
    if (!opt.expect_n) return 1;
    if (usual >= 0 && usual + opt.expect_n <= n && !memcmp(data + usual, opt.expect, opt.expect_n)) return 1;
    char *at = memmem(data, n, opt.expect, opt.expect_n);
    if (!at) return 0;
    usual = at - data;
    return 1;
}

void answer(uint64_t start, const char *data, size_t n) {
    if (contains(data, n)) record(start);
    else {
        if (!mismatches++) fprintf(stderr, "first mismatch (%zu bytes): %.*s\n", n, (int)(n > 200 ? 200 : n), data);
    }
}

void record_late(uint64_t ns) {
    late[bucket(ns)]++;
    late_counted++;
    if (ns > late_max) late_max = ns;
}

static uint64_t quantile(double q, const uint64_t *in, uint64_t n, uint64_t max) {
    uint64_t want = (uint64_t)(q * n), seen = 0;
    for (int i = 0; i < BUCKETS; i++)
        if ((seen += in[i]) > want) return bucket_value(i);
    return max;
}

static uint64_t percentile(double q) { return quantile(q, histogram, counted, max_ns); }

int report(const generator_use *use) {
    printf("{\"requests\": %llu, \"seconds\": %.3f, \"per_second\": %.1f, \"failures\": %llu, \"mismatches\": %llu, \"unanswered\": %llu, "
           "\"mean_us\": %.2f, \"p50_us\": %.2f, \"p90_us\": %.2f, \"p99_us\": %.2f, \"p999_us\": %.2f, \"max_us\": %.2f, "
           "\"generator_cpu_s\": %.3f, \"generator_waited_ms\": %.2f, \"generator_preempted\": %ld, \"late_p99_us\": %.2f, \"late_max_us\": %.2f}\n",
           (unsigned long long)counted, opt.duration, counted / opt.duration, (unsigned long long)failures,
           (unsigned long long)mismatches, (unsigned long long)unanswered, counted ? sum_ns / 1e3 / counted : 0.0, percentile(.5) / 1e3, percentile(.9) / 1e3,
           percentile(.99) / 1e3, percentile(.999) / 1e3, max_ns / 1e3, use->cpu_s, use->waited_ms,
           use->preempted, quantile(.99, late, late_counted, late_max) / 1e3, late_max / 1e3);
    if (first_failure[0]) fprintf(stderr, "first failure: %s\n", first_failure);
    return failures || mismatches || !counted;
}
