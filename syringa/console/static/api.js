/**
 * The client of the server's API: the only module that calls fetch.
 *
 * Every failure is an `ApiError` with the server's message and request id. A server that cannot be reached sets
 * `connection` to "away"; it is asked for /health until it answers, and `reconnects` then counts one more, which
 * `useResource` waits for. A key that is refused makes `onUnauthorized` run.
 */

import { signal } from "./lib.js";

const BASE = new URL("./", document.baseURI);
const HEALTH_AWAY_MS = 1500;
const HEALTH_IDLE_MS = 10000;

/** @type {import("./vendor/signals.js").Signal<"online" | "away">} */
export const connection = signal("online");
/** How often the server came back since the page was opened. */
export const reconnects = signal(0);

let key = "";
/** @type {(error: ApiError) => void} */
let unauthorized = () => {};

/** A request that failed. `status` is 0 where the server could not be reached. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, param?: string | null, requestId?: string | null}} details
   */
  constructor(message, { status = 0, param = null, requestId = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.param = param;
    this.requestId = requestId;
  }
}

/** Set the API key that requests are sent with; "" for none. @param {string} value */
export function setKey(value) {
  key = value;
}

/** @param {(error: ApiError) => void} handler called when a key is refused (401) */
export function onUnauthorized(handler) {
  unauthorized = handler;
}

/** The server's address without a trailing slash, for examples of code. */
export function serverAddress() {
  return BASE.href.replace(/\/$/, "");
}

/** @param {unknown} error */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/**
 * @typedef {object} RequestOptions
 * @property {unknown} [body] sent as JSON; a FormData is sent as it is
 * @property {Record<string, string | number | boolean | null | undefined>} [query] without its empty values
 * @property {AbortSignal} [signal]
 */

/**
 * Send a request and return the response once its headers are there; raise ApiError unless it succeeded.
 * @param {string} method
 * @param {string} path such as "/v1/models"
 * @param {RequestOptions} [options]
 */
export async function send(method, path, options = {}) {
  const url = new URL(path.replace(/^\//, ""), BASE);
  for (const [name, value] of Object.entries(options.query ?? {})) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, String(value));
  }
  /** @type {Record<string, string>} */
  const headers = {};
  const sentWith = key;
  if (key) headers["authorization"] = `Bearer ${key}`;
  /** @type {BodyInit | undefined} */
  let body;
  if (options.body instanceof FormData) body = options.body;
  else if (options.body !== undefined) {
    headers["content-type"] = "application/json";
    body = JSON.stringify(options.body);
  }
  let response;
  try {
    response = await fetch(url, {
      method,
      headers,
      body,
      signal: options.signal ?? null,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (isAbort(error)) throw error;
    serverAway();
    throw new ApiError("The server cannot be reached.");
  }
  if (!isGateway(response.status)) serverThere();
  if (response.ok) return response;
  const failure = await readError(response);
  // A late answer to a key that is no longer in use says nothing of the one that is.
  if (response.status === 401 && sentWith === key) unauthorized(failure);
  throw failure;
}

/**
 * Send a request and return its decoded JSON body; undefined for an empty one.
 * @param {string} method @param {string} path @param {RequestOptions} [options]
 */
export async function call(method, path, options = {}) {
  const response = await send(method, path, options);
  try {
    const text = await response.text();
    return text ? JSON.parse(text) : undefined;
  } catch (error) {
    if (isAbort(error)) throw error;
    if (error instanceof SyntaxError) {
      throw new ApiError(`${path} did not return JSON.`, { status: response.status, requestId: requestId(response) });
    }
    serverAway();
    throw new ApiError("The connection to the server was lost.");
  }
}

/** @param {string} path @param {RequestOptions["query"]} [query] @param {RequestOptions} [options] */
export const get = (path, query, options) => call("GET", path, { ...options, query });
/** @param {string} path @param {unknown} [body] */
export const post = (path, body) => call("POST", path, { body });
/** @param {string} path @param {unknown} [body] */
export const put = (path, body) => call("PUT", path, { body });
/** @param {string} path @param {RequestOptions} [options] */
export const del = (path, options) => call("DELETE", path, options);

/**
 * Send a request and yield the decoded data of the server-sent events of the response. An error inside the stream
 * raises ApiError. Ends with the stream, or with AbortError by `options.signal`.
 * @param {string} method @param {string} path
 * @param {RequestOptions & {onResponse?: (response: Response) => void}} [options]
 */
export async function* stream(method, path, options = {}) {
  const response = await send(method, path, options);
  options.onResponse?.(response);
  const id = requestId(response);
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (isAbort(error)) throw error;
        serverAway();
        throw new ApiError("The connection was lost while the answer was streaming.", { requestId: id });
      }
      if (piece.done) return;
      buffer = (buffer + decoder.decode(piece.value, { stream: true })).replaceAll("\r\n", "\n");
      let end;
      let start = 0;
      while ((end = buffer.indexOf("\n\n", start)) >= 0) {
        const text = eventText(buffer.slice(start, end));
        start = end + 2;
        if (!text) continue;
        if (text === "[DONE]") return;
        const data = JSON.parse(text);
        if (data?.error && typeof data.error === "object" && !data.object) throw fromBody(data, 0, id);
        yield data;
      }
      buffer = buffer.slice(start);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Fetch a file with the session's key and save it.
 * @param {string} path @param {string} name @param {RequestOptions} [options]
 */
export async function download(path, name, options = {}) {
  const response = await send("GET", path, options);
  saveFile(await response.blob(), name);
}

/** Save text or a blob as a file. @param {Blob | string} content @param {string} name @param {string} [type] */
export function saveFile(content, name, type = "text/plain") {
  const url = URL.createObjectURL(typeof content === "string" ? new Blob([content], { type }) : content);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** The data of a server-sent event; "" for a comment. @param {string} block */
function eventText(block) {
  return block
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(line[5] === " " ? 6 : 5))
    .join("\n");
}

/** @param {Response} response */
function requestId(response) {
  return response.headers.get("x-request-id");
}

/** @param {Response} response */
async function readError(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not from this server, for example from a proxy: the status must do.
  }
  return fromBody(body, response.status, requestId(response));
}

/** @param {any} body @param {number} status @param {string | null} id */
function fromBody(body, status, id) {
  const error = body?.error;
  const message = typeof error === "string" ? error : error?.message;
  return new ApiError(message || `The server answered with status ${status}.`, {
    status,
    param: error?.param ?? null,
    requestId: body?.request_id ?? id,
  });
}

/** A proxy without a server behind it. @param {number} status */
function isGateway(status) {
  return status >= 502 && status <= 504;
}

function serverThere() {
  if (connection.value === "away") {
    connection.value = "online";
    reconnects.value += 1;
  }
}

function serverAway() {
  if (connection.value === "online") {
    connection.value = "away";
    checkHealth();
  }
}

/** Ask whether the server answers. */
export async function checkConnection() {
  await checkHealth();
  return connection.value === "online";
}

async function checkHealth() {
  clearTimeout(timer);
  try {
    await send("GET", "/health", { signal: AbortSignal.timeout(5000) });
  } catch (error) {
    if (!(error instanceof ApiError) || isGateway(error.status)) connection.value = "away";
  }
  clearTimeout(timer); // of a check that was started meanwhile
  timer = setTimeout(checkHealth, connection.value === "away" ? HEALTH_AWAY_MS : HEALTH_IDLE_MS);
}

let timer = setTimeout(checkHealth, HEALTH_IDLE_MS);
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (document.visibilityState === "visible") checkHealth();
});
