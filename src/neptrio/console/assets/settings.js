// Trace and log settings, and the repository: what can be changed while the server runs.

import { get, post } from "./api.js";
import { badge, card, choice, confirmed, field, make, tell } from "./dom.js";
import { loadsByRequest } from "./figures.js";
import { modelRows, STATES } from "./overview.js";
import { Table } from "./table.js";

export class Settings {
  constructor(app) {
    this.app = app;
    this.asked = false;
    this.refusal = "";
    this.traces = make("form", { class: "settings", onsubmit: (event) => { event.preventDefault(); this.#saveTraces(); } });
    this.logs = make("form", { class: "settings", onsubmit: (event) => { event.preventDefault(); this.#saveLogs(); } });
    this.model = make("select", { "aria-label": "Settings of", onchange: () => this.#askTraces() });
    this.name = make("input", { placeholder: "name of a folder in the repository", required: true, spellcheck: "false" });
    this.table = new Table("Repository", [
      { name: "Model", cell: (row) => row.name },
      { name: "Version", cell: (row) => row.version || "–" },
      { name: "State", cell: (row) => badge(row.state.toLowerCase(), STATES[row.state]), key: (row) => row.state },
      { name: "Reason", below: true, cell: (row) => row.reason },
      { name: "", cell: (row) => (this.#noMode() ? [] : make("div", { class: "actions" }, this.#button("Load", row.name, "load"), row.state === "READY" ? this.#button("Unload", row.name, "unload") : null)), key: (row) => `${row.state}${this.#why()}${this.#noMode()}` },
    ], { empty: "The repository cannot be listed, or is empty." });
    this.whyNot = make("p", { class: "help" });
    this.element = make("div", { class: "panel" }, make("h1", {}, "Settings"),
      make("div", { class: "split cards" }, card("Tracing", field("Of", this.model), this.traces), card("Logging", this.logs)),
      card("Model repository", this.whyNot,
        this.loading = make("form", { class: "inline", onsubmit: (event) => { event.preventDefault(); this.#control(this.name.value.trim(), "load"); } }, this.name, this.load = make("button", { type: "submit" }, "Load")),
        this.table.element));
  }

  #why() {
    const { about } = this.app.live;
    if (about.read_only) return "The server was started with --read-only=true.";
    if (about.admin_elsewhere) return "Control is served at the admin address only (--admin-address).";
    return "";
  }

  /** Why nobody may load or unload models here: then the way to do so is not shown at all. */
  #noMode() {
    const mode = this.app.live.about.model_control_mode;
    return loadsByRequest(mode) ? "" : `Loading and unloading need --model-control-mode=explicit; this server has ${mode}.`;
  }

  #button(text, name, verb) {
    return make("button", { type: "button", class: `small${verb === "unload" ? " danger" : ""}`, disabled: Boolean(this.#why()), "aria-label": `${text} ${name}`, onclick: () => this.#control(name, verb) }, text);
  }

  async #control(name, verb) {
    if (!name) return;
    if (verb === "unload" && !await confirmed(`Unload ${name}?`, "It takes no more requests; those under way are answered.", "Unload")) return;
    tell(`${name}: ${verb} …`, "plain");
    try {
      await post(`/v2/repository/models/${encodeURIComponent(name)}/${verb}`);
      tell(`${name}: ${verb} is done`);
    } catch (error) {
      this.app.refused(error);
      tell(`${name}: ${error.message}`, "bad");
    }
    this.app.live.now();
  }

  update() {
    const { live } = this.app;
    const names = [...new Set(live.models.map((model) => model.name))];
    const text = JSON.stringify(names);
    if (text !== this.shown) {
      this.shown = text;
      const before = this.model.value;
      this.model.replaceChildren(make("option", { value: "" }, "all models"), ...names.map((name) => make("option", { value: name }, name)));
      if (names.includes(before)) this.model.value = before;
    }
    this.whyNot.textContent = this.#noMode() || this.#why();
    this.loading.hidden = Boolean(this.#noMode());
    this.load.disabled = Boolean(this.#why());
    this.table.update(modelRows(live), (row) => row.id);
    if (!this.asked) {
      this.asked = true;
      this.#askTraces();
      this.#askLogs();
    }
  }

  /** Called when the caller has said who they are. */
  again() {
    this.asked = false;
  }

  #tracePath() {
    return this.model.value ? `/v2/models/${encodeURIComponent(this.model.value)}/trace/setting` : "/v2/trace/setting";
  }

  async #askTraces() {
    try {
      this.#drawTraces(await get(this.#tracePath()));
    } catch (error) {
      this.app.refused(error);
      this.traces.replaceChildren(make("p", { class: "problem" }, error.message));
    }
  }

  #drawTraces(now) {
    this.nowTraces = now;
    const levels = [].concat(now.trace_level);
    this.level = {};
    const box = (level, meaning) => make("label", { class: "check" }, this.level[level] = make("input", { type: "checkbox", checked: levels.includes(level) }), `${level}: ${meaning}`);
    this.rate = make("input", { type: "number", min: 0, step: 1, value: now.trace_rate, required: true });
    this.count = make("input", { type: "number", min: -1, step: 1, value: now.trace_count, required: true });
    this.tail = make("input", { type: "number", min: 0, step: 1, value: now.trace_tail ?? "0" });
    this.file = make("input", { value: now.trace_file || "", spellcheck: "false" });
    this.traces.replaceChildren(
      make("fieldset", {}, make("legend", {}, "Level"), box("TIMESTAMPS", "when a request reached which stage"), box("TENSORS", "what went in and out, into the trace file")),
      field("Every Nth request", this.rate), field("How many more", this.count, "-1: no limit"), field("Only slower than (µs)", this.tail, "0: all"),
      field("File", this.file, now.trace_file ? `Mode: ${now.trace_mode ?? "triton"}` : "None yet, and tracing needs one: a path inside --trace-dir, or start the server with --trace-config=triton,file=PATH."),
      make("div", { class: "actions" }, make("button", { type: "submit", class: "primary", disabled: Boolean(this.#why()) }, "Apply"), make("span", { class: "help" }, this.#why())));
  }

  async #saveTraces() {
    const chosen = Object.entries(this.level).filter(([, box]) => box.checked).map(([level]) => level);
    const changes = { trace_level: chosen.length ? chosen : ["OFF"], trace_rate: this.rate.value, trace_count: this.count.value };
    if (this.tail.value !== String(this.nowTraces.trace_tail ?? "0")) changes.trace_tail = this.tail.value || "0";
    if (this.file.value !== (this.nowTraces.trace_file || "")) changes.trace_file = this.file.value;
    try {
      this.#drawTraces(await post(this.#tracePath(), changes));
      tell("Trace settings are applied");
    } catch (error) {
      this.app.refused(error);
      tell(error.message, "bad");
    }
  }

  async #askLogs() {
    try {
      this.#drawLogs(await get("/v2/logging"));
    } catch (error) {
      this.app.refused(error);
      this.logs.replaceChildren(make("p", { class: "problem" }, error.message));
    }
  }

  #drawLogs(now) {
    const box = (key, text) => make("label", { class: "check" }, this[key] = make("input", { type: "checkbox", checked: now[key] }), text);
    this.verbose = make("input", { type: "number", min: 0, max: 4294967295, step: 1, value: now.log_verbose_level, required: true });
    this.format = choice(["default", "ISO8601"], now.log_format);
    this.logs.replaceChildren(make("fieldset", {}, make("legend", {}, "Write"), box("log_error", "errors"), box("log_warning", "warnings"), box("log_info", "information")),
      field("Verbosity", this.verbose, "0: none"), field("Format", this.format), make("p", { class: "help" }, `File: ${now.log_file || "standard error"}`),
      make("div", { class: "actions" }, make("button", { type: "submit", class: "primary", disabled: Boolean(this.#why()) }, "Apply"), make("span", { class: "help" }, this.#why())));
  }

  async #saveLogs() {
    const changes = { log_error: this.log_error.checked, log_warning: this.log_warning.checked, log_info: this.log_info.checked, log_verbose_level: Number(this.verbose.value), log_format: this.format.value };
    try {
      this.#drawLogs(await post("/v2/logging", changes));
      tell("Log settings are applied");
    } catch (error) {
      this.app.refused(error);
      tell(error.message, "bad");
    }
  }
}
