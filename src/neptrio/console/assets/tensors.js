// Tensors from what people type and choose, and their wire form. Nothing here touches the page.

export const SIZES = { BOOL: 1, UINT8: 1, UINT16: 2, UINT32: 4, UINT64: 8, INT8: 1, INT16: 2, INT32: 4, INT64: 8, FP16: 2, BF16: 2, FP32: 4, FP64: 8 };
const LEAST = { UINT8: 0n, UINT16: 0n, UINT32: 0n, UINT64: 0n, INT8: -(1n << 7n), INT16: -(1n << 15n), INT32: -(1n << 31n), INT64: -(1n << 63n) };
const MOST = { UINT8: (1n << 8n) - 1n, UINT16: (1n << 16n) - 1n, UINT32: (1n << 32n) - 1n, UINT64: (1n << 64n) - 1n, INT8: (1n << 7n) - 1n, INT16: (1n << 15n) - 1n, INT32: (1n << 31n) - 1n, INT64: (1n << 63n) - 1n };
const SPECIAL = { nan: NaN, inf: Infinity, "+inf": Infinity, "-inf": -Infinity, infinity: Infinity, "-infinity": -Infinity };

/** How many elements a shape has. */
export const elements = (shape) => shape.reduce((product, dim) => product * dim, 1);

/** A shape from text like "1, 3, 224, 224" or "[1,3]"; "" is the shape of a scalar. Throws Error. */
export function parseShape(text) {
  const plain = text.trim().replace(/^\[|\]$/g, "").trim();
  if (!plain) return [];
  return plain.split(/[\s,x×]+/).map((part) => {
    if (!/^\d+$/.test(part)) throw new Error(`a shape is whole numbers with commas, got '${part}'`);
    return Number(part);
  });
}

/** The shape to begin with: -1 becomes 1, or what the number of values says if only one dimension is open. */
export function firstShape(shape, values = null) {
  const open = shape.filter((dim) => dim < 0).length;
  const known = elements(shape.filter((dim) => dim >= 0));
  const last = shape.lastIndexOf(-1);
  const fits = values !== null && open > 0 && known > 0 && values % known === 0;
  return shape.map((dim, i) => (dim >= 0 ? dim : fits && i === last ? values / known : 1));
}

function one(text, datatype) {
  if (datatype === "BOOL") {
    if (/^(true|1)$/i.test(text)) return true;
    if (/^(false|0)$/i.test(text)) return false;
    throw new Error(`BOOL is true or false, got '${text}'`);
  }
  if (datatype in LEAST) {
    if (!/^[+-]?\d+$/.test(text)) throw new Error(`${datatype} is a whole number, got '${text}'`);
    const value = BigInt(text.replace(/^\+/, ""));
    if (value < LEAST[datatype] || value > MOST[datatype]) throw new Error(`${datatype} is from ${LEAST[datatype]} to ${MOST[datatype]}, got ${text}`);
    return value;
  }
  const lower = text.toLowerCase();
  const value = lower in SPECIAL ? SPECIAL[lower] : text === "" ? NaN : Number(text);
  if (Number.isNaN(value) && lower !== "nan") throw new Error(`${datatype} is a number, got '${text}'`);
  return value;
}

/** Values from text: numbers apart by commas, spaces, brackets or lines; strings one a line, or a JSON array. Throws Error. */
export function parseValues(text, datatype) {
  if (datatype === "BYTES") {
    if (text.trim().startsWith("[")) {
      try {
        const found = JSON.parse(text).flat(Infinity);
        if (found.every((value) => typeof value === "string")) return found;
      } catch { /* a line that begins with a bracket */ }
    }
    return text.replace(/\n$/, "").split("\n");
  }
  return text.split(/[\s,;[\]]+/).filter(Boolean).map((part) => one(part, datatype));
}

/** As many values as a shape has: one value or a short row is repeated. Throws Error. */
export function repeated(values, wanted) {
  if (values.length === wanted) return values;
  if (!values.length || values.length > wanted || wanted % values.length) throw new Error(`the shape has ${wanted} elements, got ${values.length} values`);
  return Array.from({ length: wanted }, (_, i) => values[i % values.length]);
}

/** The JSON text of values. Whole numbers of 64 bits stay exact, which JSON.stringify could not do. Throws Error. */
export function jsonText(values) {
  return `[${values.map((value) => {
    if (typeof value === "bigint") return value.toString();
    if (typeof value === "number" && !Number.isFinite(value)) throw new Error("JSON has no NaN and no infinity: choose binary");
    return JSON.stringify(value);
  }).join(",")}]`;
}

const word = new DataView(new ArrayBuffer(4));

/** The 16 bits of a half-precision number, rounded to the nearest, ties to even. */
export function half(value) {
  word.setFloat32(0, value);
  const bits = word.getUint32(0);
  const sign = (bits >>> 16) & 0x8000;
  const exponent = (bits >>> 23) & 0xff;
  let mantissa = bits & 0x7fffff;
  if (exponent === 0xff) return sign | 0x7c00 | (mantissa ? 0x200 : 0);
  const scaled = exponent - 112;
  if (scaled >= 31) return sign | 0x7c00;
  if (scaled <= 0) {
    if (scaled < -10) return sign;
    mantissa |= 0x800000;
    const shift = 14 - scaled;
    const kept = mantissa >>> shift, rest = mantissa & ((1 << shift) - 1), middle = 1 << (shift - 1);
    return sign | (kept + (rest > middle || (rest === middle && kept & 1) ? 1 : 0));
  }
  const kept = (scaled << 10) | (mantissa >>> 13), rest = mantissa & 0x1fff;
  return sign | (kept + (rest > 0x1000 || (rest === 0x1000 && kept & 1) ? 1 : 0));
}

