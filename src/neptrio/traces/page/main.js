// State lives in the address after `#`, so that a view can be bookmarked; everything is drawn from it.

const state = { ...EMPTY };
let selected = [];
const FIELDS = ["q", "model", "min", "outcome", "front", "sort", "scale"];

function readAddress() {
  Object.assign(state, EMPTY);
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(EMPTY)) if (given.has(key)) state[key] = given.get(key);
  for (const key of FIELDS) byId(key).value = state[key];
  for (const key of ["sort", "scale"]) if (byId(key).selectedIndex < 0) { state[key] = EMPTY[key]; byId(key).value = EMPTY[key]; }
  update();
  const trace = traces.find((t) => `${t.id}` === given.get("trace"));
  if (trace) reveal(trace);
}

function writeAddress() {
  const given = new URLSearchParams();
  for (const key of Object.keys(EMPTY)) if (state[key] !== EMPTY[key]) given.set(key, state[key]);
  if (view.chosen && !panel.hidden) given.set("trace", view.chosen.id);
  history.replaceState(null, "", `#${given}`);
}

function figures() {
  const box = byId("figures");
  const number = (n) => n.toLocaleString("en");
  const ordered = selected.filter((root) => root.timed).map((root) => root.duration).sort((x, y) => x - y);
  const at = (p) => human(ordered[Math.max(0, Math.ceil(p / 100 * ordered.length) - 1)]);
  const failed = selected.filter((root) => root.outcome !== "ok").length;
  box.replaceChildren(make("b", "", number(selected.length)), ` of ${number(roots.length)} requests`);
  if (failed) box.append(" · ", make("b", "", number(failed)), " not ok");
  if (ordered.length) box.append(" · p50 ", make("b", "", at(50)), " · p95 ", make("b", "", at(95)), " · p99 ", make("b", "", at(99)), " · max ", make("b", "", at(100)));
  if (data.left_out) box.append(` · ${number(data.left_out)} faster ones left out of the page`);
}

function update(keepZoom) {
  selected = select(state);
  layRows();
  if (!keepZoom) { setDomain(); scroll.scrollTop = 0; }
  byId("nothing").hidden = selected.length > 0;
  byId("fold").textContent = state.folded === "1" ? "Unfold steps" : "Fold steps";
  figures();
  relayout();
}

function relayout() {
  drawCloud();
  drawAxis();
  drawRows();
  writeAddress();
}

function choose(trace) {
  view.chosen = trace;
  intoView(trace);
  drawRows();
  if (!panel.hidden) { showDetails(trace); writeAddress(); }
}

function open(trace) {
  view.chosen = trace;
  showDetails(trace);
  intoView(trace, true);
  drawRows();
  writeAddress();
}

/** Opens a trace wherever it is: filters that hide it are cleared, folds above it opened. */
function reveal(trace) {
  if (!selected.includes(trace.root)) clearFilters();
  for (let above = trace; above.parent >= 0;) {
    above = traces[above.parent];
    if (isFolded(above)) toggle(above);
  }
  open(trace);
}

function toggle(trace) {
  if (!view.toggled.delete(trace.index)) view.toggled.add(trace.index);
  layRows();
  drawRows();
}

function clearFilters() {
  Object.assign(state, EMPTY, { sort: state.sort, scale: state.scale, folded: state.folded });
  for (const key of FIELDS) byId(key).value = state[key];
  update();
}

// ---------------------------------------------------------------- controls

for (const name of [...new Set(traces.map((trace) => trace.model))].sort()) {
  const option = make("option", "", clip(name, 80) || "(no name)");
  option.value = name;
  byId("model").append(option);
}
const seen = new Set(traces.map((trace) => trace.outcome));
const offered = OUTCOMES.map((o) => o.name).filter((name) => seen.has(name));
if (offered.length > 1) offered.splice(1, 0, "not ok");
if (traces.some((trace) => trace.cached)) offered.push("cached");
for (const name of offered) byId("outcome").append(make("option", "", name));
for (const name of [...new Set(roots.map(frontOf))].sort()) byId("front").append(make("option", "", name));
byId("source").textContent = clip(data.files.join(", "), 200);

for (const stage of STAGES) {
  if (!traces.some((trace) => trace.spent.has(STAGE[stage.name]))) continue;
  const button = make("button", "", null, make("i", `swatch stage-${stage.name}`), stage.name);
  button.type = "button";
  button.title = `${stage.meaning}; click to show it alone`;
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    view.lit = view.lit === STAGE[stage.name] ? null : STAGE[stage.name];
    for (const other of byId("legend").querySelectorAll("button")) other.setAttribute("aria-pressed", other === button && view.lit !== null);
    drawRows();
  });
  byId("legend").append(make("li", "", null, button));
}
if (traces.some((trace) => trace.replies.length > 1)) byId("legend").append(make("li", "mark", "◆ response of a decoupled model"));
if (traces.some((trace) => trace.outcome !== "ok")) byId("legend").append(make("li", "mark", "✕ failed, refused, too late or cancelled"));

