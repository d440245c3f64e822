// The extension with a fake of `vscode`: what it sends, what it changes, and what it shows.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const { commands, execute, open } = require("./fake_vscode.js");
const { answering, edited, filled } = require("./scripted_server.js");
const extension = require("../src/extension.js");
const { contributes } = require("../package.json");

extension.activate({ subscriptions: [] });

test("every command is contributed, and no other", () => {
  assert.deepEqual([...commands.keys()].sort(), contributes.commands.map((one) => one.command).sort());
});

test("what says where text goes is no setting of a workspace", () => {
  for (const name of ["url", "key", "model", "before", "after", "region"]) {
    assert.equal(contributes.configuration.properties[`dgemma.${name}`].scope, "machine");
  }
});

test("the gap at the cursor is filled, with one undo step", () =>
  answering([filled("dog\nand")], async (url, seen) => {
    const text = "first\nEmma gave the  some wäter.\nlast";
    const { editor, shown, settings } = open(text, text.indexOf(" some"));
    settings.url = url;
    await execute("dgemma.fill");
    assert.equal(editor.document.text, "first\nEmma gave the dog\nand some wäter.\nlast");
    assert.deepEqual(editor.document.undoSteps, [text]);
    assert.deepEqual([editor.selection.active.line, editor.selection.active.character], [2, 3]);
    assert.deepEqual(shown, []);
    assert.equal(seen[0].path, "/infill");
    assert.deepEqual(seen[0].body, {
      model: "dgemma",
      input_prefix: "first\nEmma gave the ",
      input_suffix: " some wäter.\nlast",
      n_predict: 40,
    });
    assert.equal(seen[0].headers.authorization, undefined);
  }));

test("every mark is filled with those before it in sight, with one undo step", () =>
  answering(["1", "2\n2", "", "4"].map(filled), async (url, seen) => {
    const text = "a <FILL> b\r\nc <FILL>\r\n<FILL>d <FILL>";
    const { editor, settings } = open(text);
    settings.url = url;
    await execute("dgemma.fill");
    assert.equal(editor.document.text, "a 1 b\r\nc 2\r\n2\r\nd 4");
    assert.deepEqual(editor.document.undoSteps, [text]);
    assert.deepEqual(
      seen.map(({ body }) => [body.input_prefix, body.input_suffix]),
      [
        ["a ", " b\nc "],
        ["a 1 b\nc ", "\n"],
        ["a 1 b\nc 2\n2\n", "d "],
        ["a 1 b\nc 2\n2\nd ", ""],
      ],
    );
  }));

test("a selection is edited as told", () =>
  answering([edited("the one\nthe two")], async (url, seen) => {
    const text = "before\r\nteh one\r\nteh two\r\nafter";
    const state = open(text, text.indexOf("teh one"), text.indexOf("\r\nafter"));
    Object.assign(state.settings, { url: `${url}/`, key: "a key" });
    state.input = "Mend the words";
    await execute("dgemma.edit");
    assert.equal(state.editor.document.text, "before\r\nthe one\r\nthe two\r\nafter");
    assert.deepEqual(state.editor.document.undoSteps, [text]);
    assert.equal(seen[0].path, "/v1/edit/completions");
    assert.equal(seen[0].headers.authorization, "Bearer a key");
    assert.deepEqual(seen[0].body.messages, [
      {
        role: "user",
        content:
          "Mend the words\n<|current_file_content|>\nbefore\n<|code_to_edit|>\nteh one\nteh two\n" +
          "<|/code_to_edit|>\nafter<|/current_file_content|>",
      },
    ]);
  }));

test("without a selection the line of the cursor is edited; what is right is left alone", () =>
  answering([edited("b")], async (url, seen) => {
    const { editor, shown, settings } = open("a\nb\nc", 2);
    settings.url = url;
    await execute("dgemma.edit");
    assert.match(seen[0].body.messages[0].content, /<\|code_to_edit\|>\nb\n<\|\/code_to_edit\|>/);
    assert.deepEqual(shown, [["information", "dgemma: nothing to change"]]);
    assert.deepEqual(editor.document.undoSteps, []);
  }));

test("nothing is sent when the instruction is not given", () =>
  answering([], async (url, seen) => {
    const state = open("a");
    state.settings.url = url;
    state.input = undefined;
    await execute("dgemma.edit");
    assert.deepEqual([seen, state.shown], [[], []]);
  }));

test("of a large text only so much is sent, and no half character", () =>
  answering([filled("x")], async (url, seen) => {
    const text = `${"😀".repeat(5000)}\n\n${"😀".repeat(5000)}`;
    const { settings, shown, editor } = open(text, 10001);
    Object.assign(settings, { url, before: 4, after: 4, region: 6 });
    await execute("dgemma.fill");
    assert.deepEqual([seen[0].body.input_prefix, seen[0].body.input_suffix], ["😀\n", "\n😀"]);
    editor.selection = editor.document.lineAt(0).range;
    await execute("dgemma.edit");
    assert.deepEqual(shown, [
      ["error", "dgemma: the selection has 10000 characters; at most 6 are sent: select fewer"],
    ]);
    assert.equal(seen.length, 1);
  }));

