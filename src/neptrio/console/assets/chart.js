// Charts in SVG: lines over time, bars, stages of requests. Colours come from the style sheet.

import { draw, make } from "./dom.js";
import { GAP, nearest, span, ticks } from "./figures.js";

const WIDTH = 300, HEIGHT = 64;
const LEAST = 30; // moments that a small line has room for, even if fewer are known

/** A line per series over the same times, with a time axis; the values of a moment are shown under the pointer. */
export class Lines {
  /** `names` of the series; those in `bad` are drawn in red. `write`: the text of a value. */
  constructor(label, write, names, bad = []) {
    this.write = write;
    this.label = label;
    this.names = names;
    this.looks = names.map((name, i) => (bad.includes(name) ? "line-bad" : `line-${i}`));
    this.times = [];
    this.series = [];
    this.at = null; // the moment that is pointed at, in milliseconds
    this.grid = draw("path", { class: "grid" });
    this.paths = this.looks.map((look) => draw("path", { class: `line ${look}` }));
    this.area = draw("path", { class: "area" });
    this.cursor = draw("path", { class: "cursor" });
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "lines", role: "img" }, this.grid, this.area, this.paths, this.cursor);
    this.most = make("span", { class: "most" });
    this.now = make("span", { class: "figure" });
    this.rest = make("span", { class: "rest" });
    this.tip = make("div", { class: "tip", role: "status", hidden: true });
    this.axis = make("div", { class: "axis", "aria-hidden": "true" });
    this.plot = make("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${label} over time: arrow keys show values`,
      onpointermove: (event) => this.#pointed(event), onpointerdown: (event) => this.#pointed(event), onpointerleave: () => this.#leave(),
      onblur: () => this.#leave(), onkeydown: (event) => this.#key(event) }, this.svg, this.most, this.tip);
    this.legend = names.length > 1 ? make("ul", { class: "legend" }, names.map((name, i) => make("li", {}, make("i", { class: `swatch ${this.looks[i]}` }), name))) : null;
    this.element = make("figure", { class: "chart" }, make("figcaption", {}, make("span", { class: "name" }, label), this.now, this.rest), this.plot, this.axis, this.legend);
  }

  /** `series`: an array of values for each name, null where there is none; `times` of them in milliseconds.
   *  `rest` stands beside the figure, in red if `bad`. */
  update(series, times, text, rest = "", bad = false) {
    this.series = series;
    this.times = times;
    const [begin, end] = span(times);
    const top = Math.max(1e-9, ...series.flat().filter((value) => value !== null && isFinite(value)));
    this.x = (time) => (time - begin) / (end - begin) * WIDTH;
    const high = (value) => HEIGHT - 2 - value / top * (HEIGHT - 8);
    const at = (i) => this.x(times[i]).toFixed(1);
    series.forEach((values, s) => {
      let path = "", pen = false;
      values.forEach((value, i) => {
        if (value === null || (i && times[i] - times[i - 1] > GAP)) pen = false;
        if (value === null) return;
        path += `${pen ? "L" : "M"}${at(i)} ${high(value).toFixed(1)}`;
        pen = true;
      });
      this.paths[s].setAttribute("d", path);
    });
    const first = series[0].map((value) => value || 0);
    this.area.setAttribute("d", first.length > 1 ? `M${at(0)} ${HEIGHT}${first.map((value, i) => `L${at(i)} ${high(value).toFixed(1)}`).join("")}L${at(first.length - 1)} ${HEIGHT}Z` : "");
    const marks = ticks(begin, end);
    this.grid.setAttribute("d", marks.map(({ time }) => `M${this.x(time).toFixed(1)} 0V${HEIGHT}`).join(""));
    this.axis.replaceChildren(...marks.map(({ time, label }) => make("span", { vars: { left: `${(time - begin) / (end - begin) * 100}%` } }, label)));
    this.now.textContent = text;
    this.rest.textContent = rest;
    this.rest.classList.toggle("bad", bad);
    this.most.textContent = top > 1e-9 ? this.write(top) : "";
    this.svg.setAttribute("aria-label", `${this.label}: ${text} ${rest}`);
    this.#show();
  }

  #pointed(event) {
    const box = this.plot.getBoundingClientRect();
    const [begin, end] = span(this.times);
    this.at = begin + (event.clientX - box.left) / Math.max(1, box.width) * (end - begin);
    this.#show();
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#leave();
    if (!step || !this.times.length) return;
    event.preventDefault();
    const i = this.at === null ? this.times.length : nearest(this.times, this.at) + step;
    this.at = this.times[Math.max(0, Math.min(this.times.length - 1, i))];
    this.#show();
  }

  #leave() {
    this.at = null;
    this.#show();
  }

  /** The values of the moment that is pointed at. */
  #show() {
    const i = this.at === null ? -1 : nearest(this.times, this.at);
    this.tip.hidden = i < 0;
    this.cursor.setAttribute("d", i < 0 ? "" : `M${this.x(this.times[i]).toFixed(1)} 0V${HEIGHT}`);
    if (i < 0) return;
    this.tip.classList.toggle("left", this.x(this.times[i]) > WIDTH / 2); // beside the pointer, not under it
    this.tip.replaceChildren(make("b", {}, new Date(this.times[i]).toLocaleTimeString()),
      ...this.names.map((name, s) => make("span", {}, make("i", { class: `swatch ${this.looks[s]}` }), `${name} ${this.series[s][i] === null || this.series[s][i] === undefined ? "–" : this.write(this.series[s][i])}`)));
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
