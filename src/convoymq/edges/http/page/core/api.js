// Requests to the HTTP API: paths with encoded names, the CSRF token, and errors of one line.

/** A refusal of the API, or a node out of reach (status 0). */
export class ApiError extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

let csrf = "";
let whenLoggedOut = () => {};

export const setCsrf = (token) => {
  csrf = token;
};
export const onLoggedOut = (act) => {
  whenLoggedOut = act;
};

/** Makes a path below /api: at`queues/${vhost}/${name}` encodes each name as one segment. */
export const at = (texts, ...names) =>
  texts.reduce((path, text, i) => path + encodeURIComponent(names[i - 1]) + text);

/** An exchange's name in a path: the default exchange has no name, which no path can have. */
export const exchangeInPath = (name) => name || "amq.default";

export const query = (params = {}) => {
  const given = Object.entries(params).filter(([, value]) => value != null && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
};

async function request(method, path, { params, body, signal, headers = {} } = {}) {
  let response;
  try {
    response = await fetch(`/api/${path}${query(params)}`, {
      method,
      signal,
      credentials: "same-origin",
      headers: {
        "X-Requested-With": "XMLHttpRequest",
        ...(method === "GET" ? {} : { "X-Convoy-CSRF": csrf }),
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "This node does not answer. It is tried again.");
  }
  const text = await response.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    if (response.ok) throw new ApiError(response.status, "The node's answer is not JSON.");
  }
  if (response.ok) return value;
  // Who lacks a permission is answered 401 as well; only a session that ended logs the user out.
  if (response.status === 401 && value?.reason === "Login failed") whenLoggedOut();
  throw new ApiError(response.status, reasonOf(response.status, value));
}

function reasonOf(status, value) {
  const reason = typeof value?.reason === "string" ? value.reason : "";
  if (status === 401 && (reason === "Not permitted" || !reason)) {
    return "You do not have the permission for this.";
  }
  if (status === 404 && (reason === "Not Found" || !reason)) return "It does not exist (any more).";
  return reason.split("\n")[0] || `The node answered with status ${status}.`;
}

export const get = (path, params, signal) => request("GET", path, { params, signal });
export const put = (path, body = {}) => request("PUT", path, { body });
export const post = (path, body = {}) => request("POST", path, { body });
export const del = (path, { params, headers, body } = {}) =>
  request("DELETE", path, { params, headers, body });

const NAMED = /^[0-9]+ [A-Z_]+ - /;
/** The reason without AMQP's code, for people. */
export const reason = (error) => String(error?.message ?? error).replace(NAMED, "");
