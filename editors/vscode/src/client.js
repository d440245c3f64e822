// One request to the server.
"use strict";

const MAX_ANSWER_BYTES = 4 * 1024 * 1024;

/**
 * @typedef {object} Server
 * @property {string} url
 * @property {string} key
 * @property {number} timeoutSeconds
 */

/**
 * Send a request; the answer as parsed JSON. A redirect is an error: text goes to the configured address alone.
 * @param {Server} server
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {Promise<any>}
 */
async function post(server, path, body, signal) {
  if (!/^https?:\/\//.test(server.url)) {
    throw new Error(`dgemma.url is ${server.url}; it must begin with http:// or https://`);
  }
  /** @type {Record<string, string>} */
  const headers = { "content-type": "application/json" };
  if (server.key !== "") {
    headers.authorization = `Bearer ${server.key}`;
  }
  let status, text;
  try {
    const response = await fetch(server.url.replace(/\/+$/, "") + path, {
      method: "POST",
      headers,
      body: JSON.stringify(body),
      redirect: "error",
      signal: AbortSignal.any([signal, AbortSignal.timeout(server.timeoutSeconds * 1000)]),
    });
    status = response.status;
    text = await readText(response);
  } catch (error) {
    throw new Error(`no answer from ${server.url}: ${reasonOf(error)}`);
  }
  const answer = parsed(text);
  if (status === 200 && answer !== undefined) {
    return answer;
  }
  const reason = answer?.error?.message;
  throw new Error(typeof reason === "string" ? reason : notOurs(server, status));
}

/**
 * @param {Server} server
 * @param {number} status
 */
function notOurs(server, status) {
  return `${server.url} answered with status ${status}, and not as dgemma does`;
}

/** @param {Response} response */
async function readText(response) {
  const parts = [];
  let bytes = 0;
  for await (const part of /** @type {AsyncIterable<Uint8Array>} */ (response.body ?? [])) {
    bytes += part.length;
    if (bytes > MAX_ANSWER_BYTES) {
      throw new Error(`the answer has more than ${MAX_ANSWER_BYTES} bytes`);
    }
    parts.push(part);
  }
  return Buffer.concat(parts).toString("utf8");
}

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** @param {unknown} error */
function reasonOf(error) {
  const { cause, message } = /** @type {Error & { cause?: Error }} */ (error);
  return cause?.message || message;
}

/**
 * Fill a gap.
 * @param {Server & { model: string, maxTokens: number }} server
 * @param {string} before
 * @param {string} after
 * @param {AbortSignal} signal
 * @returns {Promise<string>}
 */
async function fill(server, before, after, signal) {
  const body = {
    model: server.model,
    input_prefix: before,
    input_suffix: after,
    n_predict: server.maxTokens,
  };
  return textOf(server, (await post(server, "/infill", body, signal))?.content);
}

/**
 * Rewrite the region of a message.
 * @param {Server & { model: string }} server
 * @param {string} message
 * @param {AbortSignal} signal
 * @returns {Promise<string>}
 */
async function edit(server, message, signal) {
  const body = { model: server.model, messages: [{ role: "user", content: message }] };
  const answer = await post(server, "/v1/edit/completions", body, signal);
  return textOf(server, answer?.choices?.[0]?.message?.content);
}

/**
 * @param {Server} server
 * @param {unknown} found
 */
function textOf(server, found) {
  if (typeof found !== "string") {
    throw new Error(notOurs(server, 200));
  }
  return found;
}

module.exports = { edit, fill };
