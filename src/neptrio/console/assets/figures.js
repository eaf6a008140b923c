// Numbers: what two samples of the statistics say about the time between them, and how numbers are written.
// Nothing here touches the page, so that it can be tested without a browser.

export const STAGES = ["request", "queue", "compute_input", "compute_infer", "compute_output"];
export const SHORT = { request: "total", queue: "queue", compute_input: "input", compute_infer: "infer", compute_output: "output" };

const trim = (value, digits) => value.toFixed(digits);

/** Nanoseconds in about four characters: 870 us, 1.2 ms, 35 ms, 2.1 s. */
export function duration(ns) {
  if (ns === null || ns === undefined || !isFinite(ns)) return "–";
  for (const [limit, unit, size] of [[1e3, "ns", 1], [1e6, "µs", 1e3], [1e9, "ms", 1e6]]) {
    if (ns < limit) {
      const value = ns / size;
      return `${trim(value, value < 10 && size > 1 ? 1 : 0)} ${unit}`;
    }
  }
  const seconds = ns / 1e9;
  if (seconds < 120) return `${trim(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${trim(seconds / 60, 0)} min`;
  return seconds < 172800 ? `${trim(seconds / 3600, 1)} h` : `${trim(seconds / 86400, 1)} d`;
}

/** Bytes in powers of 1024. */
export function bytes(count) {
  let value = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${trim(value, value < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    value /= 1024;
  }
  return `${trim(value, 1)} TiB`;
}

/** A count or a rate: 0, 3.2, 47, 1,234, 56.1k. */
export function count(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (Math.abs(value) >= 1e6) return `${trim(value / 1e6, 1)}M`;
  if (Math.abs(value) >= 1e4) return `${trim(value / 1e3, 1)}k`;
  if (value === 0 || Math.abs(value) >= 10) return Math.round(value).toLocaleString("en");
  return trim(value, Number.isInteger(value) ? 0 : 1);
}

/** An FP32 as short as it can be told from its neighbours: 0.1 and not 0.10000000149011612. */
export function single(value) {
  if (!isFinite(value)) return String(value);
  for (let digits = 1; digits < 10; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === Math.fround(value)) return String(short);
  }
  return String(value);
}

/** Whether clients may load and unload models in this control mode. */
export const loadsByRequest = (mode) => mode === "explicit" || mode === "on-demand";

/** Whether most requests fail: of the last interval, or since the load where nothing came in it. */
export function failing(stat, seen) {
  const failed = seen.failures || 0;
  const answered = seen.requests || 0;
  if (failed + answered) return failed > answered;
  return Number(stat.inference_stats.fail.count) > Number(stat.inference_stats.success.count);
}

/** Milliseconds between two moments beyond which a chart draws no line: nobody has asked meanwhile. */
export const GAP = 20000;
const STEPS = [10, 15, 30, 60, 120, 300, 600, 1800, 3600]; // seconds between marks of a time axis
const LEAST = 60000;

/** The first and the last moment that a chart of these times (milliseconds, ascending) shows. */
export function span(times) {
  const end = times[times.length - 1] ?? 0;
  return [Math.min(times[0] ?? 0, end - LEAST), end];
}

/** The marks of a time axis: {time, label}, the last one now. */
export function ticks(begin, end) {
  const step = STEPS.find((seconds) => (end - begin) / 1000 / seconds <= 5) || STEPS[STEPS.length - 1];
  const marks = [{ time: end, label: "now" }];
  for (let ago = step; ago * 1000 <= (end - begin) * 0.96; ago += step) marks.unshift({ time: end - ago * 1000, label: ago < 60 || ago % 60 ? `−${ago} s` : `−${ago / 60} min` });
  return marks;
}

/** The place of the time that is nearest to `wanted`; -1 if there is none. */
export function nearest(times, wanted) {
  let found = -1;
  times.forEach((time, i) => { if (found < 0 || Math.abs(time - wanted) <= Math.abs(times[found] - wanted)) found = i; });
  return found;
}

/** How long ago a moment was, in milliseconds since 1970. */
export const ago = (time, now) => (now - time < 1000 ? "just now" : `${duration((now - time) * 1e6)} ago`);

