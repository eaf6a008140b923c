// A configuration as the server completed it: what was written, what the server filled in, and what is at its zero value.

import { copy, make } from "./dom.js";

const empty = (value) => value === "" || value === 0 || value === false || value === null || (Array.isArray(value) && !value.length) || (typeof value === "object" && !Array.isArray(value) && !Object.keys(value).length) || /^(KIND_AUTO|FORMAT_NONE|MODEL_OPTIONAL_NONE)$/.test(value);

/** Lines of a configuration: {path, name, depth, text, from, top}, `from` being written, defaulted or unset; `top`: what is above was written. */
export function configLines(config) {
  const marks = new Set((config.defaulted || []).map((path) => JSON.stringify(path)));
  const lines = [];
  const add = (value, name, path, depth, above) => {
    const from = above === "defaulted" || marks.has(JSON.stringify(path)) ? "defaulted" : "written";
    const nested = typeof value === "object" && value !== null;
    const simple = Array.isArray(value) && value.every((item) => typeof item !== "object");
    if (nested && !simple && !empty(value)) {
      const begin = lines.length;
      lines.push({ path, name, depth, text: "", from, top: above !== "defaulted" });
      const entries = Array.isArray(value) ? value.map((item, i) => [i, item]) : Object.entries(value);
      for (const [key, item] of entries) add(item, Array.isArray(value) ? item?.name ?? `[${key}]` : key, [...path, key], depth + 1, from);
      if (lines.slice(begin + 1).every((line) => line.from === "unset") && from === "written" && lines.length > begin + 1 && depth === 0) lines[begin].from = "unset";
    } else {
      lines.push({ path, name, depth, text: simple ? `[${value.map((item) => JSON.stringify(item)).join(", ")}]` : nested ? "" : typeof value === "string" ? value : JSON.stringify(value), from: empty(value) && (from === "written" || depth > 0) ? "unset" : from, top: above !== "defaulted" });
    }
  };
  for (const [key, value] of Object.entries(config)) if (key !== "defaulted") add(value, key, [key], 0, "");
  return lines;
}

// maps in ModelConfig, whose entries are written as key and value, and fields whose texts are names of an enumeration
const MAPS = new Set(["input_map", "output_map", "metric_tags", "cc_model_filenames", "priority_queue_policy", "parameters"]);
const NUMBERS = new Set(["dim", "dims", "shape", "versions", "device_id", "model_version", "priority_levels", "default_priority_level", "max_queue_delay_microseconds", "max_sequence_idle_microseconds", "default_timeout_microseconds"]);
const INTEGER = /^-?\d+$/; // 64 bits are texts in JSON
const unset = (name, value) => (typeof value === "object" && value !== null && !Array.isArray(value) ? MAPS.has(name) && empty(value) : empty(value));
const ENUMS = new Set(["data_type", "format", "kind", "priority", "timeout_action"]);

/** A configuration as config.pbtxt, without what is not set. */
export function pbtxt(config) {
  const scalar = (name, value) => (typeof value === "string" && !ENUMS.has(name) && !(INTEGER.test(value) && NUMBERS.has(name)) ? JSON.stringify(value) : String(value));
  const message = (value, path, indent) => {
    const lines = Object.entries(value).filter(([key, item]) => key !== "defaulted" && !unset(key, item)).map(([key, item]) => field(key, item, [...path, key], `${indent}  `));
    return lines.length ? `{\n${lines.join("\n")}\n${indent}}` : "{ }";
  };
  const field = (name, value, path, indent) => {
    // the inputs of a warm-up are a map, those of the model are not
    if (MAPS.has(name) || (name === "inputs" && path[0] === "model_warmup")) {
      return Object.entries(value).map(([key, item]) => {
        const number = name === "priority_queue_policy";
        const inner = typeof item === "object" ? message(item, path, `${indent}  `) : JSON.stringify(item);
        return `${indent}${name} {\n${indent}  key: ${number ? key : JSON.stringify(key)}\n${indent}  value${typeof item === "object" ? "" : ":"} ${inner}\n${indent}}`;
      }).join("\n");
    }
    if (Array.isArray(value)) {
      if (value.every((item) => typeof item !== "object")) return `${indent}${name}: [ ${value.map((item) => scalar(name, item)).join(", ")} ]`;
      return value.map((item) => `${indent}${name} ${message(item, path, indent)}`).join("\n");
    }
    return typeof value === "object" ? `${indent}${name} ${message(value, path, indent)}` : `${indent}${name}: ${scalar(name, value)}`;
  };
  return Object.entries(config).filter(([key, item]) => key !== "defaulted" && !unset(key, item)).map(([key, item]) => field(key, item, [key], "")).join("\n") + "\n";
}

/** The view of a configuration. */
export function configView(config) {
  const rows = configLines(config).map((line) => make("div", { class: `line-of-config from-${line.from}`, vars: { "--depth": line.depth } },
    make("code", { class: "key" }, line.name), make("code", { class: "value" }, line.text),
    line.from === "defaulted" && line.top ? make("span", { class: "badge plain", title: "filled in by the server" }, "by the server") : null));
  const box = make("div", { class: "config hide-unset" }, rows);
  const toggle = make("input", { type: "checkbox", onchange: () => box.classList.toggle("hide-unset", !toggle.checked) });
  const note = config.defaulted ? "Fields marked “by the server” are not in what was given: the server has filled them in." : "It is not known which fields were written: this model was not loaded from a configuration.";
  return make("div", {}, make("div", { class: "bar" }, make("p", { class: "help" }, note), make("button", { type: "button", onclick: () => copy(pbtxt(config), "config.pbtxt") }, "Copy as config.pbtxt"), make("label", { class: "check" }, toggle, "Show what is not set")), box);
}
