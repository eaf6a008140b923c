// The frame around the panels: which one is shown, who the caller is, light or dark, how often to ask.

import { access, allow, ApiError, get } from "./api.js";
import { byId, field, make, say } from "./dom.js";
import { Live } from "./live.js";
import { Log } from "./log.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";
import { Request } from "./request.js";
import { Settings } from "./settings.js";
import { Traces } from "./traces.js";

const PANELS = { overview: Overview, models: Model, request: Request, traces: Traces, log: Log, settings: Settings };

class App {
  constructor() {
    this.live = new Live();
    this.panel = null;
    this.kept = new Map(); // panels that are shown again as they were
    this.live.addEventListener("change", () => this.update());
    addEventListener("hashchange", () => this.show());
    byId("pace").addEventListener("change", (event) => this.live.every(Number(event.target.value)));
    byId("who").addEventListener("click", () => this.askWho());
    byId("skip").addEventListener("click", () => byId("main").focus());
    byId("theme").addEventListener("click", () => this.theme());
    addEventListener("keydown", (event) => this.key(event));
  }

  async start() {
    this.applyTheme(localStorage.getItem("neptrio.theme") || "");
    try {
      this.live.about = await get("/console/about.json");
    } catch (error) {
      this.live.error = error;
    }
    byId("who").hidden = !(this.live.about.tokens || Object.keys(this.live.about.restricted || {}).length);
    this.show();
    this.live.start(this.live.about);
  }

  /** Shows the panel that the address names. */
  show() {
    const [name, ...rest] = location.hash.slice(1).split("/").map(decode);
    const kind = PANELS[name] ? name : "overview";
    const key = [kind, ...rest].join("/");
    if (this.shownKey === key) return;
    this.shownKey = key;
    const keep = kind !== "models";
    this.panel = (keep && this.kept.get(key)) || new PANELS[kind](this, rest);
    if (keep) this.kept.set(key, this.panel);
    byId("main").replaceChildren(this.panel.element);
    for (const link of document.querySelectorAll("nav a")) {
      const own = link.hash.slice(1) === (kind === "models" ? "overview" : kind);
      if (own) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    scrollTo(0, 0);
    this.update();
  }

  update() {
    const { live } = this;
    const { error, server } = live;
    const status = byId("status");
    const kind = error ? "bad" : live.refused && !live.models.length ? "warn" : server && !server.ready ? "warn" : live.before || server ? "ok" : "plain";
    status.className = `dot ${kind}`;
    say(byId("state"), error ? error.message : live.refused && !live.models.length ? live.refused.message : server ? (server.ready ? "ready" : "not ready") : live.before ? "live" : "connecting …");
    say(byId("name"), server ? `${server.id} · ${location.host}` : location.host);
    if (live.refused) this.refused(live.refused);
    this.panel?.update();
    document.documentElement.dataset.rounds = String(Number(document.documentElement.dataset.rounds || 0) + 1);
  }

  /** Something was refused: shows the way to say who one is, once. */
  refused(error) {
    if (!(error instanceof ApiError) || !error.denied) return;
    const wanted = this.live.about.tokens || error.header;
    if (!wanted) return;
    byId("who").hidden = false;
    if (!this.told) {
      this.told = true;
      this.askWho(error);
    }
  }

  /** Asks for a token and for the values of restricted headers. */
  askWho(error) {
    if (document.querySelector("dialog[open]")) return;
    const names = [...new Set([...Object.values(this.live.about.restricted || {}), ...Object.keys(access.headers), ...(error?.header ? [error.header] : [])])];
    const token = make("input", { type: "password", value: access.token, autocomplete: "off", spellcheck: "false" });
    const values = names.map((name) => [name, make("input", { type: "password", value: access.headers[name] || "", autocomplete: "off", spellcheck: "false" })]);
    const dialog = make("dialog", { class: "ask", "aria-label": "Access", onclose: () => dialog.remove() },
      make("form", { method: "dialog", onsubmit: (event) => {
        event.preventDefault();
        allow(token.value.trim(), Object.fromEntries(values.filter(([, input]) => input.value).map(([name, input]) => [name, input.value])));
        for (const panel of this.kept.values()) panel.again?.();
        dialog.close();
        this.live.now();
      } },
      make("h2", {}, "Access"),
      make("p", {}, error?.message || "", " What you enter stays in this tab and is sent to this server only."),
      this.live.about.tokens ? field("Token", token) : null, values.map(([name, input]) => field(`Header ${name}`, input)),
      make("div", { class: "actions" }, make("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), make("button", { type: "submit", class: "primary" }, "Use it"))));
    document.body.append(dialog);
    dialog.showModal();
  }

  theme() {
    const order = ["", "light", "dark"];
    const next = order[(order.indexOf(localStorage.getItem("neptrio.theme") || "") + 1) % 3];
    localStorage.setItem("neptrio.theme", next);
    this.applyTheme(next);
  }

  applyTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    const name = { "": "as the system", light: "light", dark: "dark" }[theme];
    byId("theme").setAttribute("aria-label", `Colours: ${name}`);
    byId("theme").title = `Colours: ${name}`;
    say(byId("theme"), { "": "◐", light: "☀", dark: "☾" }[theme]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) return;
    const names = ["overview", "request", "traces", "log", "settings"];
    if (event.key >= "1" && event.key <= "5") location.hash = names[Number(event.key) - 1];
    else if (event.key === "/") {
      const search = document.querySelector("main input[type=search]");
      if (search) { search.focus(); event.preventDefault(); }
    }
  }
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

new App().start();
