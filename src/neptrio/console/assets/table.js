// A table whose rows stay the same elements while their values change, so that focus and selections live on.

import { make, say } from "./dom.js";

export class Table {
  /** `columns`: {name, number, cell(row) -> text or element, key(row) -> text that changes when an element must,
   *  mark(row): whether the cell is shown as bad, optional: hidden while no row has anything in it}. */
  constructor(label, columns, { empty = "Nothing to show." } = {}) {
    this.columns = columns;
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
      before = line.element;
    }
    for (const [id, line] of this.rows) {
      if (!kept.has(id)) {
        line.element.remove();
        this.rows.delete(id);
      }
    }
    this.nothing.hidden = kept.size > 0;
    this.columns.forEach((column, i) => {
      if (!column.optional) return;
      const hidden = ![...this.rows.values()].some((line) => line.cells[i].textContent);
      this.heads[i].hidden = hidden;
      for (const line of this.rows.values()) line.cells[i].hidden = hidden;
    });
    this.element.firstChild.hidden = kept.size === 0;
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
