// A model's sequences: where they are, how old, and the way to end one.

import { ApiError, exact, modelPath, post, send } from "./api.js";
import { badge, card, confirmed, make, tell } from "./dom.js";
import { count, duration } from "./figures.js";
import { Table } from "./table.js";

export class Sequences {
  constructor(app, name, version) {
    this.app = app;
    this.name = name;
    this.version = version;
    this.on = false;
    this.asking = false;
    this.summary = make("p", { class: "help" });
    this.table = new Table("Sequences", [
      { name: "Id", cell: (row) => (typeof row.id === "string" ? JSON.stringify(row.id) : String(row.id)) },
      { name: "State", cell: (row) => badge(row.state, row.state === "slot" ? "ok" : row.state === "backlog" ? "warn" : "plain"), key: (row) => row.state },
      { name: "Instance", cell: (row) => row.instance || "–" },
      { name: "Slot", number: true, cell: (row) => (row.slot < 0 ? "–" : row.slot) },
      { name: "Age", number: true, cell: (row) => duration(row.age_us * 1e3) },
      { name: "Idle", number: true, cell: (row) => duration(row.idle_us * 1e3) },
      { name: "Queued", number: true, cell: (row) => row.queued },
      { name: "Executing", number: true, cell: (row) => row.executing },
      { name: "Client", cell: (row) => row.token || "–" },
      { name: "", cell: (row) => make("button", { type: "button", class: "danger small", "aria-label": `End sequence ${row.id}`, onclick: () => this.#end(row) }, "End"), key: (row) => `${row.id}` },
    ], { empty: "No live sequences." });
    this.element = card("Sequences", this.summary, this.table.element);
    this.element.hidden = true;
  }

  /** Whether the model has sequences at all. */
  show(on) {
    this.on = on;
    this.element.hidden = !on;
  }

  /** Asks for the list, unless an answer is still awaited. */
  async update() {
    if (!this.on || this.asking) return;
    this.asking = true;
    try {
      const found = exact(await (await send(`${modelPath(this.name, this.version)}/sequences`)).text());
      this.summary.textContent = `${count(found.live)} live, ${count(found.slots_used)} of ${count(found.slots)} slots used, ${count(found.backlog)} waiting for a slot with ${count(found.backlog_requests)} requests.`;
      this.table.update(found.sequences.slice(0, 500), (row) => `${typeof row.id}${row.id}/${row.token || ""}`);
    } catch (error) {
      this.summary.textContent = error instanceof ApiError ? error.message : String(error);
      this.table.update([], () => "");
    } finally {
      this.asking = false;
    }
  }

  async #end(row) {
    if (!await confirmed(`End sequence ${row.id}?`, "Its id is free at once. What it has sent still runs; its client's next request will be refused unless it starts anew.", "End it")) return;
    const query = new URLSearchParams({ type: typeof row.id === "string" ? "string" : "uint" });
    if (row.token) query.set("token", row.token);
    try {
      const ended = await post(`${modelPath(this.name, this.version)}/sequences/${encodeURIComponent(String(row.id))}/end?${query}`);
      tell(`Sequence ${row.id} has ended; ${count(ended.requests_left)} requests of it still run`);
    } catch (error) {
      this.app.refused(error);
      tell(error.message, "bad");
    }
    this.update();
  }
}
