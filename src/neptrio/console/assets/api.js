// Calls of the server's API, with what the caller has said about who they are.
//
// A token and the values of restricted headers live in this tab alone (sessionStorage), and are sent to the origin that
// the page came from and nowhere else.

const KEY = "neptrio.access";

/** Below this path the server answers REST's verbs to the console. */
export const BASE = "/console";

/** A refusal or failure; `status` 0: the server cannot be reached. `header`: the one that a restricted API expects. */
export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
    this.header = (/expecting header '([^']+)'/.exec(text) || [])[1] || "";
    this.denied = status === 401 || status === 403;
  }
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) || {};
  } catch {
    return {};
  }
}

export const access = { token: "", headers: {}, ...stored() };

/** A text that is another one for another caller. What was refused to a caller is not asked for again: an audit log has every refusal. */
export const caller = () => JSON.stringify(access);

/** Replaces what is known about the caller. */
export function allow(token, headers) {
  access.token = token;
  access.headers = headers;
  sessionStorage.setItem(KEY, JSON.stringify(access));
}

function headers(more) {
  const found = { ...access.headers, ...more };
  if (access.token) found.Authorization = `Bearer ${access.token}`;
  return found;
}

/** The answer to a request. Raises ApiError unless its status is below 300. */
export async function send(path, options = {}) {
  let answer;
  const url = path.startsWith(BASE) ? path : BASE + path;
  try {
    answer = await fetch(url, { ...options, headers: headers(options.headers), cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, error instanceof TypeError && /header|ISO-8859|ByteString/i.test(error.message) ? error.message : "the server cannot be reached");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    message = JSON.parse(text).error || text;
  } catch { /* not JSON: as it is */ }
  throw new ApiError(answer.status, message || `the server answered ${answer.status}`);
}

/** The JSON of a GET. */
export const get = async (path, options) => (await send(path, options)).json();

/** JSON in which whole numbers that a double cannot hold stay exact, as BigInt where the browser can. */
export const exact = (text) => JSON.parse(text, (key, value, context) => (
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source || "") ? BigInt(context.source) : value));

/** The JSON of a POST, null if the answer is empty. */
export async function post(path, document = {}) {
  const text = await (await send(path, { method: "POST", body: JSON.stringify(document), headers: { "Content-Type": "application/json" } })).text();
  return text ? JSON.parse(text) : null;
}

/** The path of a model or a version of it. */
export const modelPath = (name, version) => `/v2/models/${encodeURIComponent(name)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;