/** The 16 bits of a bfloat16, rounded to the nearest, ties to even. */
export function brain(value) {
  word.setFloat32(0, value);
  const bits = word.getUint32(0);
  if (Number.isNaN(value)) return 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** The binary form of values: little endian; strings and byte arrays each after their length. */
export function encode(values, datatype) {
  if (datatype === "BYTES") {
    const parts = values.map((value) => (typeof value === "string" ? new TextEncoder().encode(value) : value));
    const out = new Uint8Array(parts.reduce((sum, part) => sum + 4 + part.length, 0));
    const view = new DataView(out.buffer);
    let at = 0;
    for (const part of parts) {
      view.setUint32(at, part.length, true);
      out.set(part, at + 4);
      at += 4 + part.length;
    }
    return out;
  }
  const size = SIZES[datatype];
  if (!size) throw new Error(`there is no datatype '${datatype}'`);
  const view = new DataView(new ArrayBuffer(values.length * size));
  const put = {
    BOOL: (at, v) => view.setUint8(at, v ? 1 : 0), UINT8: (at, v) => view.setUint8(at, Number(v)), INT8: (at, v) => view.setInt8(at, Number(v)),
    UINT16: (at, v) => view.setUint16(at, Number(v), true), INT16: (at, v) => view.setInt16(at, Number(v), true),
    UINT32: (at, v) => view.setUint32(at, Number(v), true), INT32: (at, v) => view.setInt32(at, Number(v), true),
    UINT64: (at, v) => view.setBigUint64(at, BigInt(v), true), INT64: (at, v) => view.setBigInt64(at, BigInt(v), true),
    FP16: (at, v) => view.setUint16(at, half(Number(v)), true), BF16: (at, v) => view.setUint16(at, brain(Number(v)), true),
    FP32: (at, v) => view.setFloat32(at, Number(v), true), FP64: (at, v) => view.setFloat64(at, Number(v), true),
  }[datatype];
  values.forEach((value, i) => put(i * size, value));
  return new Uint8Array(view.buffer);
}

/** Pixels (RGBA, rows of `width`) as values of a tensor: `layout` HWC or CHW, 3 channels or 1 (grey); `scale` 255: 0 to 1. */
export function pixels(rgba, width, height, { layout, channels, scale = 1, datatype = "FP32" }) {
  const out = new Array(width * height * channels);
  const whole = datatype in LEAST;
  for (let i = 0; i < width * height; i++) {
    const [r, g, b] = [rgba[4 * i], rgba[4 * i + 1], rgba[4 * i + 2]];
    const found = channels === 1 ? [0.299 * r + 0.587 * g + 0.114 * b] : [r, g, b];
    for (let c = 0; c < channels; c++) {
      const value = found[c] / scale;
      out[layout === "CHW" ? c * width * height + i : i * channels + c] = whole ? Math.round(value) : value;
    }
  }
  return out;
}

/** How an image fits a tensor's shape: {layout, channels, height, width}; null if it does not look like one. */
export function imageShape(shape) {
  const dims = shape.length === 4 ? shape.slice(1) : shape;
  const side = (dim) => (dim > 0 ? dim : 224);
  if (dims.length === 3 && (dims[0] === 3 || dims[0] === 1) && dims[1] !== 0) return { layout: "CHW", channels: dims[0], height: side(dims[1]), width: side(dims[2]) };
  if (dims.length === 3 && (dims[2] === 3 || dims[2] === 1)) return { layout: "HWC", channels: dims[2], height: side(dims[0]), width: side(dims[1]) };
  return dims.length === 2 && dims.every((dim) => dim < 0 || dim > 7) ? { layout: "HWC", channels: 1, height: side(dims[0]), width: side(dims[1]) } : null;
}

/** Parameters of a request as JSON, in which whole numbers of 64 bits stay exact. */
export const parametersText = (parameters) => `{${Object.entries(parameters).map(([name, value]) => `${JSON.stringify(name)}:${typeof value === "bigint" ? value : JSON.stringify(value)}`).join(",")}}`;

/** The body of an infer request, and how long its JSON part is (null: all of it is JSON). Throws Error.
 *  tensors: {name, datatype, shape, values | bytes}, `bytes` being the tensor's binary form already. */
export function body(tensors, { id = "", parameters = {}, outputs = null, binary = false } = {}) {
  const parts = [];
  const inputs = tensors.map((tensor) => {
    const head = `{"name":${JSON.stringify(tensor.name)},"shape":[${tensor.shape.join(",")}],"datatype":${JSON.stringify(tensor.datatype)}`;
    if (!binary && !tensor.bytes && tensor.values.every((value) => typeof value !== "object")) return `${head},"data":${jsonText(tensor.values)}}`;
    const bytes = tensor.bytes || encode(tensor.values, tensor.datatype);
    parts.push(bytes);
    return `${head},"parameters":{"binary_data_size":${bytes.length}}}`;
  });
  const more = [id ? `"id":${JSON.stringify(id)},` : "", Object.keys(parameters).length ? `"parameters":${parametersText(parameters)},` : ""].join("");
  const asked = outputs ? `,"outputs":${JSON.stringify(outputs.map((name) => ({ name })))}` : "";
  const json = new TextEncoder().encode(`{${more}"inputs":[${inputs.join(",")}]${asked}}`);
  if (!parts.length) return { body: json, jsonBytes: null };
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, json.length));
  whole.set(json);
  let at = json.length;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return { body: whole, jsonBytes: json.length };
}
