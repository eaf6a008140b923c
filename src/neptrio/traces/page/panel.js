// Details of one request, and the cloud of all of them over time.

const panel = byId("details");

function section(title, ...content) {
  return [make("h3", "", title), ...content];
}

function cells(tag, ...values) {
  const row = make("tr");
  values.forEach((value, i) => {
    const cell = make(tag, i ? "n" : "");
    cell.append(typeof value === "string" ? clip(value, 500) : value);
    row.append(cell);
  });
  return row;
}

function linkTo(trace) {
  const link = make("button", "link", `${clip(trace.model, 200)} (${trace.version}) #${trace.id}`);
  link.type = "button";
  link.addEventListener("click", () => reveal(trace));
  return link;
}

function stageTable(trace) {
  const bar = make("div", "share"), table = make("table", "stages");
  table.append(cells("th", "Stage", "µs", "%"));
  const stages = [...trace.spent].filter(([stage]) => stage !== STAGE.wait);
  for (const [stage, ns] of stages) {
    const part = make("i", `stage-${STAGES[stage].name}`);
    part.style.flexGrow = ns;
    part.dataset.tip = `${STAGES[stage].name}: ${human(ns)}`;
    bar.append(part);
    const name = make("span", "", null, make("i", `swatch stage-${STAGES[stage].name}`), STAGES[stage].name);
    name.dataset.tip = STAGES[stage].meaning;
    table.append(cells("td", name, micros(ns), trim(ns / Math.max(1, trace.duration) * 100, 1)));
  }
  return [bar, table];
}

function pointTable(trace) {
  const table = make("table", "points");
  table.append(cells("th", "Point", "at µs", "Δ µs"));
  let before = null;
  for (const { name, ns } of trace.times) {
    const row = cells("td", name, micros(ns - trace.root.begin), before === null ? "" : micros(ns - before));
    row.firstChild.dataset.tip = `${absolute(ns)} ns on the server's clock`;
    table.append(row);
    before = ns;
  }
  return table;
}

function tensorBox(tensor) {
  const title = make("p", "", null, make("b", "", tensor.name), clip(` ${tensor.dtype} [${tensor.shape}] `, 500), make("span", "", tensor.activity.replace("TENSOR_", "")));
  const box = make("div", "tensor", null, title);
  if (tensor.data) box.append(make("pre", "", tensor.data + (tensor.more ? ` … ${tensor.more} more letters` : "")));
  if (tensor.note) box.append(make("p", "", null, make("span", "", tensor.note)));
  return box;
}

function showDetails(trace) {
  const close = make("button", "close", "×");
  close.type = "button"; close.title = "Close (Esc)";
  close.setAttribute("aria-label", "Close details");
  close.addEventListener("click", hideDetails);
  const facts = make("div", "facts");
  const fact = (text, classes) => facts.append(make("span", `chip ${classes || ""}`, text));
  fact(trace.outcome, trace.outcome);
  if (trace.cached) fact("from the response cache", "cached");
  if (trace.timed) fact(human(trace.duration));
  if (trace.front) fact(frontOf(trace));
  fact(`trace ${trace.id}`);
  if (trace.requestId) fact(`request id ${clip(trace.requestId, 1000)}`);
  if (trace.replies.length > 1) fact(`${trace.replies.length} responses`);
  if (data.files.length > 1) fact(trace.file);
  const content = [close, make("h2", "", `${clip(trace.model, 1000)} (${trace.version})`), facts];
  if (trace.error) content.push(make("p", "error", trace.error));
  if (trace.parent >= 0) content.push(...section("Part of", linkTo(traces[trace.parent])));
  if (trace.timed) content.push(...section("Stages", ...stageTable(trace)), ...section("Points in time, after the request's start", pointTable(trace)));
  if (trace.children.length) {
    const table = make("table");
    for (const child of trace.children) table.append(cells("td", linkTo(child), child.timed ? human(child.duration) : ""));
    content.push(...section("Steps and calls", table));
  }
  if (trace.tensors.length) content.push(...section("Tensors", ...trace.tensors.map(tensorBox)));
  panel.replaceChildren(...content);
  panel.scrollTop = 0;
  if (panel.hidden) { panel.hidden = false; relayout(); }
}

function hideDetails() {
  panel.hidden = true;
  relayout();
  byId("table").focus({ preventScroll: true });
}

// ---------------------------------------------------------------- the cloud

/** The powers of ten of nanoseconds between which durations lie, at least one apart. */
function cloudScale() {
  const timed = roots.filter((root) => root.duration > 0);
  if (!timed.length) return { least: 3, most: 6 };
  const least = Math.log10(timed.reduce((m, root) => Math.min(m, root.duration), Infinity));
  const most = Math.log10(timed.reduce((m, root) => Math.max(m, root.duration), 1));
  return most - least < 1 ? { least: (least + most - 1) / 2, most: (least + most + 1) / 2 } : { least, most };
}
const SCALE = cloudScale();

function drawCloud() {
  const canvas = byId("dots"), box = byId("overview"), ratio = window.devicePixelRatio || 1;
  const width = box.clientWidth, height = box.clientHeight;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  paint.scale(ratio, ratio);
  paint.font = `10px ${getComputedStyle(document.body).fontFamily}`;
  const y = (ns) => height - 8 - Math.max(0, (Math.log10(Math.max(1, ns)) - SCALE.least) / (SCALE.most - SCALE.least)) * (height - 18);
  for (let power = Math.ceil(SCALE.least); power <= SCALE.most; power++) {
    paint.fillStyle = colour("--line");
    paint.fillRect(0, Math.round(y(10 ** power)), width, 1);
    paint.fillStyle = colour("--muted");
    paint.fillText(human(10 ** power), 6, y(10 ** power) - 2);
  }
  const shown = new Set(selected), size = roots.length > 3000 ? 2 : 3;
  const dots = (list, fill, alpha, extra) => {
    paint.fillStyle = fill; paint.globalAlpha = alpha;
    for (const root of list) if (root.timed) paint.fillRect(cloudX(root.begin) - size / 2, y(root.duration) - size / 2, size + extra, size + extra);
  };
  dots(roots.filter((root) => !shown.has(root)), colour("--muted"), 0.22, 0);
  dots(selected.filter((root) => root.outcome === "ok"), colour("--infer"), roots.length > 3000 ? 0.45 : 0.75, 0);
  dots(selected.filter((root) => root.outcome !== "ok"), colour("--bad"), 1, 1);
  paint.globalAlpha = 1;
  const brush = byId("brush"), limited = state.from !== "" || state.to !== "";
  brush.hidden = !limited;
  if (limited) {
    const from = cloudX(state.from === "" ? 0 : Number(state.from) * 1000), to = cloudX(state.to === "" ? CLOCK_END : Number(state.to) * 1000);
    brush.style.left = `${from}px`; brush.style.width = `${Math.max(1, to - from)}px`;
  }
  byId("range").textContent = limited
    ? `${human(Number(state.from || 0) * 1000)} to ${human(state.to === "" ? CLOCK_END : Number(state.to) * 1000)} · double-click for all`
    : "duration over time · drag to choose";
}
const cloudX = (ns) => 52 + ns / Math.max(1, CLOCK_END) * (byId("overview").clientWidth - 64);
const cloudTime = (x) => Math.max(0, (x - 52) / Math.max(1, byId("overview").clientWidth - 64)) * CLOCK_END;
