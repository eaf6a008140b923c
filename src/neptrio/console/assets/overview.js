// The first panel: the server as a whole, and a table of its models.

import { Lines, Spark } from "./chart.js";
import { Demand, resting } from "./demand.js";
import { badge, card, choice, facts, make } from "./dom.js";
import { Errors } from "./errors.js";
import { bytes, count, duration, failing, percentile, place, plural } from "./figures.js";
import { Table } from "./table.js";

export const STATES = { READY: "ok", LOADING: "warn", UNLOADING: "warn", UNAVAILABLE: "bad" };

// what needs somebody's attention first: models that do not serve, then those that fail, then the others
const URGENCY = (row) => (row.resting ? 0 : row.state !== "READY" ? 2 : row.failing ? 1 : 0);

/** The badge of a model's state: one that fails most of its requests is not plainly ready. */
export const stateBadge = (row) => (row.failing ? badge(`${row.state.toLowerCase()}, most requests fail`, "bad") : badge(row.state.toLowerCase(), STATES[row.state]));
export const stateKey = (row) => `${row.state}${Boolean(row.failing)}`;

const ORDERS = {
  "busiest first": (model) => model.seen.requests,
  "slowest first": (model) => percentile(model.seen.histograms.request, 0.99) ?? 0,
  "most queued first": (model) => model.stat.live.queued + model.stat.live.prepared,
};

export class Overview {
  constructor(app) {
    this.app = app;
    const rate = (value) => `${count(value)}/s`;
    this.charts = {
      rate: new Lines("Requests", rate, ["answered", "failed"], ["failed"]),
      latency: new Lines("Latency", duration, ["p50", "p99"]),
      queue: new Lines("In the server", count, ["waiting", "executing"]),
      lag: new Lines("Loop lag", duration, ["p50", "p99"]),
      connections: new Lines("Connections", count, ["open"]),
      cpu: new Lines("Server process", (value) => `${Math.round(value * 100)} %`, ["cores"]),
    };
    this.sparks = new Map();
    this.filter = make("input", { type: "search", placeholder: "Filter models", "aria-label": "Filter models", oninput: () => this.update() });
    this.order = choice(["by name", "failed first", "busiest first", "slowest first", "most queued first"], "failed first", { "aria-label": "Order", onchange: () => this.update() });
    const link = (row) => make("a", { href: `#models/${encodeURIComponent(row.name)}/${encodeURIComponent(row.version)}` }, row.name);
    this.table = new Table("Models", [
      { name: "Model", cell: link, key: (row) => row.name },
      { name: "Version", cell: (row) => row.version || "–" },
      { name: "State", cell: stateBadge, key: stateKey },
      { name: "Runs on", cell: (row) => row.place || "–" },
      { name: "Requests/s", number: true, cell: (row) => (row.model ? count(row.model.seen.requests) : "–") },
      { name: "Trend", cell: (row) => this.#spark(row), key: (row) => `${row.id}${Boolean(row.model)}` },
      { name: "p50", number: true, cell: (row) => row.p50 },
      { name: "p99", number: true, cell: (row) => row.p99 },
      { name: "Queued", number: true, cell: (row) => (row.model ? count(row.model.stat.live.queued + row.model.stat.live.prepared) : "–") },
      { name: "Batch", number: true, cell: (row) => (row.model ? count(row.model.seen.batch) : "–") },
      { name: "Failed", number: true, mark: (row) => row.model && Number(row.model.stat.inference_stats.fail.count) > 0, cell: (row) => (row.model ? count(Number(row.model.stat.inference_stats.fail.count)) : "–") },
      { name: "Reason", below: true, cell: (row) => row.reason },
    ], { empty: "No model matches." });
    this.table.element.classList.add("models");
    this.frontEnds = new Table("Front ends", [
      { name: "Front end", cell: (row) => String(row.number) },
      { name: "Process", number: true, cell: (row) => String(row.pid) },
      { name: "Connections", number: true, cell: (row) => count(row.connections) },
      { name: "Requests/s", number: true, cell: (row) => count(row.rate) },
      { name: "Under way", number: true, cell: (row) => count(row.under_way) },
      { name: "Loop lag p99", number: true, cell: (row) => duration(row.lag99) },
      { name: "Memory", number: true, cell: (row) => bytes(row.resident_bytes) },
      { name: "CPU", number: true, cell: (row) => (row.cores === null ? "–" : `${Math.round(row.cores * 100)} %`) },
      { name: "Restarts", number: true, cell: (row) => count(row.restarts) },
    ]);
    this.fronts = card("Front ends", this.frontEnds.element);
    this.errors = new Errors(app);
    this.demand = new Demand(app);
    this.server = make("div");
    this.element = make("div", { class: "panel" },
      make("div", { class: "charts" }, Object.values(this.charts).map((chart) => chart.element)),
      make("section", { class: "card" }, make("div", { class: "bar" }, make("h2", {}, "Models"), make("div", { class: "filters" }, this.filter, this.order)), this.table.element),
      this.demand.element, this.errors.element, this.fronts, card("Server", this.server));
  }

  #spark(row) {
    if (!row.model) return make("span", {}, "–");
    const spark = new Spark();
    this.sparks.set(row.id, spark);
    return spark.element;
  }

