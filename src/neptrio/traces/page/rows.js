// The waterfall: only rows that can be seen exist.

const ROW = 26;
const scroll = byId("scroll"), sizer = byId("sizer");

const view = {
  rows: [],          // traces shown, children below their parents
  toggled: new Set(), // traces folded against the page's default
  a: 0, b: 1,        // the part of the time axis that is shown
  domain: 1,
  chosen: null,
  lit: null,         // a stage shown alone
};

const isFolded = (trace) => (state.folded === "1") !== view.toggled.has(trace.index);

function layRows() {
  const rows = [];
  const add = (trace) => {
    rows.push(trace);
    if (trace.children.length && !isFolded(trace)) trace.children.forEach(add);
  };
  selected.forEach(add);
  view.rows = rows;
  rows.forEach((trace, at) => { trace.at = at; });
  sizer.style.height = `${rows.length * ROW}px`;
  byId("table").setAttribute("aria-rowcount", rows.length + 1);
}

/** Where on the time axis a row's 0 is, and how many nanoseconds a unit of the axis has. */
function frame(trace) {
  const root = trace.root;
  if (state.scale === "timeline") return { zero: 0, unit: 1 };
  if (state.scale === "share") return { zero: root.begin, unit: Math.max(1, (root.last || 0) - root.begin) / 100 };
  return { zero: root.begin, unit: 1 };
}

function setDomain() {
  view.zeroAt = 0;
  if (state.scale === "share") view.domain = 100;
  else if (state.scale === "timeline") {
    view.zeroAt = selected.reduce((least, root) => Math.min(least, root.begin), Infinity);
    if (!isFinite(view.zeroAt)) view.zeroAt = 0;
    view.domain = selected.reduce((most, root) => Math.max(most, root.last || 0), view.zeroAt + 1) - view.zeroAt;
  } else view.domain = selected.reduce((most, root) => Math.max(most, (root.last || 0) - root.begin), 1);
  view.a = view.zeroAt;
  view.b = view.zeroAt + view.domain * 1.02;
}

function zoom(factor, centre) {
  const width = Math.min(view.domain * 1.02, Math.max((view.b - view.a) * factor, view.domain / 1e6, state.scale === "share" ? 1e-3 : 10));
  const middle = centre === undefined ? focus() : centre;
  const share = (middle - view.a) / (view.b - view.a);
  showTimes(middle - share * width, middle - share * width + width);
}

/** What zooming by key or button keeps in place: on one clock the row looked at, else the middle. */
function focus() {
  const row = view.chosen && view.rows[view.chosen.at] === view.chosen ? view.chosen : view.rows[Math.floor(scroll.scrollTop / ROW)];
  if (state.scale !== "timeline" || !row) return (view.a + view.b) / 2;
  return Math.max(view.a, Math.min(view.b, (row.begin + row.end) / 2));
}

function pan(share) {
  const width = view.b - view.a;
  showTimes(view.a + share * width, view.a + share * width + width);
}

function showTimes(a, b) {
  const least = view.zeroAt, most = view.zeroAt + view.domain * 1.02, width = Math.min(b - a, most - least);
  view.a = Math.max(least, Math.min(a, most - width));
  view.b = view.a + width;
  drawAxis();
  drawRows();
}

const atPercent = (x) => (x - view.a) / (view.b - view.a) * 100;

function steps() {
  const rough = (view.b - view.a) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power;
  const found = [];
  for (let x = Math.ceil((view.a - view.zeroAt) / step) * step; x + view.zeroAt <= view.b; x += step) found.push(x);
  return found;
}

function drawAxis() {
  byId("axis").style.setProperty("--bar", `${scroll.offsetWidth - scroll.clientWidth}px`);
  const lane = byId("ticks"), grid = byId("grid"), left = lane.offsetLeft, width = lane.clientWidth;
  lane.replaceChildren(); grid.replaceChildren();
  for (const x of steps()) {
    const text = state.scale === "share" ? `${trim(x, 2)} %` : x === 0 ? "0" : human(x);
    const tick = make("span", "", text), line = make("i"), percent = atPercent(x + view.zeroAt);
    tick.style.left = `${percent}%`;
    line.style.left = `${left + percent / 100 * width}px`;
    line.style.height = `${scroll.clientHeight}px`;
    lane.append(tick); grid.append(line);
  }
}

