// The request that the form makes, as a command for a shell and as a Python program. Only texts are made here.

import { jsonText } from "./tensors.js";

const MOST = 4096; // letters of values that an example shows in full
const DTYPES = { BOOL: "bool", UINT8: "np.uint8", UINT16: "np.uint16", UINT32: "np.uint32", UINT64: "np.uint64", INT8: "np.int8", INT16: "np.int16", INT32: "np.int32", INT64: "np.int64", FP16: "np.float16", BF16: "np.float32", FP32: "np.float32", FP64: "np.float64", BYTES: "object" };

/** A text in single quotes for a POSIX shell. */
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A text as a Python literal. */
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

function document_(tensors, { id, parameters }) {
  const inputs = tensors.map((tensor) => `{"name": ${JSON.stringify(tensor.name)}, "datatype": "${tensor.datatype}", "shape": [${tensor.shape.join(", ")}], "data": ${jsonText(tensor.values)}}`);
  const more = (id ? `"id": ${JSON.stringify(id)}, ` : "") + (Object.keys(parameters).length ? `"parameters": ${JSON.stringify(parameters)}, ` : "");
  return `{${more}"inputs": [\n  ${inputs.join(",\n  ")}]}`;
}

/** A curl command. `base` is the server's URL, `path` that of the model; secrets are named, not shown. */
export function curl(base, path, tensors, options) {
  const who = [...options.headers.map((name) => `  -H ${quoted(`${name}: VALUE`)}`), ...(options.token ? ['  -H "Authorization: Bearer $NEPTRIO_TOKEN"'] : [])];
  const head = [`curl -s ${quoted(`${base}${path}/infer`)}`, ...who];
  if (small(tensors)) return [...head, `  -d ${quoted(document_(tensors, options))}`].join(" \\\n");
  return [...head, `  -H 'Inference-Header-Content-Length: ${options.jsonBytes ?? "LENGTH"}'`, "  --data-binary @request.bin"].join(" \\\n")
    + "\n# the values are many: \"Save the body\" makes request.bin";
}

function array(tensor) {
  const shape = `[${tensor.shape.join(", ")}]`;
  const dtype = DTYPES[tensor.datatype] || "np.float32";
  if (tensor.file) {
    const read = `open(${literal(tensor.file)}, "rb").read()`;
    return tensor.datatype === "BYTES" ? `np.array([${read}], dtype=object).reshape(${shape})` : `np.frombuffer(${read}, dtype=${dtype}).reshape(${shape})`;
  }
  if (tensor.image) {
    const { layout, channels, width, height, scale } = tensor.image;
    const mode = channels === 1 ? "L" : "RGB";
    const order = layout === "CHW" && channels > 1 ? ".transpose(2, 0, 1)" : "";
    return `(np.asarray(Image.open(${literal(tensor.image.name)}).convert("${mode}").resize((${width}, ${height})), dtype=${dtype})${order}${scale === 1 ? "" : ` / ${scale}`}).astype(${dtype}).reshape(${shape})`;
  }
  const value = (item) => (typeof item === "string" ? literal(item) : typeof item === "boolean" ? (item ? "True" : "False")
    : typeof item === "bigint" ? item.toString() : Number.isNaN(item) ? "np.nan" : item === Infinity ? "np.inf" : item === -Infinity ? "-np.inf" : String(item));
  const same = tensor.values.length > 16 && tensor.values.every((item) => item === tensor.values[0]);
  if (same) return `np.full(${shape}, ${value(tensor.values[0])}, dtype=${dtype})`;
  const shown = tensor.values.slice(0, 1024).map(value).join(", ");
  const rest = tensor.values.length > 1024 ? `]  # and ${tensor.values.length - 1024} more values: put them here\n` : "]";
  return `np.array([${shown}${rest}, dtype=${dtype}).reshape(${shape})`;
}

/** A program for tritonclient. */
export function python(host, tls, model, version, tensors, options) {
  const images = tensors.some((tensor) => tensor.image);
  const lines = ["import os", "", "import numpy as np", "import tritonclient.http as httpclient"];
  if (!options.token) lines.splice(0, 2);
  if (images) lines.push("from PIL import Image");
  lines.push("", `client = httpclient.InferenceServerClient(${literal(host)}${tls ? ", ssl=True" : ""})`, "inputs = []");
  tensors.forEach((tensor, i) => {
    lines.push(`value = ${array(tensor)}`,
      `inputs.append(httpclient.InferInput(${literal(tensor.name)}, [${tensor.shape.join(", ")}], "${tensor.datatype}"))`,
      `inputs[${i}].set_data_from_numpy(value)`);
  });
  const more = [];
  if (version) more.push(`model_version=${literal(version)}`);
  if (options.id) more.push(`request_id=${literal(options.id)}`);
  const { sequence_id: sequence, sequence_start: start, sequence_end: end, ...others } = options.parameters;
  if (sequence !== undefined) more.push(`sequence_id=${typeof sequence === "string" ? literal(sequence) : sequence}`);
  if (start) more.push("sequence_start=True");
  if (end) more.push("sequence_end=True");
  if (Object.keys(others).length) more.push(`parameters=${pythonDict(others)}`);
  const headers = [...options.headers.map((name) => `${literal(name)}: "VALUE"`), ...(options.token ? ['"Authorization": "Bearer " + os.environ["NEPTRIO_TOKEN"]'] : [])];
  if (headers.length) more.push(`headers={${headers.join(", ")}}`);
  lines.push(`result = client.infer(${[literal(model), "inputs", ...more].join(", ")})`, 'for output in result.get_response()["outputs"]:', '    print(output["name"], result.as_numpy(output["name"]))');
  return `${lines.join("\n")}\n`;
}

function pythonDict(values) {
  return `{${Object.entries(values).map(([key, value]) => `${literal(key)}: ${typeof value === "string" ? literal(value) : value === true ? "True" : value === false ? "False" : value}`).join(", ")}}`;
}
