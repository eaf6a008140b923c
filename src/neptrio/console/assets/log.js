// The last lines of the server's log, followed while the panel is shown.

import { ApiError, caller, get } from "./api.js";
import { choice, make } from "./dom.js";

const MOST = 1000; // lines that are kept here
const LEVELS = ["verbose", "info", "warning", "error"];

export class Log {
  constructor(app) {
    this.app = app;
    this.lines = [];
    this.last = 0; // the number of the last line
    this.asking = false;
    this.filter = make("input", { type: "search", placeholder: "Text of a line", "aria-label": "Filter lines", oninput: () => this.#draw() });
    this.level = choice(["all levels", "warnings and errors", "errors"], "all levels", { "aria-label": "Level", onchange: () => this.#draw() });
    this.hold = make("input", { type: "checkbox", onchange: () => this.update() });
    this.summary = make("p", { class: "help" });
    this.list = make("div", { class: "log", tabindex: 0, role: "log", "aria-label": "Lines of the log" });
    this.element = make("div", { class: "panel" },
      make("div", { class: "heading" }, make("h1", {}, "Log"), make("div", { class: "filters" }, this.filter, this.level, make("label", { class: "check" }, this.hold, "Hold still"))),
      this.summary, this.list);
  }

  async update() {
    if (this.asking || this.hold.checked || this.refusedTo === caller()) return;
    this.asking = true;
    try {
      let found = await get(`/v2/logging/recent?after=${this.last}`);
      if (found.last < this.last) { // another server answers
        this.lines = [];
        found = await get("/v2/logging/recent");
      }
      this.last = found.last;
      this.problem = "";
      if (found.lines.length || !this.drawn) {
        this.lines = [...this.lines, ...found.lines].slice(-MOST);
        this.#draw();
      }
    } catch (error) {
      this.app.refused(error);
      if (error instanceof ApiError && error.denied) this.refusedTo = caller();
      this.problem = error.message;
      this.#draw();
    } finally {
      this.asking = false;
    }
  }

  #draw() {
    this.drawn = true;
    const wanted = this.filter.value.trim().toLowerCase();
    const least = { "all levels": 0, "warnings and errors": 2, errors: 3 }[this.level.value];
    const found = this.lines.filter((line) => LEVELS.indexOf(line.level) >= least && line.text.toLowerCase().includes(wanted));
    const atEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    this.summary.textContent = this.problem || (found.length === this.lines.length ? `The last ${found.length} lines.` : `${found.length} of the last ${this.lines.length} lines.`);
    this.list.hidden = Boolean(this.problem);
    this.list.replaceChildren(...found.map((line) => make("div", { class: `level-${line.level}` }, line.text)));
    if (atEnd || !this.scrolled) this.list.scrollTop = this.list.scrollHeight;
    this.scrolled = this.list.scrollHeight > 0;
  }
}
