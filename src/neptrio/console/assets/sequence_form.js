// The part of the form that makes requests of one sequence: its id, where it starts and where it ends.

import { field, make } from "./dom.js";
import { count } from "./figures.js";

export class SequenceForm {
  /** `changed` is called when the sequence's place has moved on. */
  constructor(changed) {
    this.changed = changed;
    this.sent = 0;
    this.id = make("input", { value: "1", spellcheck: "false", "aria-label": "Sequence id", oninput: () => this.#begin() });
    this.start = make("input", { type: "checkbox", checked: true });
    this.end = make("input", { type: "checkbox" });
    this.note = make("p", { class: "help", role: "status" });
    this.element = make("fieldset", { class: "input" }, make("legend", {}, "Sequence"),
      make("div", { class: "row" }, field("Id", this.id),
        make("label", { class: "check" }, this.start, "Start"), make("label", { class: "check" }, this.end, "End")), this.note);
    this.#begin();
  }

  #begin() {
    this.sent = 0;
    this.start.checked = true;
    this.end.checked = false;
    this.note.textContent = "The first request starts the sequence, those after it go on, and the one with End is its last.";
  }

  /** The id as it is sent; throws Error. */
  #parsed() {
    const text = this.id.value.trim();
    if (!text) throw new Error("a sequence has an id");
    if (!/^\d+$/.test(text)) return text;
    const number = BigInt(text);
    if (number === 0n || number >= 1n << 64n) throw new Error("a sequence's id is from 1 to 18446744073709551615");
    return number <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(number) : number;
  }

  /** The request's parameters. Throws Error. */
  parameters() {
    return { sequence_id: this.#parsed(), ...(this.start.checked ? { sequence_start: true } : {}), ...(this.end.checked ? { sequence_end: true } : {}) };
  }

  /** The request that had these parameters was answered. */
  answered(parameters) {
    try {
      if (this.#parsed() !== parameters.sequence_id) return; // another id was typed meanwhile
    } catch {
      return;
    }
    this.sent = parameters.sequence_start ? 1 : this.sent + 1;
    const said = `${count(this.sent)} request${this.sent === 1 ? "" : "s"} of sequence ${parameters.sequence_id}`;
    if (parameters.sequence_end) this.#begin();
    this.start.checked = Boolean(parameters.sequence_end);
    this.note.textContent = parameters.sequence_end ? `The sequence has ended after ${said}.` : `${said} answered. The next one goes on.`;
    this.changed();
  }
}
