// The request that the form makes, as programs for Python's tritonclient: over HTTP, with asyncio, and over gRPC.

import { literal } from "./snippets.js";

const DTYPES = { BOOL: "bool", UINT8: "np.uint8", UINT16: "np.uint16", UINT32: "np.uint32", UINT64: "np.uint64", INT8: "np.int8", INT16: "np.int16", INT32: "np.int32", INT64: "np.int64", FP16: "np.float16", BF16: "np.float32", FP32: "np.float32", FP64: "np.float64", BYTES: "object" };

/** What the programs differ in: the module, whether it waits, and how outputs are read. */
const KINDS = {
  http: { module: "tritonclient.http as httpclient", name: "httpclient" },
  aio: { module: "tritonclient.http.aio as httpclient", name: "httpclient" },
  grpc: { module: "tritonclient.grpc as grpcclient", name: "grpcclient" },
};

const PRINT_JSON = ['for output in result.get_response()["outputs"]:', '    print(output["name"], result.as_numpy(output["name"]))'];
const PRINT_MESSAGE = ["for output in result.get_response().outputs:", "    print(output.name, result.as_numpy(output.name))"];

function value(item) {
  if (typeof item === "string") return literal(item);
  if (typeof item === "boolean") return item ? "True" : "False";
  if (typeof item === "number" && !Number.isFinite(item)) return Number.isNaN(item) ? "np.nan" : item > 0 ? "np.inf" : "-np.inf";
  return String(item);
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
  const same = tensor.values.length > 16 && tensor.values.every((item) => item === tensor.values[0]);
  if (same) return `np.full(${shape}, ${value(tensor.values[0])}, dtype=${dtype})`;
  const shown = tensor.values.slice(0, 1024).map(value).join(", ");
  const rest = tensor.values.length > 1024 ? `]  # and ${tensor.values.length - 1024} more values: put them here\n` : "]";
  return `np.array([${shown}${rest}, dtype=${dtype}).reshape(${shape})`;
}

const dict = (values) => `{${Object.entries(values).map(([key, item]) => `${literal(key)}: ${value(item)}`).join(", ")}}`;

/** The arguments of infer() behind the inputs, and those headers that name who asks. */
function more(version, options, lower) {
  const found = [];
  if (version) found.push(`model_version=${literal(version)}`);
  if (options.id) found.push(`request_id=${literal(options.id)}`);
  const others = { ...options.parameters };
  for (const name of ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"]) {
    if (others[name] !== undefined && others[name] !== false) found.push(`${name}=${value(others[name])}`);
    delete others[name];
  }
  if (Object.keys(others).length) found.push(`parameters=${dict(others)}`);
  const headers = [...options.headers.map((name) => `${literal(name)}: "VALUE"`), ...(options.token ? [`"${lower ? "authorization" : "Authorization"}": "Bearer " + os.environ["NEPTRIO_TOKEN"]`] : [])];
  return { found, headers: headers.length ? [`headers={${headers.join(", ")}}`] : [] };
}

/** A program of that kind (http, aio, grpc). `host` is HOST:PORT, `model` and `version` are asked. */
export function python(kind, host, tls, model, version, tensors, options) {
  const { module, name } = KINDS[kind];
  const stream = kind === "grpc" && options.decoupled;
  const imports = [...(kind === "aio" ? ["import asyncio"] : []), ...(options.token ? ["import os"] : []), ...(stream ? ["import queue"] : [])];
  const lines = [...imports, ...(imports.length ? [""] : []), "import numpy as np", `import ${module}`];
  if (tensors.some((tensor) => tensor.image)) lines.push("from PIL import Image");
  const made = `${name}.InferenceServerClient(${literal(host)}${tls ? ", ssl=True" : ""})`;
  const inputs = ["inputs = []"];
  tensors.forEach((tensor, i) => {
    inputs.push(`value = ${array(tensor)}`,
      `inputs.append(${name}.InferInput(${literal(tensor.name)}, [${tensor.shape.join(", ")}], "${tensor.datatype}"))`,
      `inputs[${i}].set_data_from_numpy(value)`);
  });
  const { found, headers } = more(version, options, kind === "grpc");
  const asked = (last) => [literal(model), "inputs", ...found, ...last].join(", ");
  if (stream) {
    // closed by the program: the end of Python's interpreter stops the threads that a client left to it waits for
    const body = [`client.start_stream(${["lambda result, error: answers.put(error or result)", ...headers].join(", ")})`,
      `client.async_stream_infer(${asked(["enable_empty_final_response=True"])})`,
      "while True:", "    result = answers.get()", "    if isinstance(result, Exception):", "        raise result",
      ...PRINT_MESSAGE.map((line) => `    ${line}`), '    if result.get_response().parameters["triton_final_response"].bool_param:', "        break"];
    lines.push("", ...inputs, "answers = queue.Queue()", `with ${made} as client:`, ...body.map((line) => `    ${line}`));
  } else if (kind === "aio") {
    lines.push("", ...inputs, "", "", "async def main():", `    async with ${made} as client:`, `        result = await client.infer(${asked(headers)})`,
      ...PRINT_JSON.map((line) => `    ${line}`), "", "", "asyncio.run(main())");
  } else {
    lines.push("", `client = ${made}`, ...inputs, `result = client.infer(${asked(headers)})`, ...(kind === "grpc" ? PRINT_MESSAGE : PRINT_JSON));
  }
  return `${lines.join("\n")}\n`;
}
