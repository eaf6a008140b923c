// Recent traces as waterfalls: a request with what happened below it, on one time axis.

import { get } from "./api.js";
import { waterfall } from "./chart.js";
import { badge, choice, make } from "./dom.js";
import { duration } from "./figures.js";
import { MEANING, requests } from "./stages.js";

const OUTCOMES = { ok: "ok", failed: "bad", rejected: "bad", timeout: "bad", cancelled: "warn", incomplete: "warn" };
const describe = (segment) => `${segment.stage} ${duration(segment.end - segment.begin)}`;

/** The view of one request; `open`: with its points. */
export function traceView(request, open = false) {
  const { trace, parts, zero, total } = request;
  const rows = parts.map(({ trace: part, depth, segments }) => {
    const times = part.timestamps.map(({ ns }) => ns);
    return make("div", { class: "trace-row", vars: { "--depth": depth } },
      make("span", { class: "name", title: part.model_name }, part.model_name),
      waterfall(segments, zero, total, describe),
      make("span", { class: "number" }, duration(times.length ? Math.max(...times) - (depth ? Math.min(...times) : zero) : 0)));
  });
  const spent = new Map();
  for (const segment of parts[0].segments) spent.set(segment.stage, (spent.get(segment.stage) || 0) + segment.end - segment.begin);
  const points = make("table", { class: "points" }, make("thead", {}, make("tr", {}, ["Point", "at", "after the one before"].map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, trace.timestamps.map(({ name, ns }, i) => make("tr", {}, make("td", {}, name), make("td", { class: "number" }, duration(Math.max(0, ns - zero))), make("td", { class: "number" }, i ? duration(ns - trace.timestamps[i - 1].ns) : "")))));
  const title = make("div", { class: "line" },
    badge(request.outcome, OUTCOMES[request.outcome]), make("b", {}, trace.model_name), make("span", { class: "muted" }, `v${trace.model_version}`),
    trace.request_id ? make("code", {}, trace.request_id) : null, make("span", { class: "number" }, duration(total)));
  const stages = make("summary", {}, [...spent].map(([stage, ns]) => make("span", { class: "spent", title: MEANING[stage] }, make("i", { class: `swatch stage-${stage}` }), `${stage} ${duration(ns)}`)), spent.size ? null : "Points");
  return make("article", { class: "trace-box", "data-trace": trace.id }, title,
    trace.error ? make("p", { class: "problem" }, trace.error) : null,
    make("div", { class: "trace-rows" }, rows),
    make("details", { class: "trace", open }, stages, make("div", { class: "scroll" }, points)));
}

export class Traces {
  constructor(app) {
    this.app = app;
    this.asking = false;
    this.open = new Set();
    this.shown = "";
    this.filter = make("input", { type: "search", placeholder: "Model, request id or error", "aria-label": "Filter traces", oninput: () => this.#draw() });
    this.outcome = choice(["all outcomes", "ok", "not ok"], "all outcomes", { "aria-label": "Outcome", onchange: () => this.#draw() });
    this.order = choice(["newest first", "slowest first"], "newest first", { "aria-label": "Order", onchange: () => this.#draw() });
    this.hold = make("input", { type: "checkbox", onchange: () => this.update() });
    this.summary = make("p", { class: "help" });
    this.list = make("div", { class: "traces" });
    this.traces = [];
    const legend = make("ul", { class: "legend" }, Object.entries(MEANING).map(([stage, meaning]) => make("li", { title: meaning }, make("i", { class: `swatch stage-${stage}` }), stage)));
    this.element = make("div", { class: "panel" },
      make("div", { class: "heading" }, make("h1", {}, "Recent traces"), make("div", { class: "filters" }, this.filter, this.outcome, this.order, make("label", { class: "check" }, this.hold, "Hold still"))),
      legend, this.summary, this.list);
  }

  async update() {
    if (this.asking || this.hold.checked) return;
    this.asking = true;
    try {
      this.traces = requests(await get("/v2/trace/recent"));
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
      this.app.refused(error);
      this.traces = [];
    } finally {
      this.asking = false;
    }
    this.#draw();
  }

  #draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const outcome = this.outcome.value;
    const found = this.traces.filter((request) => (outcome === "all outcomes" || (request.outcome === "ok") === (outcome === "ok"))
      && request.parts.some(({ trace }) => `${trace.model_name}\n${trace.request_id || ""}\n${trace.error || ""}`.toLowerCase().includes(wanted)));
    if (this.order.value === "slowest first") found.sort((a, b) => b.total - a.total);
    const text = JSON.stringify([found.map((request) => request.trace.id), this.order.value, this.problem]);
    if (text === this.shown) return;
    this.shown = text;
    this.summary.replaceChildren(...(this.problem ? [this.problem] : found.length ? [`${found.length} of the last ${this.traces.length} traced requests.`]
      : this.traces.length ? ["No trace matches."] : ["Nothing was traced yet. Tracing is switched on under ", make("a", { href: "#settings" }, "Settings"), ": level TIMESTAMPS, a file, and a rate of 1 for every request."]));
    this.list.replaceChildren(...found.slice(0, 64).map((request) => {
      const view = traceView(request, this.open.has(request.trace.id));
      const points = view.lastChild;
      points.addEventListener("toggle", () => this.open[points.open ? "add" : "delete"](request.trace.id));
      return view;
    }));
  }
}
