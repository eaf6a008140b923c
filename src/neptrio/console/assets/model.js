// One model: live figures by stage, batches, instances, its configuration, and what can be done with it.

import { post } from "./api.js";
import { bars, Lines } from "./chart.js";
import { card, confirmed, facts, make, tell } from "./dom.js";
import { bytes, count, duration, loadsByRequest, percentile, SHORT, STAGES } from "./figures.js";
import { configView } from "./config.js";
import { Ensemble } from "./ensemble.js";
import { Errors } from "./errors.js";
import { modelRows, stateBadge, stateKey } from "./overview.js";
import { Sequences } from "./sequences.js";
import { Table } from "./table.js";

export class Model {
  constructor(app, [name, version = ""]) {
    this.app = app;
    this.name = name;
    this.version = version;
    this.title = make("h1", {}, name, " ", make("small", {}, version && `version ${version}`));
    this.state = make("span", { class: "state" });
    this.reason = make("p", { class: "reason", hidden: true });
    this.actions = make("div", { class: "actions" });
    this.figures = {
      rate: new Lines("Requests", (value) => `${count(value)}/s`, ["answered", "failed"], ["failed"]),
      latency: new Lines("Latency", duration, ["p50", "p99"]),
      queue: new Lines("In the model", count, ["waiting", "executing"]),
      batch: new Lines("Batch size", count, ["mean"]),
    };
    this.stages = new Table("Latency by stage", [
      { name: "Stage", cell: (row) => SHORT[row.stage] },
      ...["p50", "p90", "p99"].map((key) => ({ name: key, number: true, cell: (row) => duration(row[key]) })),
      { name: "p50 since load", number: true, cell: (row) => duration(row.all50) },
      { name: "p99 since load", number: true, cell: (row) => duration(row.all99) },
      { name: "max since load", number: true, cell: (row) => duration(row.max) },
    ], { empty: "No request has been answered yet." });
    this.ensemble = new Ensemble();
    this.batches = make("div", { class: "split" });
    this.accounts = make("div");
    this.instances = new Table("Instances", [
      { name: "Instance", cell: (row) => row.instance },
      { name: "Process", number: true, cell: (row) => row.pid },
      { name: "Memory", number: true, cell: (row) => bytes(row.resident_bytes) },
      { name: "CPU", number: true, cell: (row) => (row.used === null ? "–" : `${Math.round(row.used * 100)} %`) },
      { name: "Restarts", number: true, cell: (row) => row.restarts },
      { name: "Ahead of it", number: true, cell: (row) => row.ring },
    ], { empty: "Its instances are threads of the server." });
    this.config = make("div", {}, make("p", { class: "nothing" }, "The configuration is shown once the model is ready."));
    this.placed = make("p", { class: "help" });
    this.live = make("div", { class: "panel" },
      make("div", { class: "charts four" }, Object.values(this.figures).map((chart) => chart.element)),
      this.ensemble.element,
      card("Latency by stage, in the last interval", this.stages.element),
      card("Batches", this.batches),
      card("Instances", this.placed, this.instances.element),
      card("Requests since the load", this.accounts));
    this.errors = new Errors(app, name, version);
    this.sequences = new Sequences(app, name, version);
    this.element = make("div", { class: "panel" },
      make("div", { class: "heading" }, make("a", { href: "#overview", class: "back" }, "← All models"), this.title, this.state, this.actions),
      this.reason, this.errors.element, this.live, this.sequences.element, card("Configuration", this.config));
    this.#actions();
  }

