// A server that answers as it is told, and keeps what it was sent.
"use strict";

const http = require("node:http");
const { once } = require("node:events");

/** Each answer is `{status, body, headers}`, or `{waits: true}` until the client leaves. */
async function answering(answers, use) {
  const seen = [];
  const server = http.createServer(async (request, response) => {
    const parts = [];
    for await (const part of request) {
      parts.push(part);
    }
    const own = { path: request.url, headers: request.headers, body: JSON.parse(Buffer.concat(parts)) };
    own.left = once(response, "close").then(() => !response.writableFinished);
    seen.push(own);
    const { status = 200, body = "", headers = {}, waits = false } = answers.shift();
    if (!waits) {
      response.writeHead(status, headers).end(typeof body === "string" ? body : JSON.stringify(body));
    }
    server.emit("asked");
  });
  await once(server.listen(0, "127.0.0.1"), "listening");
  try {
    await use(`http://127.0.0.1:${server.address().port}`, seen, () => once(server, "asked"));
  } finally {
    server.closeAllConnections();
    server.close();
  }
}

const filled = (text) => ({ body: { content: text } });
const edited = (text) => ({ body: { choices: [{ message: { content: text } }] } });

module.exports = { answering, edited, filled };
