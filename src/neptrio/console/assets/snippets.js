// The request that the form makes, as a command for a shell and as a program in JavaScript. Only texts are made here.
// python.js has the programs in Python.

import { jsonText, parametersText } from "./tensors.js";

const MOST = 4096; // letters of values that an example shows in full

/** A text in single quotes for a POSIX shell. */
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A text as a literal of Python and of JavaScript. */
export const literal = (text) => JSON.stringify(text).replace(/\u2028/g, "\\u2028").replace(/\u2029/g, "\\u2029").replace(/[\ud800-\udfff]/gu, "\ufffd");

/** Whether the values of a request can be written out. */
function small(tensors) {
  let letters = 0;
  for (const tensor of tensors) {
    if (tensor.bytes || !tensor.values || tensor.values.some((value) => typeof value === "object" || (typeof value === "number" && !Number.isFinite(value)))) return false;
    if (tensor.values.length > MOST) return false;
    letters += jsonText(tensor.values).length;
  }
  return letters <= MOST;
}

/** Whether the examples name the file that "Save the body" makes. */
export const needsFile = (tensors) => !small(tensors);

function document_(tensors, { id, parameters }) {
  const inputs = tensors.map((tensor) => `{"name": ${JSON.stringify(tensor.name)}, "datatype": "${tensor.datatype}", "shape": [${tensor.shape.join(", ")}], "data": ${jsonText(tensor.values)}}`);
  const more = (id ? `"id": ${JSON.stringify(id)}, ` : "") + (Object.keys(parameters).length ? `"parameters": ${parametersText(parameters)}, ` : "");
  return `{${more}"inputs": [\n  ${inputs.join(",\n  ")}]}`;
}

/** A curl command. `base` is the server's URL, `path` that of the verb; secrets are named, not shown. */
export function curl(base, path, tensors, options) {
  const who = [...options.headers.map((name) => `  -H ${quoted(`${name}: VALUE`)}`), ...(options.token ? ['  -H "Authorization: Bearer $NEPTRIO_TOKEN"'] : [])];
  const head = [`curl -s${options.decoupled ? "N" : ""} ${quoted(`${base}${path}`)}`, ...who];
  if (small(tensors)) return [...head, `  -d ${quoted(document_(tensors, options))}`].join(" \\\n");
  return [...head, `  -H 'Inference-Header-Content-Length: ${options.jsonBytes ?? "LENGTH"}'`, "  --data-binary @request.bin"].join(" \\\n")
    + "\n# the values are many: \"Save the body\" makes request.bin";
}

/** A program in JavaScript, for Node and for browsers. */
export function javascript(base, path, tensors, options) {
  const all = small(tensors);
  const lines = [];
  if (all) {
    const text = document_(tensors, options);
    // a number of 64 bits stays exact only within a text
    lines.push(tensors.some((tensor) => /64$/.test(tensor.datatype)) || Object.values(options.parameters).some((value) => typeof value === "bigint")
      ? `const body = ${literal(text)};` : `const body = JSON.stringify(${text.replace(/\u2028/g, "\\u2028").replace(/\u2029/g, "\\u2029")});`);
  } else {
    lines.push('import { readFile } from "node:fs/promises";', "",
      '// "Save the body" makes request.bin; in a browser it is the file of an <input type="file">', 'const body = await readFile("request.bin");');
  }
  const headers = [all ? '"Content-Type": "application/json"' : '"Content-Type": "application/octet-stream"',
    ...(all ? [] : [`"Inference-Header-Content-Length": "${options.jsonBytes ?? "LENGTH"}"`]),
    ...options.headers.map((name) => `${literal(name)}: "VALUE"`), ...(options.token ? ["Authorization: `Bearer ${process.env.NEPTRIO_TOKEN}`"] : [])];
  lines.push("// a page of another origin may ask only where --cors-allow-origin names that",
    `const answer = await fetch(${literal(`${base}${path}`)}, {`, '  method: "POST",', `  headers: { ${headers.join(", ")} },`, "  body,", "});",
    "if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);");
  lines.push(...(options.decoupled ? ["for await (const part of answer.body.pipeThrough(new TextDecoderStream())) console.log(part);"]
    : ["for (const output of (await answer.json()).outputs) console.log(output.name, output.data);"]));
  return `${lines.join("\n")}\n`;
}