/** A number with its noun: 1 client, 3 clients. */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** What [[bound, count], ...] has grown by since `old`, as the same pairs. */
export function grown(now, old) {
  const known = new Map(old || []);
  return now.map(([bound, n]) => [bound, n - (known.get(bound) || 0)]).filter(([, n]) => n > 0);
}

/** The value below which a share (0 to 1) of the values in [[bound, count], ...] lies: its bucket's bound; null if there are none. */
export function percentile(pairs, share) {
  const total = pairs.reduce((sum, [, n]) => sum + n, 0);
  if (!total) return null;
  let seen = 0;
  for (const [bound, n] of pairs) {
    seen += n;
    if (seen >= share * total) return bound;
  }
  return pairs[pairs.length - 1][0];
}

/** Adds up several [[bound, count], ...]. */
export function merged(histograms) {
  const sum = new Map();
  for (const pairs of histograms) for (const [bound, n] of pairs) sum.set(bound, (sum.get(bound) || 0) + n);
  return [...sum].sort(([a], [b]) => a - b);
}

/** Cumulative counts [[bound, count up to it], ...] as counts of each bucket. */
export function apart(cumulative) {
  let below = 0;
  return cumulative.map(([bound, upTo]) => {
    const n = upTo - below;
    below = upTo;
    return [bound, n];
  });
}

/** One model version between two of its statistics; `old` undefined, or a reload in between: since the load. */
export function interval(old, now, seconds) {
  const success = (stat) => Number(stat.inference_stats.success.count);
  if (old && success(old) > success(now)) old = undefined;
  const begun = old === undefined;
  const diff = (read) => (begun ? 0 : read(now) - read(old));
  const histograms = {};
  for (const stage of STAGES) histograms[stage] = begun ? [] : grown(now.histograms?.[stage] || [], old.histograms?.[stage]);
  const executions = diff((stat) => Number(stat.execution_count));
  const inferences = diff((stat) => Number(stat.inference_count));
  const closings = {};
  const sizes = {};
  for (const [reason, closing] of Object.entries(now.batches || {})) {
    const before = old?.batches?.[reason];
    const more = begun ? 0 : closing.count - (before?.count || 0);
    if (more) closings[reason] = more;
    for (const [size, n] of Object.entries(closing.sizes)) {
      const extra = begun ? 0 : n - (before?.sizes[size] || 0);
      if (extra) sizes[size] = (sizes[size] || 0) + extra;
    }
  }
  const per = (value) => (seconds > 0 ? value / seconds : 0);
  return {
    requests: per(diff(success)),
    inferences: per(inferences),
    failures: per(diff((stat) => Number(stat.inference_stats.fail.count))),
    batch: executions ? inferences / executions : null,
    histograms, closings, sizes,
  };
}

/** Shares of a core that processes used between two lists of them, by pid. */
export function cores(old, now, seconds) {
  const before = new Map((old || []).map((process) => [process.pid, process.cpu_seconds]));
  return new Map(now.map((process) => [process.pid, before.has(process.pid) && seconds > 0 ? (process.cpu_seconds - before.get(process.pid)) / seconds : null]));
}

/** Where a model's instances run, from its configuration. */
export function place(config, own) {
  const parts = (config.instance_group || []).flatMap((group) => {
    const kind = { KIND_GPU: "GPU", KIND_MODEL: "MODEL" }[group.kind] || "CPU";
    return kind === "GPU" && group.gpus?.length ? group.gpus.map((gpu) => `${group.count} × GPU ${gpu}`) : [`${group.count} × ${kind}`];
  });
  if (!parts.length && config.platform === "ensemble") return "its steps' models";
  if (own && parts.length) parts.push("own processes");
  return parts.join(", ");
}

/** What front ends did between two samples of their rows: requests a second, share of a core and the lag's p99 of each;
 *  null where its process is another than in the sample before. */
export function frontEnds(before, now, seconds) {
  const known = new Map((before || []).map((row) => [row.pid, row]));
  return now.map((row) => {
    const old = seconds > 0 ? known.get(row.pid) : undefined;
    const each = (name) => (old ? (row[name] - old[name]) / seconds : null);
    const lag = old ? grown(apart(row.loop_lag.cumulative), apart(old.loop_lag.cumulative)) : [];
    return { ...row, rate: each("requests"), cores: each("cpu_seconds"), lag99: percentile(lag, 0.99) };
  });
}
