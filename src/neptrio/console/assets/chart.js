// Charts in SVG: lines over time, bars, stages of requests. Colours come from the style sheet.

import { draw, make } from "./dom.js";

const WIDTH = 300, HEIGHT = 64;
const LEAST = 30; // moments that a chart has room for, even if fewer are known

/** A line per series over the same moments; series: {name, values, class}. */
export class Lines {
  constructor(label, write, names) {
    this.write = write;
    this.label = label;
    this.paths = names.map((_, i) => draw("path", { class: `line line-${i}` }));
    this.area = draw("path", { class: "area" });
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "lines", role: "img" }, this.area, this.paths);
    this.most = make("span", { class: "most" });
    this.now = make("span", { class: "figure" });
    this.rest = make("span", { class: "rest" });
    this.legend = names.length > 1 ? make("ul", { class: "legend" }, names.map((name, i) => make("li", {}, make("i", { class: `swatch line-${i}` }), name))) : null;
    this.element = make("figure", { class: "chart" }, make("figcaption", {}, make("span", { class: "name" }, label), this.now, this.rest), make("div", { class: "plot" }, this.svg, this.most), this.legend);
  }

  /** `series`: an array of values for each name, null where there is none; `length` of them. */
  update(series, length, text, rest = "") {
    const slots = Math.max(LEAST, length);
    const top = Math.max(1e-9, ...series.flat().filter((value) => value !== null && isFinite(value)));
    const at = (i, length) => (slots - length + i) / Math.max(1, slots - 1) * WIDTH;
    const high = (value) => HEIGHT - 2 - value / top * (HEIGHT - 8);
    series.forEach((values, s) => {
      let path = "", pen = false;
      values.forEach((value, i) => {
        if (value === null) { pen = false; return; }
        path += `${pen ? "L" : "M"}${at(i, values.length).toFixed(1)} ${high(value).toFixed(1)}`;
        pen = true;
      });
      this.paths[s].setAttribute("d", path);
    });
    const first = series[0].map((value) => value || 0);
    this.area.setAttribute("d", first.length > 1 ? `M${at(0, first.length).toFixed(1)} ${HEIGHT}${first.map((value, i) => `L${at(i, first.length).toFixed(1)} ${high(value).toFixed(1)}`).join("")}L${WIDTH} ${HEIGHT}Z` : "");
    this.now.textContent = text;
    this.rest.textContent = rest;
    this.most.textContent = top > 1e-9 ? this.write(top) : "";
    this.svg.setAttribute("aria-label", `${this.label}: ${text} ${rest}`);
  }
}

/** A small line for a row of a table. */
export class Spark {
  constructor() {
    this.path = draw("path", { class: "line line-0" });
    this.element = draw("svg", { viewBox: "0 0 90 20", preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" }, this.path);
  }

  update(values, length) {
    const slots = Math.max(LEAST, length);
    const top = Math.max(1e-9, ...values);
    this.path.setAttribute("d", values.map((value, i) => `${i ? "L" : "M"}${((slots - values.length + i) / Math.max(1, slots - 1) * 90).toFixed(1)} ${(19 - value / top * 17).toFixed(1)}`).join(""));
  }
}

/** Horizontal bars: [[name, value], ...] with the text of each value. */
export function bars(pairs, write) {
  const top = Math.max(1e-9, ...pairs.map(([, value]) => value));
  return make("ul", { class: "bars" }, pairs.map(([name, value]) => make("li", { vars: { "--share": value / top } },
    make("span", { class: "name" }, name), make("span", { class: "track" }, make("i", { class: "fill" })), make("span", { class: "value" }, write(value)))));
}

/** Stages on one time axis: segments are {stage, begin, end} in nanoseconds after `zero`, of `total`. */
export function waterfall(segments, zero, total, describe) {
  const at = (ns) => `${Math.max(0, Math.min(100, (ns - zero) / Math.max(1, total) * 100))}%`;
  return make("div", { class: "waterfall", role: "img", "aria-label": segments.map(describe).join(", ") },
    segments.map((segment) => make("i", { class: `stage-${segment.stage}`, title: describe(segment),
      vars: { left: at(segment.begin), right: `calc(100% - ${at(segment.end)})` } })));
}
