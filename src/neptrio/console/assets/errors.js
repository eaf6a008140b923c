// What requests met last: the texts, how often and when they came, of one model or of all.

import { card, make, say } from "./dom.js";
import { ago, count } from "./figures.js";
import { Table } from "./table.js";

const MOST = 20;
const KINDS = { CANCELED: "cancelled", REJECTED: "rejected" };

/** A word for what became of such requests. */
export const kind = (row) => (row.refused && row.reason === "OTHER" ? "refused" : KINDS[row.reason] || "failed");

/** {model, version, ...error} of all models in /v2/errors, the latest first. */
export function latest(models) {
  const rows = models.flatMap(({ name, version, errors }) => errors.map((error) => ({ ...error, name, version })));
  return rows.sort((a, b) => b.last - a.last);
}

export class Errors {
  /** Of one model's version, or of all models where there is no name. */
  constructor(app, name = "", version = "") {
    this.app = app;
    this.name = name;
    this.version = version;
    const link = (row) => make("a", { href: `#models/${encodeURIComponent(row.name)}/${encodeURIComponent(row.version)}` }, row.name);
    const when = (row) => make("time", { title: `first ${new Date(row.first).toLocaleString()}, last ${new Date(row.last).toLocaleString()}` }, ago(row.last, Date.now()));
    this.table = new Table("Last errors", [
      ...(name ? [] : [{ name: "Model", cell: link, key: (row) => row.name }]),
      { name: "Error", mark: (row) => kind(row) === "failed", cell: (row) => row.text },
      { name: "Code", cell: (row) => row.code },
      { name: "Requests", cell: kind },
      { name: "Count", number: true, cell: (row) => count(row.count) },
      { name: "Last", number: true, cell: when, key: (row) => `${row.last} ${Math.floor(Date.now() / 1000)}` },
    ], { empty: "No request has failed since the load." });
    this.table.element.classList.add("errors");
    this.why = make("p", { class: "help", hidden: true });
    this.element = card("Last errors", this.why, this.table.element);
  }

  update() {
    const { live } = this.app;
    this.why.hidden = !live.noErrors;
    say(this.why, live.noErrors);
    this.table.element.hidden = Boolean(live.noErrors);
    const models = this.name ? live.errors.filter((model) => model.name === this.name && (!this.version || model.version === this.version)) : live.errors;
    this.table.update(latest(models).slice(0, MOST), (row) => JSON.stringify([row.name, row.version, row.text, row.code, row.reason, row.refused]));
  }
}