  #actions() {
    const { about } = this.app.live;
    const why = about.read_only ? "the server is read-only" : about.admin_elsewhere ? "control is served at the admin address only" : "";
    const button = (text, action, danger) => make("button", { type: "button", class: danger ? "danger" : null, disabled: Boolean(why), title: why || null, onclick: action }, text);
    this.actions.replaceChildren(make("a", { class: "button", href: `#request/${encodeURIComponent(this.name)}/${encodeURIComponent(this.version)}` }, "Send a request"),
      ...(loadsByRequest(about.model_control_mode) ? [button("Load", () => this.#control("load")), button("Unload", () => this.#unload(), true)] : []));
  }

  async #unload() {
    if (await confirmed(`Unload ${this.name}?`, "It takes no more requests; those under way are answered.", "Unload")) await this.#control("unload");
  }

  async #control(verb) {
    tell(`${this.name}: ${verb} …`, "plain");
    try {
      await post(`/v2/repository/models/${encodeURIComponent(this.name)}/${verb}`);
      tell(`${this.name}: ${verb} is done`);
    } catch (error) {
      this.app.refused(error);
      tell(`${this.name}: ${error.message}`, "bad");
    }
    this.app.live.now();
  }

  update() {
    const { live } = this.app;
    const rows = modelRows(live).filter((row) => row.name === this.name);
    const row = rows.find((found) => found.version === this.version) || rows[rows.length - 1];
    const shown = row || { state: live.history.length ? "not known" : "…" };
    if (this.shownState !== stateKey(shown)) {
      this.shownState = stateKey(shown);
      this.state.replaceChildren(stateBadge(shown));
    }
    this.reason.hidden = !row?.reason;
    this.reason.textContent = row?.reason || "";
    this.errors.element.hidden = !row?.model;
    this.errors.update();
    const { model } = row || {};
    this.live.hidden = !model;
    if (!model) return;
    const { history, stat, seen } = model;
    const now = history[history.length - 1];
    const column = (read) => history.map(read);
    const { rate, latency, queue, batch } = this.figures;
    const times = column((point) => point.time);
    rate.update([column((point) => point.requests), column((point) => point.failures)], times, now.requests === null ? "–" : `${count(now.requests)}/s`, now.failures ? `${count(now.failures)} failed/s` : "", true);
    latency.update([column((point) => point.request[0]), column((point) => point.request[1])], times, duration(now.request[0]), now.request[1] === null ? "no requests" : `p99 ${duration(now.request[1])}`);
    queue.update([column((point) => point.queued), column((point) => point.executing)], times, count(now.queued), `waiting, ${count(now.executing)} executing`);
    batch.update([column((point) => point.batch)], times, count(now.batch), `${count(seen.inferences)} inferences/s`);
    this.stages.update(STAGES.filter((stage) => stat.percentiles?.[stage]?.count).map((stage) => {
      const all = stat.percentiles[stage];
      const recent = (share) => percentile(seen.histograms[stage], share);
      return { stage, p50: recent(0.5), p90: recent(0.9), p99: recent(0.99), all50: all.p50, all99: all.p99, max: all.max };
    }), (found) => found.stage);
    this.#batches(stat, seen);
    const config = live.config(model);
    this.placed.textContent = row.place ? `${row.place}${stat.memory_usage?.length ? `. Memory: ${stat.memory_usage.map((use) => `${bytes(use.byte_size)} ${use.type}`).join(", ")}` : ""}` : "";
    this.instances.update(stat.processes.map((process) => ({ ...process, used: model.cores.get(process.pid) ?? null })), (process) => process.instance);
    const text = JSON.stringify([stat.accounts, stat.live, stat.cache_hit, stat.inference_stats.cache_hit]);
    if (text !== this.shownAccounts) {
      this.shownAccounts = text;
      const { accounts, inference_stats: found } = stat;
      this.accounts.replaceChildren(facts([
        ["Accepted", count(accounts.accepted)], ["Answered", count(accounts.answered)], ["Failed", count(accounts.failed)],
        ["Cancelled", count(accounts.cancelled)], ["Refused", count(accounts.refused)], ["Input bytes under way", bytes(stat.live.inflight_bytes)],
        ["Cache", `${count(Number(found.cache_hit.count))} hits, ${count(Number(found.cache_miss.count))} misses`], ["Live sequences", count(stat.live.sequences)],
      ]));
    }
    if (config && this.shownConfig !== config) {
      this.shownConfig = config;
      this.config.replaceChildren(configView(config));
      this.ensemble.show(config);
      this.sequences.show(Boolean(config.sequence_batching));
    }
    this.ensemble.update(stat.steps || [], model.before?.steps);
    this.sequences.update();
  }

  #batches(stat, seen) {
    const text = JSON.stringify([stat.batches, seen.closings]);
    if (text === this.shownBatches) return;
    this.shownBatches = text;
    const sizes = {};
    const reasons = [];
    for (const [reason, closing] of Object.entries(stat.batches)) {
      reasons.push([reason.replaceAll("_", " "), closing.count, closing.count ? closing.oldest_wait_ns / closing.count : 0]);
      for (const [size, n] of Object.entries(closing.sizes)) sizes[size] = (sizes[size] || 0) + n;
    }
    if (!reasons.length) {
      this.batches.replaceChildren(make("p", { class: "nothing" }, "No batch has been executed yet."));
      return;
    }
    const waits = new Map(reasons.map(([reason, , wait]) => [reason, wait]));
    const pairs = Object.entries(sizes).map(([size, n]) => [Number(size), n]).sort(([a], [b]) => a - b);
    this.batches.replaceChildren(
      make("div", {}, make("h3", {}, "Why they were closed"), bars(reasons.map(([reason, n]) => [`${reason} · waited ${duration(waits.get(reason))}`, n]).sort((a, b) => b[1] - a[1]), count)),
      make("div", {}, make("h3", {}, "Their sizes"), bars(pairs.slice(0, 16).map(([size, n]) => [`${size}`, n]), count)));
  }
}