function laneOf(trace) {
  const lane = make("div", "lane");
  lane.setAttribute("role", "gridcell");
  if (!trace.timed) {
    lane.append(make("span", "none", "no timestamps"));
    return lane;
  }
  const { zero, unit } = frame(trace);
  const place = (ns) => atPercent((ns - zero) / unit);
  const drawn = trace.bars.filter((bar) => state.scale === "timeline" || bar.stage !== STAGE.wait);
  let covered = -Infinity;
  const said = [];
  drawn.forEach((bar, i) => {
    const early = bar.begin < covered;
    if (!early) covered = bar.end;
    const from = Math.max(-1, place(bar.begin)), to = Math.min(101, place(bar.end));
    said.push(`${STAGES[bar.stage].name} ${human(bar.end - bar.begin)}`);
    if (to < -0.5 || from > 100.5) return;
    const seg = make("i", `seg stage-${STAGES[bar.stage].name}`);
    if (early) seg.classList.add("early");
    if (i === 0) seg.classList.add("first");
    if (i === drawn.length - 1) seg.classList.add("last");
    if (view.lit === bar.stage) seg.classList.add("lit");
    seg.style.left = `${from}%`;
    seg.style.width = `${Math.max(0, to - from)}%`;
    seg.dataset.tip = `${STAGES[bar.stage].name}: ${human(bar.end - bar.begin)}\n${STAGES[bar.stage].meaning}\nat ${micros(bar.begin - trace.root.begin)} µs`;
    lane.append(seg);
  });
  const mark = (classes, ns, tip, text) => {
    const x = place(ns);
    if (x < -1 || x > 101) return;
    const it = make("i", classes, text);
    it.style.left = `${x}%`;
    it.dataset.tip = tip;
    lane.append(it);
  };
  if (trace.replies.length > 1) {
    trace.replies.forEach((ns, i) => mark("reply", ns, `response ${i + 1} of ${trace.replies.length}\nat ${micros(ns - trace.root.begin)} µs`));
  }
  for (const { name, ns } of trace.custom) mark("custom", ns, `${name}\nat ${micros(ns - trace.root.begin)} µs`);
  if (trace.outcome !== "ok") mark("cross", trace.end, clip(trace.error, 600) || OUTCOMES.find((o) => o.name === trace.outcome).meaning, trace.outcome === "incomplete" ? "…" : "✕");
  const earlier = place(trace.end) < 0, later = place(trace.begin) > 100;
  if (earlier || later) {
    const off = make("i", `off ${later ? "later" : ""}`, later ? "▸" : "◂");
    off.dataset.tip = later ? "later than the times shown; click to go there" : "earlier than the times shown; click to go there";
    lane.append(off);
  }
  lane.setAttribute("aria-label", said.join(", "));
  return lane;
}

function rowOf(trace) {
  const row = make("div", `row ${trace.outcome}${trace.depth ? " child" : ""}`);
  row.id = `row-${trace.index}`;
  row.dataset.trace = trace.index;
  row.setAttribute("role", "row");
  row.setAttribute("aria-rowindex", trace.at + 2);
  row.setAttribute("aria-level", trace.depth + 1);
  row.setAttribute("aria-selected", view.chosen === trace);
  row.style.top = `${trace.at * ROW}px`;
  const label = make("div", "label");
  label.setAttribute("role", "gridcell");
  label.style.paddingLeft = `${8 + 16 * Math.min(trace.depth, 12)}px`;
  if (trace.depth) label.append(make("span", "elbow"));
  if (trace.children.length) {
    const folded = isFolded(trace), twist = make("button", "twist", folded ? "▸" : "▾");
    twist.type = "button"; twist.tabIndex = -1;
    twist.setAttribute("aria-label", folded ? "unfold" : "fold");
    row.setAttribute("aria-expanded", !folded);
    label.append(twist);
  } else if (!trace.depth) label.append(make("span", "twist"));
  const model = make("span", "model", clip(trace.model, 120) || "(no name)");
  model.dataset.tip = `${clip(trace.model, 500)} version ${trace.version}`;
  const own = trace.parent < 0 || trace.requestId !== traces[trace.parent].requestId;
  const rid = make("span", "rid", (own && clip(trace.requestId, 120)) || `#${trace.id}`);
  rid.dataset.tip = trace.requestId ? `request id ${clip(trace.requestId, 500)}\ntrace ${trace.id}` : `trace ${trace.id}`;
  const chips = make("span", "chips");
  if (trace.outcome !== "ok") chips.append(make("span", `chip ${trace.outcome}`, trace.outcome));
  if (trace.cached) chips.append(make("span", "chip cached", "cache"));
  if (trace.replies.length > 1) chips.append(make("span", "chip decoupled", `◆ ${trace.replies.length}`));
  if (!trace.depth && trace.front) chips.append(make("span", "chip", frontOf(trace)));
  label.append(model, rid, chips);
  const duration = make("div", "duration", trace.timed ? human(trace.duration) : "");
  duration.setAttribute("role", "gridcell");
  row.append(label, duration, laneOf(trace));
  return row;
}

function drawRows() {
  const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 4);
  const last = Math.min(view.rows.length, Math.ceil((scroll.scrollTop + scroll.clientHeight) / ROW) + 4);
  const shown = document.createDocumentFragment();
  for (let i = first; i < last; i++) shown.append(rowOf(view.rows[i]));
  sizer.replaceChildren(shown);
  sizer.classList.toggle("dim", view.lit !== null);
  const table = byId("table");
  if (view.chosen && view.rows[view.chosen.at] === view.chosen && byId(`row-${view.chosen.index}`)) {
    table.setAttribute("aria-activedescendant", `row-${view.chosen.index}`);
  } else table.removeAttribute("aria-activedescendant");
}

function intoView(trace, middle) {
  if (state.scale === "timeline" && (trace.end < view.a || trace.begin > view.b)) {
    const half = (view.b - view.a) / 2, at = Math.min(trace.begin + half * 0.9, (trace.begin + trace.end) / 2);
    showTimes(at - half, at + half);
  }
  const top = trace.at * ROW;
  if (middle && (top < scroll.scrollTop || top + ROW > scroll.scrollTop + scroll.clientHeight)) {
    scroll.scrollTop = top - scroll.clientHeight / 2;
  }
  if (top < scroll.scrollTop) scroll.scrollTop = top;
  else if (top + ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + ROW - scroll.clientHeight;
}
