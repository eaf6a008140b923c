// Models that are loaded when they are asked for: how they stand, and what that costs. Hidden where there are none.

import { badge, facts, make } from "./dom.js";
import { bytes, count, plural } from "./figures.js";
import { Table } from "./table.js";

const KINDS = { loaded: "ok", loading: "warn", failed: "bad" };
const ORDER = ["failed", "loading", "loaded", "put away", "on demand"]; // what needs somebody's attention comes first

/** How a row of the repository index stands that does not serve because nobody has asked for it; "" for any other. */
export function resting(row) {
  if (row.state !== "UNAVAILABLE" || !row.reason) return "";
  if (row.reason === "on demand") return "on demand";
  return row.reason === "put away" || row.reason.startsWith("put away:") ? "put away" : "";
}

/** Texts for what the statistics say of all such models: pairs of a term and its value. */
export function summary({ models, states, held_bytes: held, server_bytes: own, budget_bytes: budget }) {
  const sum = (key) => models.reduce((total, model) => total + model[key], 0);
  const [hits, misses, failed] = [sum("hits"), sum("misses"), sum("load_failures")];
  const known = Object.keys(states).sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const grown = own ? ` and the server's ${bytes(own)}` : "";
  const share = Math.round((held + (own ?? 0)) / budget * 100);
  return [
    ["Models", known.map((state) => `${count(states[state])} ${state}`).join(", ")],
    ["Memory", budget ? `${bytes(held)}${grown} of ${bytes(budget)} (${share} %)` : "no budget"],
    ["Hits", hits + misses ? `${count(hits)} (${Math.floor(hits / (hits + misses) * 100)} %)` : count(hits)],
    ["Misses", count(misses)],
    ["Waiting", plural(sum("waiting"), "request")],
    ["Loads", `${count(sum("loads"))}${failed ? `, ${count(failed)} failed` : ""}`],
    ["Put away", plural(sum("put_away"), "time")],
  ];
}

/** The models in the order in which they are shown: failed ones, those that somebody waits for, then by name. */
export const ordered = (models) => models.slice().sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || b.waiting - a.waiting || (a.name < b.name ? -1 : 1));

export class Demand {
  constructor(app) {
    this.app = app;
    const number = (name, key) => ({ name, number: true, cell: (row) => count(row[key]) });
    this.facts = make("div");
    this.filter = make("input", { type: "search", placeholder: "Filter models on demand", "aria-label": "Filter models on demand", oninput: () => this.update() });
    this.table = new Table("Models on demand", [
      { name: "Model", cell: (row) => make("a", { href: `#models/${encodeURIComponent(row.name)}/` }, row.name), key: (row) => row.name },
      { name: "State", cell: (row) => badge(row.state, KINDS[row.state]), key: (row) => row.state },
      number("Waiting", "waiting"), number("Hits", "hits"), number("Misses", "misses"), number("Loads", "loads"),
      { name: "Failed loads", number: true, mark: (row) => row.load_failures > 0, cell: (row) => count(row.load_failures) },
      number("Put away", "put_away"),
      { name: "Reason", cell: (row) => row.reason || "" },
    ], { empty: "No model was asked for yet." });
    this.element = make("section", { class: "card demand" }, make("div", { class: "bar" }, make("h2", {}, "Models on demand"), make("div", { class: "filters" }, this.filter)), this.facts, this.table.element);
  }

  update() {
    const { onDemand } = this.app.live;
    this.element.hidden = !onDemand;
    if (!onDemand) return;
    const pairs = summary(onDemand);
    const text = JSON.stringify(pairs);
    if (text !== this.shown) {
      this.shown = text;
      this.facts.replaceChildren(facts(pairs));
    }
    const wanted = this.filter.value.trim().toLowerCase();
    this.table.update(ordered(onDemand.models).filter((row) => row.name.toLowerCase().includes(wanted)), (row) => row.name);
  }
}
