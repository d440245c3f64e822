// With a real server, whose address and key are $DGEMMA_URL and $DGEMMA_KEY: `node --test test/with_server.js`.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const { execute, open } = require("./fake_vscode.js");
const extension = require("../src/extension.js");

const { DGEMMA_URL: url, DGEMMA_KEY: key } = process.env;
const GAP = "Emma had a little dog. Every morning Emma gave the do<FILL> some fresh water.";
const TYPOS = "Every mornign Emma gave the dog some fresh watter.";

extension.activate({ subscriptions: [] });

test("a gap is filled and a line is mended", async () => {
  const text = `${GAP}\n${TYPOS}`;
  const { editor, settings, shown } = open(text, text.length);
  Object.assign(settings, { url, key, maxTokens: 6, timeoutSeconds: 100 });
  await execute("dgemma.edit");
  await execute("dgemma.fill");
  assert.deepEqual(shown, []);
  assert.equal(
    editor.document.text,
    "Emma had a little dog. Every morning Emma gave the dog some fresh water.\n" +
      "Every morning Emma gave the dog some fresh water.",
  );
  assert.equal(editor.document.undoSteps.length, 2);
});

test("a wrong key is an error message", async () => {
  const { editor, settings, shown } = open(GAP);
  Object.assign(settings, { url, key: "wrong" });
  await execute("dgemma.fill");
  assert.equal(editor.document.text, GAP);
  assert.equal(shown.length, 1);
  assert.match(shown[0][1], /^dgemma: .*key/);
});