  update() {
    const { live } = this.app;
    const { history } = live;
    const now = history[history.length - 1];
    if (now) {
      const column = (key) => history.map((point) => point[key]);
      const times = column("time");
      const { charts } = this;
      charts.rate.update([column("requests"), column("failures")], times, now.requests === null ? "–" : `${count(now.requests)}/s`, now.failures ? `${count(now.failures)} failed/s` : "", true);
      charts.latency.update([column("p50"), column("p99")], times, duration(now.p50), now.p99 === null ? "no requests" : `p99 ${duration(now.p99)}`);
      charts.queue.update([column("queued"), column("executing")], times, count(now.queued), `waiting, ${count(now.executing)} executing`);
      charts.lag.update([column("lag50"), column("lag99")], times, duration(now.lag50), now.lag99 === null ? "" : `p99 ${duration(now.lag99)}`);
      charts.connections.update([column("connections")], times, count(now.connections), live.server ? `${plural(live.server.connections.clients, "client")}` : "");
      charts.cpu.update([column("cpu")], times, now.cpu === null ? "–" : `${Math.round(now.cpu * 100)} %`, now.memory === null ? "" : bytes(now.memory));
    }
    const wanted = this.filter.value.trim().toLowerCase();
    // thousands may wait to be asked for: they are found by their names
    const rows = modelRows(live).filter((row) => row.name.toLowerCase().includes(wanted) && (wanted || !row.resting));
    const measure = ORDERS[this.order.value];
    if (this.order.value === "failed first") rows.sort((a, b) => URGENCY(b) - URGENCY(a)); // by name otherwise: the sort is stable
    if (measure) rows.sort((a, b) => (b.model ? measure(b.model) : -1) - (a.model ? measure(a.model) : -1));
    this.table.update(rows, (row) => row.id);
    for (const row of rows) if (row.model) this.sparks.get(row.id)?.update(row.model.history.map((point) => point.requests || 0), row.model.history.length);
    this.errors.update();
    this.demand.update();
    this.fronts.hidden = !live.frontEnds.length;
    this.frontEnds.update(live.frontEnds, (row) => row.number);
    this.#server(live.server);
  }

  #server(server) {
    const text = JSON.stringify([server, Boolean(server)]);
    if (text === this.shown) return;
    this.shown = text;
    if (!server) {
      this.server.replaceChildren(make("p", { class: "nothing" }, "What concerns the whole server needs a token that may read all models."));
      return;
    }
    const { connections, cache, host, traces } = server;
    const hits = cache && cache.lookups ? `${Math.round(cache.hits / cache.lookups * 100)} % of ${count(cache.lookups)} lookups` : "no lookups";
    this.server.replaceChildren(facts([
      ["Version", server.version],
      ["Process", `${server.process.pid}, up ${duration((Date.now() / 1000 - server.started) * 1e9)}`],
      ["Memory", `${bytes(server.process.resident_bytes)} resident`],
      host && host.cpu_utilization !== null && ["Machine", `${Math.round(host.cpu_utilization * 100)} % CPU, ${bytes(host.memory_used_bytes)} of ${bytes(host.memory_total_bytes)}`],
      ...(host?.gpus || []).map((gpu) => [`GPU ${gpu.uuid.slice(0, 12)}`, [gpu.utilization !== null && `${Math.round(gpu.utilization * 100)} %`, gpu.memory_used_bytes !== null && `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`, gpu.power_watts !== null && `${Math.round(gpu.power_watts)} W`].filter(Boolean).join(", ")]),
      ["Connections", `${count(connections.open)} of ${plural(connections.clients, "client")}, ${count(connections.turned_away)} turned away`],
      ["Held for requests", `${bytes(server.held_bytes)} of ${bytes(server.held_bytes_limit)}`],
      ["Response cache", cache ? `${hits}, ${count(cache.entries)} entries, ${bytes(cache.used_bytes)} of ${bytes(cache.total_bytes)}, ${count(cache.evictions)} evicted` : "off"],
      ["Traces", `${count(traces.written)} written, ${count(traces.dropped)} dropped`],
    ]));
  }
}

/** A row for each model version that is known: those of the index, and those that only have statistics. */
export function modelRows(live) {
  const models = new Map(live.models.map((model) => [model.id, model]));
  const rows = (live.index || []).map((row) => ({ name: row.name, version: row.version || "", state: row.state || "not loaded", reason: row.reason || "", id: `${row.name}/${row.version || ""}` }));
  if (!live.index) for (const model of live.models) rows.push({ name: model.name, version: model.version, state: "READY", reason: "", id: model.id });
  for (const row of rows) {
    row.resting = resting(row);
    if (row.resting) [row.state, row.reason] = [row.resting, ""];
    row.model = row.state === "READY" ? models.get(row.id) : undefined;
    row.failing = Boolean(row.model) && failing(row.model.stat, row.model.seen);
    const config = row.model && live.config(row.model);
    row.place = config ? place(config, row.model.stat.processes.length > 0) : "";
    const all = row.model?.stat.percentiles?.request;
    const recent = row.model ? [percentile(row.model.seen.histograms.request, 0.5), percentile(row.model.seen.histograms.request, 0.99)] : [];
    row.p50 = recent[0] !== null && recent.length ? duration(recent[0]) : all?.count ? duration(all.p50) : "–";
    row.p99 = recent[1] !== null && recent.length ? duration(recent[1]) : all?.count ? duration(all.p99) : "–";
  }
  return rows;
}
