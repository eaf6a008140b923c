// Elements from code. Texts become text nodes, never markup: names, errors and traces are written by strangers.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. `attributes`: `onclick` and its like are listeners, `vars` are CSS properties. */
export const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Sets the text of an element if it has another one, so that selections in it live on. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A box with a heading. */
export function card(title, ...children) {
  return make("section", { class: "card" }, make("h2", {}, title), ...children);
}

/** Pairs of a term and its value. */
export function facts(pairs) {
  return make("dl", { class: "facts" }, pairs.filter(Boolean).map(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

/** A label with a control in it, and a line of help below. */
export function field(name, control, help) {
  return make("label", { class: "field" }, make("span", { class: "name" }, name), control, help ? make("span", { class: "help" }, help) : null);
}

/** A choice of texts. */
export function choice(values, chosen, attributes) {
  return make("select", attributes, values.map((value) => make("option", { value, selected: value === chosen }, value)));
}

/** A short word on a coloured ground; `kind` is ok, warn, bad or plain. */
export const badge = (text, kind = "plain") => make("span", { class: `badge ${kind}` }, text);

/** Says something to those who see and those who listen; it goes away by itself unless it is bad. */
export function tell(text, kind = "ok") {
  const note = make("div", { class: `note ${kind}`, role: kind === "bad" ? "alert" : "status" }, make("span", {}, text),
    make("button", { type: "button", class: "quiet", "aria-label": "Dismiss", onclick: () => note.remove() }, "×"));
  byId("notes").append(note);
  if (kind !== "bad") setTimeout(() => note.remove(), 6000);
}

/** Asks in a dialog; resolves to true when the answer is yes. */
export function confirmed(question, detail, yes) {
  return new Promise((resolve) => {
    const dialog = make("dialog", { class: "ask", "aria-label": question, onclose: () => { dialog.remove(); resolve(dialog.returnValue === "yes"); } },
      make("h2", {}, question), make("p", {}, detail),
      make("div", { class: "actions" },
        make("button", { type: "button", onclick: () => dialog.close("no") }, "Cancel"),
        make("button", { type: "button", class: "danger", onclick: () => dialog.close("yes") }, yes)));
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Copies a text, where the browser allows it. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    tell(`${what} copied`);
  } catch {
    tell("The browser does not allow copying here: select the text instead", "warn");
  }
}
