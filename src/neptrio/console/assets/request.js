// A form made from a model's metadata: it sends a request and shows the answer, where the time went, and the same request
// as a command and as a program.

import { access, BASE, get, modelPath, send } from "./api.js";
import { waterfall } from "./chart.js";
import { card, copy, field, make } from "./dom.js";
import { duration } from "./figures.js";
import { InputForm } from "./input.js";
import { python } from "./python.js";
import { SequenceForm } from "./sequence_form.js";
import { curl, javascript, needsFile } from "./snippets.js";
import { body } from "./tensors.js";
import { answerView } from "./answer.js";
import { requests, serverTiming } from "./stages.js";
import { traceView } from "./traces.js";

export class Request {
  constructor(app, [name = "", version = ""]) {
    this.app = app;
    this.name = name;
    this.version = version;
    this.inputs = [];
    this.models = make("select", { "aria-label": "Model", onchange: () => { location.hash = `request/${this.models.value}`; } });
    this.id = make("input", { placeholder: "none" });
    this.parameters = make("input", { placeholder: '{"priority": 1}' });
    this.sequence = null; // the part of the form for sequences, where the model has any
    this.binary = make("input", { type: "checkbox" });
    this.form = make("form", { class: "request", onsubmit: (event) => { event.preventDefault(); this.#send(); }, oninput: () => this.#changed() });
    this.submit = make("button", { class: "primary", type: "submit" }, "Send");
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.answer = make("div", { "aria-live": "polite" }, make("p", { class: "nothing" }, "The answer will be here."));
    this.timing = make("div", {}, make("p", { class: "nothing" }, "Where the time went will be here."));
    this.language = "curl"; // the example that is shown
    this.tabs = make("div", { class: "tabs", role: "group", "aria-label": "Examples" });
    this.example = make("div");
    this.element = make("div", { class: "panel" },
      make("div", { class: "heading" }, make("h1", {}, "Send a request"), this.models),
      make("div", { class: "columns" },
        make("section", { class: "card" }, make("h2", {}, "Inputs"), this.form),
        make("div", { class: "stack" }, card("Answer", this.answer), card("Timing", this.timing))),
      card("The same request elsewhere", this.tabs, this.example));
  }

  update() {
    const ready = this.app.live.models;
    const wanted = ready.map((model) => `${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`);
    const own = `${encodeURIComponent(this.name)}/${encodeURIComponent(this.version)}`;
    const text = JSON.stringify(wanted);
    if (text !== this.shown) {
      this.shown = text;
      this.models.replaceChildren(...(wanted.includes(own) ? [] : [make("option", { value: own }, this.name || "Choose a model")]),
        ...ready.map((model, i) => make("option", { value: wanted[i] }, `${model.name} (${model.version})`)));
      this.models.value = own;
    }
    if (!this.asked && (this.name || ready.length)) {
      this.asked = true;
      if (!this.name) {
        const first = ready.find((model) => model.name === "simple") || ready[0];
        this.name = first.name;
        this.version = first.version;
        this.models.value = `${encodeURIComponent(first.name)}/${encodeURIComponent(first.version)}`;
      }
      this.#build();
    }
  }

  async #build() {
    try {
      const path = modelPath(this.name, this.version);
      [this.metadata, this.config] = await Promise.all([get(path), get(`${path}/config`).catch(() => ({}))]);
    } catch (error) {
      this.app.refused(error);
      this.form.replaceChildren(make("p", { class: "problem" }, error.message));
      return;
    }
    const optional = new Set((this.config.input || []).filter((input) => input.optional).map((input) => input.name));
    const batching = this.config.max_batch_size > 0;
    this.inputs = this.metadata.inputs.map((input) => new InputForm(input, { optional: optional.has(input.name), batching, changed: () => this.#changed() }));
    this.sequence = this.config.sequence_batching ? new SequenceForm(() => this.#changed()) : null;
    this.form.replaceChildren(...this.inputs.map((input) => input.element), ...(this.sequence ? [this.sequence.element] : []),
      make("details", { class: "more" }, make("summary", {}, "Id, parameters, encoding"),
        field("Request id", this.id), field("Parameters", this.parameters, "A JSON object: priority, timeout, and your model's own."),
        make("label", { class: "check" }, this.binary, "Send tensors as binary")),
      this.problem, make("div", { class: "actions" }, this.submit,
        make("span", { class: "help" }, `Outputs: ${this.metadata.outputs.map((output) => `${output.name} ${output.datatype}[${output.shape.join(",")}]`).join(", ")}`)));
    this.#changed();
  }

  /** The request as the form has it now. Throws Error. */
  #made() {
    const tensors = this.inputs.map((input) => input.tensor()).filter(Boolean);
    if (!tensors.length) throw new Error("a request has one input at least");
    let parameters = {};
    if (this.parameters.value.trim()) {
      try {
        parameters = JSON.parse(this.parameters.value);
      } catch (error) {
        throw new Error(`the parameters are no JSON: ${error.message}`);
      }
      if (typeof parameters !== "object" || parameters === null || Array.isArray(parameters)) throw new Error("the parameters are a JSON object, like {\"priority\": 1}");
    }
    return { tensors, id: this.id.value, parameters: { ...this.sequence?.parameters(), ...parameters }, binary: this.binary.checked };
  }

  #changed() {
    let made;
    try {
      made = this.#made();
      made.encoded = body(made.tensors, made);
      this.problem.hidden = true;
    } catch (error) {
      this.problem.textContent = error.message;
      this.problem.hidden = false;
      this.submit.disabled = true;
      return null;
    }
    this.submit.disabled = false;
    this.#examples(made);
    return made;
  }

  /** The path of the verb that a request of this model takes. */
  get #path() {
    return `${modelPath(this.name, this.version)}/infer${this.config.model_transaction_policy?.decoupled ? "_stream" : ""}`;
  }

  #examples(made) {
    const { about } = this.app.live;
    const { name, version } = this;
    const decoupled = Boolean(this.config.model_transaction_policy?.decoupled);
    const host = about.rest ? `${location.hostname}:${about.rest.port}` : location.host;
    const tls = about.rest ? about.rest.tls : location.protocol === "https:";
    const base = `${tls ? "https" : "http"}://${host}`;
    const options = { id: made.id, parameters: made.parameters, decoupled, jsonBytes: made.encoded.jsonBytes, token: about.tokens || Boolean(access.token), headers: about.restricted?.inference ? [about.restricted.inference] : [] };
    const { grpc } = about;
    const examples = [
      ["curl", () => curl(base, this.#path, made.tensors, options)],
      // these clients read one response
      ...(decoupled ? [] : [["Python", () => python("http", host, tls, name, version, made.tensors, options)], ["Python asyncio", () => python("aio", host, tls, name, version, made.tensors, options)]]),
      ...(grpc ? [["Python gRPC", () => python("grpc", `${location.hostname}:${grpc.port}`, grpc.tls, name, version, made.tensors, { ...options, headers: grpc.header ? [grpc.header] : [] })]] : []),
      ["JavaScript", () => javascript(base, this.#path, made.tensors, options)],
    ];
    const [title, write] = examples.find(([language]) => language === this.language) || examples[0];
    const text = write();
    this.tabs.replaceChildren(...examples.map(([language]) => make("button", { type: "button", class: "small", "aria-pressed": String(language === title), onclick: () => {
      this.language = language;
      this.#examples(made);
      [...this.tabs.children].find((tab) => tab.textContent === language).focus();
    } }, language)));
    const save = () => {
      const url = URL.createObjectURL(new Blob([made.encoded.body]));
      make("a", { href: url, download: "request.bin" }).click();
      URL.revokeObjectURL(url);
    };
    this.example.replaceChildren(make("pre", { class: "code", tabindex: 0, "aria-label": title }, text),
      make("div", { class: "actions" }, make("button", { type: "button", class: "small", onclick: () => copy(text, title) }, "Copy"),
        needsFile(made.tensors) && !title.startsWith("Python") ? make("button", { type: "button", class: "small", onclick: save }, "Save the body") : null));
  }

  async #send() {
    const made = this.#changed();
    if (!made) return;
    const path = this.#path;
    const forced = this.app.live.about.forced_trace;
    // the trace of this request is found by its id
    const id = made.id || `console-${crypto.randomUUID ? crypto.randomUUID() : Math.random().toString(16).slice(2)}`;
    const parameters = forced ? { ...made.parameters, neptrio_trace: "TIMESTAMPS" } : made.parameters;
    const encoded = body(made.tensors, { ...made, id, parameters });
    const headers = { "Content-Type": encoded.jsonBytes === null ? "application/json" : "application/octet-stream" };
    if (encoded.jsonBytes !== null) headers["Inference-Header-Content-Length"] = String(encoded.jsonBytes);
    headers["Neptrio-Timing"] = "true";
    this.submit.disabled = true;
    performance.clearResourceTimings();
    const begun = performance.now();
    try {
      const answer = await send(path, { method: "POST", body: encoded.body, headers });
      const text = await answer.text();
      const ended = performance.now();
      this.sequence?.answered(made.parameters);
      this.answer.replaceChildren(answerView(text, answer.headers.get("content-type") || "", answer.status));
      await this.#timing(id, path, begun, ended, answer.headers.get("server-timing"));
    } catch (error) {
      const ended = performance.now();
      this.app.refused(error);
      this.answer.replaceChildren(make("div", { class: "problem", role: "alert" }, error.status ? `${error.status}: ${error.message}` : error.message));
      await this.#timing(id, path, begun, ended);
    } finally {
      this.#changed(); // the form may have become wrong meanwhile
    }
    this.app.live.now();
  }

  async #timing(id, path, begun, ended, told = "") {
    const whole = (ended - begun) * 1e6;
    const seen = performance.getEntriesByType("resource").filter((entry) => new URL(entry.name).pathname === BASE + path).pop();
    const parts = [];
    if (seen && seen.requestStart > 0) {
      parts.push({ stage: "overhead", what: "in the browser", begin: 0, end: (seen.requestStart - begun) * 1e6 },
        { stage: "infer", what: "until the answer begins", begin: (seen.requestStart - begun) * 1e6, end: (seen.responseStart - begun) * 1e6 },
        { stage: "send", what: "receiving it", begin: (seen.responseStart - begun) * 1e6, end: (seen.responseEnd - begun) * 1e6 },
        { stage: "overhead", what: "reading it", begin: (seen.responseEnd - begun) * 1e6, end: whole });
    } else parts.push({ stage: "infer", what: "request and answer", begin: 0, end: whole });
    const describe = (part) => `${part.what} ${duration(part.end - part.begin)}`;
    const shown = [make("h3", {}, `Seen by this browser: ${duration(whole)}`), waterfall(parts, 0, whole, describe), make("p", { class: "help" }, parts.map(describe).join(" · "))];
    const stages = serverTiming(told);
    const executed = stages.reduce((sum, stage) => sum + stage.end - stage.begin, 0);
    if (executed) shown.push(make("h3", {}, `Told by the server: ${duration(executed)} from the queue to the outputs`), waterfall(stages, 0, executed, describe), make("p", { class: "help" }, stages.map(describe).join(" · ")));
    let found = null;
    let why = "";
    try {
      const recent = await get("/v2/trace/recent?count=64");
      found = requests(recent).find((request) => request.trace.request_id === id);
      if (!found) why = this.app.live.about.forced_trace ? "The server has no trace of it: it was refused before it was traced." : "It was not traced. With --allow-forced-trace=true every request sent here is, and shown point by point; so is every request with a trace rate of 1 (Settings).";
    } catch (error) {
      why = `The server's traces cannot be read: ${error.message}`;
    }
    if (found) shown.push(make("h3", {}, `Traced by the server: ${duration(found.total)}`), traceView(found, true));
    else shown.push(make("p", { class: "help" }, why));
    this.timing.replaceChildren(...shown);
  }
}