test("a redirect is not followed", () =>
  answering([filled("stolen")], async (other, stolen) =>
    answering([{ status: 307, headers: { location: other } }], async (url) => {
      const { editor, shown, settings } = open("text");
      settings.url = url;
      await execute("dgemma.fill");
      assert.deepEqual(shown, [["error", `dgemma: no answer from ${url}: unexpected redirect`]]);
      assert.equal(editor.document.text, "text");
      assert.equal(stolen.length, 0);
    }),
  ));

test("a command ends the request of the one before", () =>
  answering([{ waits: true }, { waits: true }, filled("new")], async (url, seen, asked) => {
    const { editor, shown, settings } = open("text");
    settings.url = url;
    let arrived = asked();
    const first = execute("dgemma.fill");
    await arrived;
    arrived = asked();
    const second = execute("dgemma.fill");
    await first;
    await arrived;
    await execute("dgemma.fill");
    await second;
    assert.deepEqual(await Promise.all([seen[0].left, seen[1].left]), [true, true]);
    assert.equal(editor.document.text, "newtext");
    assert.deepEqual(shown, []);
  }));

test("an answer is given up after a while", () =>
  answering([{ waits: true }], async (url) => {
    const { shown, settings } = open("text");
    Object.assign(settings, { url, timeoutSeconds: 0.01 });
    await execute("dgemma.fill");
    assert.match(shown[0][1], /no answer from .*: The operation was aborted due to timeout/);
  }));

test("an answer for a text that was changed, or cannot be, is dropped", () =>
  answering([filled("x"), filled("x")], async (url) => {
    const { editor, shown, settings } = open("text");
    settings.url = url;
    const running = execute("dgemma.fill");
    editor.document.change("typed");
    await running;
    assert.equal(editor.document.text, "typed");
    editor.refuses = true;
    await execute("dgemma.fill");
    const dropped = ["warning", "dgemma: the text was changed in the meantime; the answer is dropped"];
    assert.deepEqual(shown, [dropped, dropped]);
  }));

for (const [answer, said] of [
  [{ status: 401, body: { error: { message: "No key." } } }, () => "No key."],
  [{ body: "<html>" }, (url) => `${url} answered with status 200, and not as dgemma does`],
  [{ body: { content: null } }, (url) => `${url} answered with status 200, and not as dgemma does`],
  [{ body: "null" }, (url) => `${url} answered with status 200, and not as dgemma does`],
  [{ status: 404 }, (url) => `${url} answered with status 404, and not as dgemma does`],
  [
    { body: " ".repeat(5_000_000) },
    (url) => `no answer from ${url}: the answer has more than 4194304 bytes`,
  ],
]) {
  test(`an error is a message and changes nothing: ${JSON.stringify(answer).slice(0, 60)}`, () =>
    answering([answer], async (url) => {
      const { editor, shown, settings } = open("a <FILL>");
      settings.url = url;
      await execute("dgemma.fill");
      assert.deepEqual(shown, [["error", `dgemma: ${said(url)}`]]);
      assert.equal(editor.document.text, "a <FILL>");
    }));
}

test("it is said when nobody listens, and when the address is none", async () => {
  const { shown, settings } = open("text");
  await answering([], async (url) => Object.assign(settings, { url }));
  await execute("dgemma.fill");
  assert.match(shown[0][1], /^dgemma: no answer from http:.*: connect ECONNREFUSED/);
  settings.url = "file:///etc/passwd";
  await execute("dgemma.fill");
  assert.equal(shown[1][1], "dgemma: dgemma.url is file:///etc/passwd; it must begin with http:// or https://");
});

test("a tag of the request in the text is refused", () =>
  answering([], async (url) => {
    for (const tag of ["<|cursor|>", "<|/code_to_edit|>", "<|recently_viewed_code_snippet|>"]) {
      const { shown, settings } = open(`text\n${tag}`);
      settings.url = url;
      await execute("dgemma.edit");
      assert.equal(shown[0][1], `dgemma: the text holds ${tag}, which is a tag of the request; remove it`);
    }
  }));

test("a request ends with the extension", () =>
  answering([{ waits: true }], async (url, seen, asked) => {
    const { shown, settings } = open("text");
    settings.url = url;
    const arrived = asked();
    const running = execute("dgemma.fill");
    await arrived;
    extension.deactivate();
    await running;
    assert.equal(await seen[0].left, true);
    assert.deepEqual(shown, []);
  }));
