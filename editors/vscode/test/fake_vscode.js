// As much of the `vscode` module as the extension uses: one document, its undo steps, and what was shown.
"use strict";

const Module = require("node:module");
const { contributes } = require("../package.json");

class Position {
  constructor(line, character) {
    Object.assign(this, { line, character });
  }
  translate(lines, characters) {
    return new Position(this.line + lines, this.character + characters);
  }
}

class Range {
  constructor(start, end) {
    Object.assign(this, { start, end });
  }
}

class Selection extends Range {
  get active() {
    return this.end;
  }
  get isEmpty() {
    return this.start.line === this.end.line && this.start.character === this.end.character;
  }
}

class Document {
  constructor(text) {
    Object.assign(this, { text, version: 1, undoSteps: [], eol: text.includes("\r\n") ? "\r\n" : "\n" });
  }
  getText() {
    return this.text;
  }
  change(text) {
    this.undoSteps.push(this.text);
    this.text = text.replaceAll("\r\n", "\n").replaceAll("\n", this.eol);
    this.version += 1;
  }
  lineAt(line) {
    const text = this.text.split(this.eol)[line];
    return { range: new Range(new Position(line, 0), new Position(line, text.length)) };
  }
  positionAt(offset) {
    const lines = this.text.slice(0, offset).split(this.eol);
    return new Position(lines.length - 1, lines.at(-1).length);
  }
  offsetAt({ line, character }) {
    const before = this.text.split(this.eol).slice(0, line);
    return before.reduce((sum, one) => sum + one.length + this.eol.length, 0) + character;
  }
}

class Editor {
  constructor(document, selection) {
    Object.assign(this, { document, selection, refuses: false });
  }
  async edit(callback) {
    if (this.refuses) {
      return false;
    }
    const { document } = this;
    callback({
      replace({ start, end }, text) {
        const [from, to] = [document.offsetAt(start), document.offsetAt(end)];
        document.change(document.text.slice(0, from) + text + document.text.slice(to));
      },
    });
    return true;
  }
}

const commands = new Map();
const state = { shown: [], input: "", settings: {}, editor: undefined };
const show = (kind) => (text) => state.shown.push([kind, text]);

const fake = {
  Position,
  Range,
  Selection,
  ProgressLocation: { Window: 10 },
  commands: {
    registerTextEditorCommand(name, callback) {
      commands.set(name, callback);
      return { dispose: () => commands.delete(name) };
    },
  },
  window: {
    showErrorMessage: show("error"),
    showWarningMessage: show("warning"),
    showInformationMessage: show("information"),
    showInputBox: async () => state.input,
    withProgress: (_, task) => task(),
  },
  workspace: {
    getConfiguration: (section) => ({
      // As VS Code does: what package.json has no setting for is undefined.
      get(name) {
        const setting = contributes.configuration.properties[`${section}.${name}`];
        return state.settings[name] ?? setting?.default;
      },
    }),
  },
};

const load = Module._load;
Module._load = (name, ...rest) => (name === "vscode" ? fake : load(name, ...rest));

/** Open a text with its cursor or selection, given as offsets. */
function open(text, from = 0, to = from) {
  const document = new Document(text);
  const selection = new Selection(document.positionAt(from), document.positionAt(to));
  Object.assign(state, { shown: [], input: "", settings: {}, editor: new Editor(document, selection) });
  return state;
}

/** Run a command as from the palette. */
function execute(name) {
  return commands.get(name)(state.editor, {});
}

module.exports = { commands, execute, open, state };
