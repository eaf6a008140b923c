// Turns a trace's points into stages: between two neighbouring points of a request there is exactly one.
// The same rules as those of `neptrio trace view` (traces/view.py), which a test compares.

export const MEANING = {
  wait: "waiting for and reading a gRPC message",
  receive: "reading the HTTP request from the network",
  overhead: "decoding, validating, encoding, handing over",
  queue: "waiting in the scheduler's queue",
  cache: "answered from the response cache",
  input: "preparing input tensors",
  infer: "executing the model",
  output: "taking output tensors",
  send: "encoding and sending the response",
  steps: "an ensemble's steps or a model's calls are running",
};

const AFTER = {
  GRPC_WAITREAD_START: "wait", HTTP_RECV_START: "receive", GRPC_WAITREAD_END: "overhead", HTTP_RECV_END: "overhead",
  REQUEST_START: "overhead", QUEUE_START: "queue", COMPUTE_START: "input", COMPUTE_INPUT_END: "infer",
  COMPUTE_OUTPUT_START: "output", COMPUTE_END: "overhead", REQUEST_END: "overhead",
};
const RANK = Object.fromEntries(Object.keys(AFTER).map((name, rank) => [name, rank]));

/** {stage, begin, end} of one trace in nanoseconds, in time order; `parent`: it has steps or calls. */
export function segments(trace, parent = false) {
  const at = {};
  for (const { name, ns } of trace.timestamps) if (name in AFTER && !(name in at)) at[name] = ns;
  const points = Object.entries(at).map(([name, ns]) => ({ ns, rank: RANK[name], stage: AFTER[name] })).sort((a, b) => a.ns - b.ns || a.rank - b.rank);
  const computed = "COMPUTE_START" in at, over = "REQUEST_END" in at;
  const made = [];
  for (let i = 0; i + 1 < points.length; i++) {
    let { stage } = points[i];
    if (stage === "queue" && !computed) stage = parent ? "steps" : trace.error || !over ? "queue" : "cache";
    else if (stage === "input" && !("COMPUTE_INPUT_END" in at)) stage = "infer";
    else if (stage === "infer" && parent) stage = "steps";
    if (points[i + 1].ns > points[i].ns) made.push({ stage, begin: points[i].ns, end: points[i + 1].ns });
  }
  const overAt = points.length ? points[points.length - 1].ns : 0;
  let last = overAt;
  const early = [];
  for (const [start, end] of sends(trace)) {
    if (points.length && end <= overAt) {
      early.push({ stage: "send", begin: start, end });
      continue;
    }
    const begin = Math.max(start, last);
    if (points.length && begin > last) made.push({ stage: "overhead", begin: last, end: begin });
    if (end > begin) made.push({ stage: "send", begin, end });
    last = Math.max(last, end);
  }
  return [...made, ...early];
}

function sends(trace) {
  const of = (pattern) => trace.timestamps.filter(({ name }) => pattern.test(name)).map(({ ns }) => ns).sort((a, b) => a - b);
  const begins = of(/_SEND_START$/), ends = of(/_SEND_END$/);
  return begins.slice(0, ends.length).map((begin, i) => [begin, ends[i]]);
}

/** What became of a request, from the text of its error. */
export function outcome(trace) {
  const error = (trace.error || "").toLowerCase();
  if (!error) return trace.timestamps.some(({ name }) => name === "REQUEST_END") ? "ok" : "incomplete";
  if (error.includes("cancel")) return "cancelled";
  if (/timeout|timed out|deadline/.test(error)) return "timeout";
  return error.includes("queue size") ? "rejected" : "failed";
}

/** Requests of clients, newest first, each with `parts`: itself and everything below it, in order, with its depth. */
export function requests(traces) {
  const known = new Map(traces.map((trace) => [trace.id, { trace, children: [] }]));
  const roots = [];
  for (const node of known.values()) {
    const above = known.get(node.trace.parent_id);
    if (above && above !== node) above.children.push(node);
    else roots.push(node);
  }
  const first = (node) => begin(node.trace);
  return roots.map((root) => {
    const parts = [];
    const add = (node, depth) => {
      parts.push({ trace: node.trace, depth, segments: segments(node.trace, node.children.length > 0) });
      node.children.sort((a, b) => first(a) - first(b)).forEach((child) => add(child, depth + 1));
    };
    add(root, 0);
    const times = parts.flatMap((part) => part.trace.timestamps.map(({ ns }) => ns));
    const zero = first(root);
    return { trace: root.trace, parts, zero, total: Math.max(1, Math.max(...times) - zero), outcome: outcome(root.trace) };
  }).sort((a, b) => b.zero - a.zero);
}

function begin(trace) {
  const point = (wanted) => trace.timestamps.find(({ name }) => name === wanted);
  const start = point("HTTP_RECV_START") || point("GRPC_WAITREAD_END") || point("REQUEST_START") || trace.timestamps[0];
  return start ? start.ns : 0;
}

const TOLD = { queue: "queue", input: "input", compute: "infer", output: "output", cache: "cache" };

/** The stages of a Server-Timing header as they follow each other: {stage, what, begin, end} in nanoseconds. */
export function serverTiming(header) {
  let at = 0;
  return [...(header || "").matchAll(/(\w+);dur=([\d.]+)/g)].filter(([, name]) => name in TOLD).map(([, name, ms]) => {
    const begin = at;
    at += Number(ms) * 1e6;
    return { stage: TOLD[name], what: name, begin, end: at };
  });
}
