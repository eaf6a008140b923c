// The graph of an ensemble: its steps from left to right as their tensors flow, and what each of them takes.

import { card, draw, make } from "./dom.js";
import { count, duration, grown, percentile } from "./figures.js";
import { Table } from "./table.js";

const WIDTH = 168, HEIGHT = 58, ACROSS = 64, DOWN = 18, LETTERS = 21;

const cut = (text, most = LETTERS) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** {nodes: [{kind, name, version, column, row}], edges: [{from, to, tensors}], columns, rows} of a configuration. The first
 *  node is the client's inputs, the last one its answer, those between them the steps in their order. */
export function layout(config) {
  const steps = config.ensemble_scheduling?.step || [];
  const last = steps.length + 1;
  const maker = new Map((config.input || []).map(({ name }) => [name, 0]));
  steps.forEach((step, i) => { for (const tensor of Object.values(step.output_map || {})) maker.set(tensor, i + 1); });
  const edges = new Map();
  const connect = (tensor, to) => {
    const from = maker.get(tensor);
    if (from === undefined || from === to) return;
    const key = `${from} ${to}`;
    if (!edges.has(key)) edges.set(key, { from, to, tensors: [] });
    if (!edges.get(key).tensors.includes(tensor)) edges.get(key).tensors.push(tensor);
  };
  steps.forEach((step, i) => { for (const tensor of Object.values(step.input_map || {})) connect(tensor, i + 1); });
  for (const { name } of config.output || []) connect(name, last);
  const column = new Array(last + 1).fill(0);
  for (let round = 0; round <= steps.length; round++) { // a step stands behind all that it waits for
    for (const { from, to } of edges.values()) column[to] = Math.min(last, Math.max(column[to], column[from] + 1));
  }
  column[last] = Math.max(...column.slice(0, last)) + 1;
  const used = new Map();
  const nodes = column.map((place, i) => {
    const row = used.get(place) || 0;
    used.set(place, row + 1);
    const step = steps[i - 1];
    return { kind: i === 0 ? "inputs" : i === last ? "outputs" : "step", name: step ? step.model_name : i ? "answer" : "request", version: Number(step?.model_version) > 0 ? String(step.model_version) : "", column: place, row };
  });
  return { nodes, edges: [...edges.values()], columns: Math.max(...column) + 1, rows: Math.max(...used.values()) };
}

/** What each step took: {name, p50, p99 of the last interval, all50, all99, max, count, failed}, from two of the statistics' steps. */
export function times(now, old) {
  return now.map((step, i) => {
    const before = old?.[i] && old[i].count <= step.count ? old[i].histogram : step.histogram;
    const recent = grown(step.histogram, before);
    return { name: step.model_name, count: step.count, failed: step.failed, max: step.count ? step.max_ns : null,
      p50: percentile(recent, 0.5), p99: percentile(recent, 0.99), all50: percentile(step.histogram, 0.5), all99: percentile(step.histogram, 0.99) };
  });
}

export class Ensemble {
  constructor() {
    this.box = make("div", { class: "graph", tabindex: 0, role: "region", "aria-label": "Graph of the steps" });
    this.table = new Table("Steps", [
      { name: "Step", cell: (row) => make("a", { href: row.link }, `${row.number}. ${row.name}`), key: (row) => `${row.number} ${row.link}` },
      { name: "p50", number: true, cell: (row) => duration(row.p50) },
      { name: "p99", number: true, cell: (row) => duration(row.p99) },
      { name: "p50 since load", number: true, cell: (row) => duration(row.all50) },
      { name: "p99 since load", number: true, cell: (row) => duration(row.all99) },
      { name: "max since load", number: true, cell: (row) => duration(row.max) },
      { name: "Requests", number: true, cell: (row) => count(row.count) },
      { name: "Failed", number: true, mark: (row) => row.failed > 0, cell: (row) => count(row.failed) },
    ]);
    this.element = card("Steps", make("p", { class: "help" }, "The time of this ensemble's own requests to each step, its model's queue included."), this.box, this.table.element);
    this.element.hidden = true;
    this.labels = [];
  }

  /** Shows the graph of a configuration; nothing for other models. */
  show(config) {
    this.element.hidden = !config.ensemble_scheduling;
    if (this.element.hidden) return;
    const { nodes, edges, columns, rows } = layout(config);
    const place = ({ column, row }) => [column * (WIDTH + ACROSS) + 2, row * (HEIGHT + DOWN) + 2];
    const lines = edges.map(({ from, to, tensors }) => {
      const [x0, y0] = place(nodes[from]), [x1, y1] = place(nodes[to]);
      const begin = [x0 + WIDTH, y0 + HEIGHT / 2], end = [x1, y1 + HEIGHT / 2];
      return draw("path", { class: "edge", d: `M${begin}C${begin[0] + ACROSS / 2} ${begin[1]} ${end[0] - ACROSS / 2} ${end[1]} ${end}` }, draw("title", {}, tensors.join(", ")));
    });
    this.labels = [];
    const boxes = nodes.map((node, i) => {
      const [x, y] = place(node);
      const time = draw("text", { x: x + 10, y: y + 38, class: "time" });
      const share = draw("rect", { x: x + 10, y: y + HEIGHT - 11, width: 0, height: 4, rx: 2, class: "share" });
      const frame = draw("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 8, class: "node" });
      const tensors = node.kind === "step" ? [] : edges.filter((edge) => (node.kind === "inputs" ? edge.from : edge.to) === i).flatMap((edge) => edge.tensors);
      if (node.kind !== "step") time.textContent = cut([...new Set(tensors)].join(", "), LETTERS + 3);
      const parts = [draw("title", {}, node.kind === "step" ? node.name : [...new Set(tensors)].join(", ")), frame, draw("text", { x: x + 10, y: y + 20, class: "title" }, cut(node.kind === "step" ? `${i}. ${node.name}` : node.name)), time, share];
      if (node.kind !== "step") return draw("g", { class: node.kind }, parts);
      this.labels.push({ time, share, frame, link: link(node) });
      return draw("a", { href: link(node) }, parts);
    });
    const [width, height] = [columns * (WIDTH + ACROSS) - ACROSS + 4, rows * (HEIGHT + DOWN) - DOWN + 4];
    this.box.replaceChildren(draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Steps and what flows between them" }, lines, boxes));
  }

  /** Shows what the steps take; `now` and `old` are those of the statistics. */
  update(now, old) {
    if (this.element.hidden || this.labels.length !== now.length) return;
    const rows = times(now, old).map((row, i) => ({ ...row, number: i + 1, link: this.labels[i].link }));
    const typical = rows.map((row) => row.p50 ?? row.all50 ?? 0);
    const most = Math.max(1, ...typical);
    rows.forEach((row, i) => {
      const { time, share, frame } = this.labels[i];
      const text = row.count ? `${duration(typical[i])} · p99 ${duration(row.p99 ?? row.all99)}` : "no requests yet";
      time.textContent = row.failed ? `${text}, ${count(row.failed)} failed` : text;
      share.setAttribute("width", (typical[i] / most * (WIDTH - 20)).toFixed(1));
      frame.classList.toggle("bad", row.failed > 0);
      time.classList.toggle("bad", row.failed > 0);
    });
    this.table.update(rows, (row) => row.number);
  }
}

const link = (node) => `#models/${encodeURIComponent(node.name)}/${encodeURIComponent(node.version)}`;
