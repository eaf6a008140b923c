// What the server is doing: asks for its statistics again and again, and keeps the last few minutes of them.

import { ApiError, caller, get, modelPath, post } from "./api.js";
import { apart, cores, frontEnds, grown, interval, merged, percentile, STAGES } from "./figures.js";

export const SLOTS = 120; // moments that are kept
const MOST_CONFIGS = 300; // of so many models it is asked where they run

export class Live extends EventTarget {
  constructor() {
    super();
    this.seconds = 2;
    this.paused = false;
    this.error = null;
    this.about = {};
    this.server = null; // server.json; null where the caller may not read it
    this.index = null; // rows of the repository index; null where the caller may not read it
    this.errors = []; // of /v2/errors: what requests met last, of each version
    this.noErrors = ""; // why the caller may not read them
    this.onDemand = null; // of models that are loaded on demand; null where there are none
    this.frontEnds = []; // rows of figures.frontEnds()
    this.models = []; // one object per model version that is ready
    this.history = []; // {time, requests, failures, inferences, p50, p99, queued, executing, lag50, lag99, connections, cpu}
    this.configs = new Map(); // "name/version/loaded" -> configuration
    this.before = null;
    this.timer = 0;
    this.round = null;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.now(); });
  }

  /** Begins; `about` is about.json. */
  start(about) {
    this.about = about;
    this.now();
  }

  /** Asks at once. */
  now() {
    clearTimeout(this.timer);
    if (!this.round) this.round = this.#round().finally(() => { this.round = null; this.#next(); });
    return this.round;
  }

  /** Sets the seconds between two rounds, 0 = none. */
  every(seconds) {
    this.paused = seconds === 0;
    this.seconds = seconds || this.seconds;
    this.now();
  }

  #next() {
    clearTimeout(this.timer);
    if (!this.paused && !document.hidden) this.timer = setTimeout(() => this.now(), this.seconds * 1000);
  }

  async #round() {
    const may = (promise) => promise.catch((error) => {
      if (error instanceof ApiError && error.denied) return { refused: error };
      throw error;
    });
    try {
      const [stats, server, index, errors] = await Promise.all([
        may(get("/v2/models/stats?histograms=true&live=true&percentiles=50,90,99")),
        may(get("/console/server.json")),
        may(post("/v2/repository/index?timings=true")),
        this.noErrors && this.noErrorsFor === caller() ? null : may(get("/v2/errors")),
      ]);
      this.refused = stats.refused || server.refused || index.refused || null;
      this.server = server.refused ? null : server;
      this.index = index.refused ? null : index;
      if (errors) {
        this.errors = errors.refused ? [] : errors.models;
        this.noErrors = errors.refused?.message || "";
        this.noErrorsFor = caller();
      }
      this.error = null;
      if (!stats.refused) this.#take(stats, performance.now() / 1000);
      else this.models = this.frontEnds = [];
      this.onDemand = stats.on_demand || null;
      this.#configs();
    } catch (error) {
      this.error = error;
      this.noErrors = ""; // the next one that answers may be another server
    }
    this.dispatchEvent(new Event("change"));
  }

  #take(stats, time) {
    const last = this.before;
    const seconds = last ? time - last.time : 0;
    const moment = Date.now();
    const known = new Map(this.models.map((model) => [model.id, model]));
    this.models = stats.model_stats.map((stat) => {
      const id = `${stat.name}/${stat.version}`;
      const model = known.get(id) || { id, name: stat.name, version: stat.version, history: [] };
      const old = last?.stats.get(id);
      const seen = interval(old, stat, seconds);
      model.before = old;
      model.stat = stat;
      model.seen = seen;
      model.cores = cores(old?.processes, stat.processes || [], seconds);
      const point = { time: moment, requests: old ? seen.requests : null, failures: old ? seen.failures : null, batch: seen.batch, queued: stat.live.queued + stat.live.prepared, executing: stat.live.executing };
      for (const stage of STAGES) point[stage] = [percentile(seen.histograms[stage], 0.5), percentile(seen.histograms[stage], 0.99)];
      model.history = [...model.history, point].slice(-SLOTS);
      return model;
    });
    this.frontEnds = frontEnds(last?.frontEnds, stats.front_ends || [], seconds);
    const all = merged(this.models.map((model) => model.seen.histograms.request));
    const lag = last && stats.loop_lag ? grown(apart(stats.loop_lag.cumulative), apart(last.lag.cumulative)) : [];
    const total = (read) => this.models.reduce((sum, model) => sum + read(model), 0);
    const cpu = this.server?.process.cpu_seconds;
    this.history = [...this.history, {
      time: moment, first: !last,
      requests: last ? total((model) => model.seen.requests) : null,
      failures: last ? total((model) => model.seen.failures) : null,
      p50: percentile(all, 0.5), p99: percentile(all, 0.99),
      queued: total((model) => model.stat.live.queued + model.stat.live.prepared),
      executing: total((model) => model.stat.live.executing),
      lag50: percentile(lag, 0.5), lag99: percentile(lag, 0.99),
      connections: this.server?.connections.open ?? null,
      cpu: last && cpu !== undefined && last.cpu !== undefined && seconds > 0 ? (cpu - last.cpu) / seconds : null,
      memory: this.server?.process.resident_bytes ?? null,
    }].slice(-SLOTS);
    this.before = { time, cpu, lag: stats.loop_lag, frontEnds: stats.front_ends, stats: new Map(stats.model_stats.map((stat) => [`${stat.name}/${stat.version}`, stat])) };
  }

  /** Asks for configurations that are not known yet, a few at a time. */
  #configs() {
    const wanted = this.models.slice(0, MOST_CONFIGS).filter((model) => !this.configs.has(this.configKey(model))).slice(0, 40);
    for (const model of wanted) {
      const key = this.configKey(model);
      this.configs.set(key, null);
      get(`${modelPath(model.name, model.version)}/config?defaulted=true`).then((config) => this.configs.set(key, config), (error) => {
        if (!(error instanceof ApiError && error.status)) this.configs.delete(key); // asked again if nobody answered
      });
    }
  }

  /** What a version's configuration is kept under: a reload makes another one. */
  configKey(model) {
    return `${model.id}/${this.row(model.name, model.version)?.loaded_at ?? 0}/${model.stat?.last_load ?? ""}`;
  }

  /** The configuration of a model, null until it is known. */
  config(model) {
    return this.configs.get(this.configKey(model)) || null;
  }

  /** The row of the repository index for a version. */
  row(name, version) {
    return this.index?.find((row) => row.name === name && (row.version || "") === version);
  }
}
