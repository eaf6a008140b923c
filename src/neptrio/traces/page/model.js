// What the page knows: traces with their stages, which of them pass the filters, in which order.

const data = JSON.parse(document.getElementById("traces").textContent);
const STAGES = data.stages.map(([name, meaning]) => ({ name, meaning }));
const STAGE = Object.fromEntries(STAGES.map((stage, i) => [stage.name, i]));
const OUTCOMES = data.outcomes.map(([name, meaning]) => ({ name, meaning }));
const KNOWN_POINTS = new Set(data.known_points);

const column = Object.fromEntries(data.columns.map((name, i) => [name, i]));
const traces = data.traces.map((row, index) => {
  const times = [], bars = [];
  const flat = row[column.times], drawn = row[column.bars];
  for (let i = 0; i < flat.length; i += 2) times.push({ name: data.points[flat[i]], ns: flat[i + 1] });
  for (let i = 0; i < drawn.length; i += 3) bars.push({ stage: drawn[i], begin: drawn[i + 1], end: drawn[i + 2] });
  const [model, version] = data.models[row[column.model]];
  return {
    index, model, version, times, bars, children: [], depth: 0,
    id: row[column.id], parent: row[column.parent], front: row[column.front], requestId: row[column.request_id],
    error: row[column.error], outcome: OUTCOMES[row[column.outcome]].name, file: data.files[row[column.file]],
    tensors: row[column.tensors],
  };
});

for (const trace of traces) {
  const point = (name) => trace.times.find((time) => time.name === name);
  const start = point("HTTP_RECV_START") || point("GRPC_WAITREAD_END") || point("REQUEST_START") || trace.times[0];
  trace.timed = trace.times.length > 0;
  trace.begin = start ? start.ns : 0;
  trace.end = trace.timed ? trace.times[trace.times.length - 1].ns : 0;
  trace.replies = trace.times.filter((time) => time.name === "INFER_RESPONSE_COMPLETE").map((time) => time.ns);
  trace.custom = trace.times.filter((time) => !KNOWN_POINTS.has(time.name));
  trace.spent = new Map();
  for (const bar of trace.bars) trace.spent.set(bar.stage, (trace.spent.get(bar.stage) || 0) + bar.end - bar.begin);
  trace.cached = trace.spent.has(STAGE.cache);
  if (trace.parent >= 0) {
    const above = traces[trace.parent];  // parents stand before their children
    above.children.push(trace);
    trace.depth = above.depth + 1;
    trace.root = above.root;
    trace.root.parts.push(trace);
  } else {
    trace.root = trace;
    trace.parts = [trace];
  }
}

const roots = traces.filter((trace) => trace.root === trace);
for (const root of roots) {
  root.duration = root.end - root.begin;
  for (const part of root.parts) {
    part.duration = part.end - part.begin;
    if (part.timed) root.last = Math.max(root.last || 0, part.end);
  }
  const spent = (stages) => root.parts.reduce((sum, part) => sum + stages.reduce((s, name) => s + (part.spent.get(STAGE[name]) || 0), 0), 0);
  root.queued = spent(["queue"]);
  root.computed = spent(["input", "infer", "output"]);
  root.haystack = root.parts.map((part) => `${part.requestId}\n#${part.id}\n${part.model}\n${part.error}`).join("\n").toLowerCase();
}
const CLOCK_END = roots.reduce((end, root) => Math.max(end, root.last || 0), 0);

const EMPTY = { q: "", model: "", min: "", outcome: "", front: "", sort: "start", scale: "aligned", from: "", to: "", folded: "" };
const frontOf = (trace) => ({ HTTP: "HTTP", GRPC: "gRPC" })[trace.front] || "other";
const outcomesOf = (root) => new Set(root.parts.map((part) => part.outcome));

/** The root requests that pass the filters, in order. */
function select(filter) {
  const words = filter.q.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const min = Number(filter.min) * 1000 || 0;
  const from = filter.from === "" ? -Infinity : Number(filter.from) * 1000;
  const to = filter.to === "" ? Infinity : Number(filter.to) * 1000;
  const found = roots.filter((root) =>
    root.duration >= min && root.begin >= from && root.begin <= to
    && (!filter.model || root.parts.some((part) => part.model === filter.model))
    && (!filter.front || frontOf(root) === filter.front)
    && (!filter.outcome || (filter.outcome === "cached" ? root.parts.some((part) => part.cached)
      : filter.outcome === "not ok" ? root.parts.some((part) => part.outcome !== "ok")
        : outcomesOf(root).has(filter.outcome)))
    && words.every((word) => root.haystack.includes(word)));
  const text = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const order = {
    start: (a, b) => a.begin - b.begin || a.index - b.index,
    slow: (a, b) => b.duration - a.duration || a.index - b.index,
    queue: (a, b) => b.queued - a.queued || a.index - b.index,
    compute: (a, b) => b.computed - a.computed || a.index - b.index,
    model: (a, b) => text(a.model, b.model) || a.begin - b.begin || a.index - b.index,
    id: (a, b) => a.index - b.index,
  };
  return found.sort(order[filter.sort] || order.start);
}

/** Nanoseconds as a person reads them. */
function human(ns) {
  const abs = Math.abs(ns);
  if (abs < 1e6) return `${trim(ns / 1e3, abs < 1e4 ? 2 : 1)} µs`;
  if (abs < 1e9) return `${trim(ns / 1e6, abs < 1e8 ? 2 : 1)} ms`;
  return `${trim(ns / 1e9, 2)} s`;
}
const trim = (value, digits) => String(Number(value.toFixed(digits)));
/** Nanoseconds as microseconds, to the nanosecond. */
const micros = (ns) => (ns / 1000).toFixed(3);
const absolute = (ns) => String(BigInt(data.base_ns) + BigInt(ns));

/** At most so many letters: browsers take seconds to lay out a word of a hundred thousand. */
const clip = (text, letters) => (text.length > letters ? `${text.slice(0, letters)}…` : text);
/** An element with classes, text and children; text is text, never markup. */
function make(tag, classes, text, ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text !== undefined && text !== null && text !== "") element.textContent = clip(String(text), 4000);
  element.append(...children);
  return element;
}
const byId = (id) => document.getElementById(id);