byId("filters").addEventListener("submit", (event) => event.preventDefault());
for (const key of FIELDS) {
  byId(key).addEventListener("input", () => { state[key] = byId(key).value; update(); });
}
byId("clear").addEventListener("click", clearFilters);
byId("nothing-clear").addEventListener("click", clearFilters);
byId("zoom-in").addEventListener("click", () => zoom(0.5));
byId("zoom-out").addEventListener("click", () => zoom(2));
const fit = () => { setDomain(); relayout(); };
byId("zoom-fit").addEventListener("click", fit);
const foldAll = () => { state.folded = state.folded === "1" ? "" : "1"; view.toggled.clear(); update(true); };
byId("fold").addEventListener("click", foldAll);
const shade = () => { document.documentElement.classList.toggle("dark"); drawCloud(); };
byId("theme").addEventListener("click", shade);
byId("help-button").addEventListener("click", () => byId("help").showModal());

let drawing = 0;
scroll.addEventListener("scroll", () => {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; drawRows(); });
});
sizer.addEventListener("click", (event) => {
  const row = event.target.closest(".row");
  if (!row) return;
  const trace = traces[Number(row.dataset.trace)];
  if (event.target.closest("button.twist")) toggle(trace);
  else open(trace);
});

function timeAt(clientX) {
  const box = byId("ticks").getBoundingClientRect();
  return view.a + Math.max(0, Math.min(1, (clientX - box.left) / box.width)) * (view.b - view.a);
}
scroll.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey) return;
  event.preventDefault();
  const turned = event.deltaY || event.deltaX;
  if (event.ctrlKey) zoom(Math.exp(turned / 300), timeAt(event.clientX));
  else pan(turned / 800);
}, { passive: false });

/** Drags a range over an element: moved(from, to) while dragging, done(from, to) at the end, in client pixels. */
function dragged(element, moved, done) {
  element.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const start = event.clientX;
    element.setPointerCapture(event.pointerId);
    const range = (e) => [Math.min(start, e.clientX), Math.max(start, e.clientX)];
    const onMove = (e) => moved(...range(e));
    element.addEventListener("pointermove", onMove);
    element.addEventListener("pointerup", (e) => {
      element.removeEventListener("pointermove", onMove);
      done(...range(e));
    }, { once: true });
  });
}
const ticks = byId("ticks");
dragged(ticks, (from, to) => {
  let mark = ticks.querySelector("i");
  if (!mark) { mark = make("i"); ticks.append(mark); }
  const left = ticks.getBoundingClientRect().left;
  mark.style.left = `${from - left}px`; mark.style.width = `${to - from}px`;
}, (from, to) => { if (to - from > 4) showTimes(timeAt(from), timeAt(to)); else drawAxis(); });
ticks.addEventListener("dblclick", fit);

const overview = byId("overview");
const inside = (x) => x - overview.getBoundingClientRect().left - 1;
dragged(overview, (from, to) => {
  byId("brush").hidden = false;
  byId("brush").style.left = `${inside(from)}px`; byId("brush").style.width = `${to - from}px`;
}, (from, to) => {
  if (to - from > 4) {
    state.from = micros(cloudTime(inside(from)));
    state.to = micros(cloudTime(inside(to)));
    update();
  } else drawCloud();
});
overview.addEventListener("dblclick", () => { state.from = state.to = ""; update(); });

const tip = byId("tip");
document.addEventListener("pointermove", (event) => {
  const target = event.target instanceof Element && event.target.closest("[data-tip]");
  tip.hidden = !target || event.buttons > 0;
  if (tip.hidden) return;
  tip.textContent = clip(target.dataset.tip, 600);
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 22 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
});
window.addEventListener("resize", relayout);
window.addEventListener("hashchange", readAddress);

// ---------------------------------------------------------------- keys

function move(by) {
  const shown = view.chosen && view.rows[view.chosen.at] === view.chosen;
  goTo(shown ? Math.max(0, Math.min(view.rows.length - 1, view.chosen.at + by)) : Math.floor(scroll.scrollTop / ROW));
}
function goTo(at) {
  if (view.rows[at]) choose(view.rows[at]);
}

const page = () => Math.max(1, Math.floor(scroll.clientHeight / ROW) - 1);
const KEYS = {
  ArrowDown: () => move(1), j: () => move(1), ArrowUp: () => move(-1), k: () => move(-1),
  PageDown: () => move(page()), PageUp: () => move(-page()), Home: () => goTo(0), End: () => goTo(view.rows.length - 1),
  ArrowRight: () => {
    const trace = view.chosen;
    if (!trace || !trace.children.length) return;
    if (isFolded(trace)) toggle(trace); else choose(trace.children[0]);
  },
  ArrowLeft: () => {
    const trace = view.chosen;
    if (!trace) return;
    if (trace.children.length && !isFolded(trace)) toggle(trace);
    else if (trace.parent >= 0) choose(traces[trace.parent]);
  },
  Enter: () => { if (view.chosen) open(view.chosen); else move(1); },
  Escape: () => { if (!panel.hidden) hideDetails(); else clearFilters(); },
  "/": () => byId("q").select(),
  "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: fit,
  "[": () => pan(-0.25), "]": () => pan(0.25), e: foldAll, d: shade, "?": () => byId("help").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target.matches("input, select");
  if (typing) {
    if (event.key === "Escape") { byId("table").focus({ preventScroll: true }); event.preventDefault(); }
    return;
  }
  if (event.target.matches("button") && (event.key === "Enter" || event.key === " ")) return;
  if (panel.contains(event.target) && event.key !== "Escape") return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.classList.add("dark");
readAddress();
document.documentElement.dataset.ready = "1";
