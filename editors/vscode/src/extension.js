// Two commands: fill gaps, edit a selection.
"use strict";

const vscode = require("vscode");
const client = require("./client.js");
const { MARK, editMessage, head, tail, withPlainBreaks } = require("./texts.js");

/** The one request that runs. @type {AbortController | undefined} */
let running;

/** @param {vscode.ExtensionContext} context */
function activate(context) {
  context.subscriptions.push(
    vscode.commands.registerTextEditorCommand("dgemma.fill", (editor) => run(editor, fill)),
    vscode.commands.registerTextEditorCommand("dgemma.edit", (editor) => askAndEdit(editor)),
  );
}

function deactivate() {
  running?.abort();
}

function settings() {
  const found = vscode.workspace.getConfiguration("dgemma");
  /** @param {string} name */
  const text = (name) => /** @type {string} */ (found.get(name));
  /** @param {string} name */
  const number = (name) => /** @type {number} */ (found.get(name));
  return {
    url: text("url"),
    key: text("key"),
    model: text("model"),
    maxTokens: number("maxTokens"),
    before: number("before"),
    after: number("after"),
    region: number("region"),
    timeoutSeconds: number("timeoutSeconds"),
  };
}

/**
 * @typedef {object} Change
 * @property {number} from
 * @property {number} to
 * @property {string} text
 */

/**
 * Compute a change while the user goes on, and make it as one undo step if the text is still the same.
 * A second run ends the request of the first.
 * @param {vscode.TextEditor} editor
 * @param {(editor: vscode.TextEditor, signal: AbortSignal) => Promise<Change | undefined>} compute
 */
async function run(editor, compute) {
  running?.abort();
  const own = new AbortController();
  running = own;
  const { document } = editor;
  const version = document.version;
  try {
    const progress = { location: vscode.ProgressLocation.Window, title: "dgemma" };
    const change = await vscode.window.withProgress(progress, () => compute(editor, own.signal));
    if (own.signal.aborted || change === undefined) {
      return;
    }
    const range = new vscode.Range(document.positionAt(change.from), document.positionAt(change.to));
    if (document.version !== version || !(await editor.edit((edits) => edits.replace(range, change.text)))) {
      vscode.window.showWarningMessage(
        "dgemma: the text was changed in the meantime; the answer is dropped",
      );
      return;
    }
    const lines = change.text.split("\n");
    const last = /** @type {string} */ (lines.at(-1)).length;
    const end = range.start.translate(
      lines.length - 1,
      lines.length === 1 ? last : last - range.start.character,
    );
    editor.selection = new vscode.Selection(end, end);
  } catch (error) {
    if (!own.signal.aborted) {
      vscode.window.showErrorMessage(`dgemma: ${/** @type {Error} */ (error).message}`);
    }
  } finally {
    if (running === own) {
      running = undefined;
    }
  }
}

/**
 * Fill every <FILL>, each seeing those before it; without one, the gap at the cursor.
 * @param {vscode.TextEditor} editor
 * @param {AbortSignal} signal
 * @returns {Promise<Change>}
 */
async function fill(editor, signal) {
  const own = settings();
  const text = editor.document.getText();
  let pieces = text.split(MARK);
  if (pieces.length === 1) {
    const at = editor.document.offsetAt(editor.selection.active);
    pieces = [text.slice(0, at), text.slice(at)];
  }
  const [first = "", ...rest] = pieces;
  const to = text.length - /** @type {string} */ (rest.at(-1)).length;
  let before = withPlainBreaks(first);
  let found = "";
  for (const [number, piece] of rest.entries()) {
    const after = withPlainBreaks(piece);
    const gap = await client.fill(own, tail(before, own.before), head(after, own.after), signal);
    const added = number === rest.length - 1 ? gap : gap + after;
    before += added;
    found += added;
  }
  return { from: first.length, to, text: found };
}

/** @param {vscode.TextEditor} editor */
async function askAndEdit(editor) {
  const prompt = "What to change; empty: mend mistakes";
  const instruction = await vscode.window.showInputBox({ title: "dgemma", prompt });
  if (instruction !== undefined) {
    await run(editor, (_, signal) => edit(editor, instruction, signal));
  }
}

/**
 * Change the selection, or the line of the cursor.
 * @param {vscode.TextEditor} editor
 * @param {string} instruction
 * @param {AbortSignal} signal
 * @returns {Promise<Change | undefined>}
 */
async function edit(editor, instruction, signal) {
  const own = settings();
  const { document, selection } = editor;
  const range = selection.isEmpty ? document.lineAt(selection.active.line).range : selection;
  const from = document.offsetAt(range.start);
  const to = document.offsetAt(range.end);
  if (to - from > own.region) {
    throw new Error(
      `the selection has ${to - from} characters; at most ${own.region} are sent: select fewer`,
    );
  }
  const text = document.getText();
  const region = withPlainBreaks(text.slice(from, to));
  const message = editMessage(
    instruction,
    tail(withPlainBreaks(text.slice(0, from)), own.before),
    region,
    head(withPlainBreaks(text.slice(to)), own.after),
  );
  const found = await client.edit(own, message, signal);
  if (found === region) {
    vscode.window.showInformationMessage("dgemma: nothing to change");
    return undefined;
  }
  return { from, to, text: found };
}

module.exports = { activate, deactivate };
