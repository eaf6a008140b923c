// An answer of a model as a table of its tensors, or as its text.

import { exact } from "./api.js";
import { make } from "./dom.js";
import { single } from "./figures.js";

const MOST = 256; // values of a tensor that are shown
const LETTERS = 100000;

/** The view of an answer's body. */
export function answerView(text, type, status) {
  if (type.includes("event-stream")) {
    const events = text.split(/\r?\n\r?\n/).map((block) => block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n")).filter(Boolean);
    return make("div", {}, make("p", { class: "help" }, `${events.length} responses`), events.slice(0, 50).map((event) => answerView(event, "application/json", status)));
  }
  let document;
  try {
    document = exact(text);
  } catch {
    return make("pre", { class: "code" }, text.slice(0, LETTERS) || `${status}, empty`);
  }
  if (!Array.isArray(document?.outputs)) return make("pre", { class: "code" }, text.slice(0, LETTERS));
  return make("div", {}, document.outputs.map(tensor),
    make("details", {}, make("summary", {}, "As JSON"), make("pre", { class: "code", tabindex: 0 }, text.slice(0, LETTERS))));
}

function tensor(output) {
  const values = (output.data || []).flat(Infinity);
  const numbers = values.length && values.every((value) => typeof value === "number");
  const shown = values.slice(0, MOST);
  const top = numbers && values.length > 1 && values.length <= 64 ? Math.max(...values.map(Math.abs)) : 0;
  const cell = (value, i) => make("li", top ? { vars: { "--share": Math.abs(value) / top }, "data-index": i } : { "data-index": i }, typeof value === "string" ? value : output.datatype === "FP32" && typeof value === "number" ? single(value) : String(value));
  return make("div", { class: "tensor" },
    make("p", {}, make("b", {}, output.name), ` ${output.datatype} [${(output.shape || []).join(", ")}]`),
    make("ol", { class: `values${top ? " measured" : ""}${numbers ? "" : " texts"}`, start: 0 }, shown.map(cell)),
    values.length > MOST ? make("p", { class: "help" }, `and ${values.length - MOST} more`) : null);
}
