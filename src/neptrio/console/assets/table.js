// A table whose rows stay the same elements while their values change, so that focus and selections live on.

import { make, say } from "./dom.js";

export class Table {
  /** `columns`: {name, number, cell(row) -> text or element, key(row) -> text that changes when an element must,
   *  mark(row): whether the cell is shown as bad, below: its text stands in a row of its own below the others, where
   *  there is one}. */
  constructor(label, columns, { empty = "Nothing to show." } = {}) {
    this.below = columns.find((column) => column.below);
    this.columns = columns = columns.filter((column) => !column.below);
    this.rows = new Map();
    this.body = make("tbody");
    this.heads = columns.map((column) => make("th", { scope: "col", class: column.number ? "number" : null }, column.name));
    this.nothing = make("p", { class: "nothing" }, empty);
    this.element = make("div", { class: "table", role: "region", "aria-label": label },
      make("table", {}, make("thead", {}, make("tr", {}, this.heads)), this.body), this.nothing);
  }

  /** Shows these rows in this order; `identity(row)` tells a row from others. */
  update(rows, identity) {
    const kept = new Set();
    let before = null;
    for (const row of rows) {
      const id = identity(row);
      if (kept.has(id)) continue;
      kept.add(id);
      let line = this.rows.get(id);
      if (!line) {
        line = { element: make("tr"), cells: this.columns.map((column, i) => make(i ? "td" : "th", { scope: i ? null : "row", class: column.number ? "number" : null, "data-name": column.name })), keys: [] };
        line.element.append(...line.cells);
        this.rows.set(id, line);
      }
      this.columns.forEach((column, i) => this.#fill(line, i, column, row));
      const next = before ? before.nextSibling : this.body.firstChild;
      if (next !== line.element) this.body.insertBefore(line.element, next);
      before = this.#under(line, row);
    }
    for (const [id, line] of this.rows) {
      if (!kept.has(id)) {
        line.element.remove();
        line.under?.remove();
        this.rows.delete(id);
      }
    }
    this.nothing.hidden = kept.size > 0;
    this.element.firstChild.hidden = kept.size === 0;
  }

  /** Shows what stands below a line, where it has something; returns the last element of the line. */
  #under(line, row) {
    const text = this.below ? String(this.below.cell(row)) : "";
    if (!text) {
      line.under?.remove();
      line.under = null;
      return line.element;
    }
    if (!line.under) line.under = make("tr", { class: "under" }, make("td", { colspan: this.columns.length, "data-name": this.below.name }));
    say(line.under.firstChild, text);
    if (line.element.nextSibling !== line.under) line.element.after(line.under);
    return line.under;
  }

  #fill(line, i, column, row) {
    if (column.mark) line.cells[i].classList.toggle("bad", Boolean(column.mark(row)));
    if (column.key) {
      const key = column.key(row);
      if (line.keys[i] === key) return;
      line.keys[i] = key;
      line.cells[i].replaceChildren(...[column.cell(row)].flat().filter(Boolean));
    } else say(line.cells[i], String(column.cell(row)));
  }
}
