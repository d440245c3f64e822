// What is sent of a text, and how. Knows nothing of the editor.
"use strict";

const MARK = "<FILL>";

// The server reads these as parts of the message of an edit, wherever they stand.
const TAG =
  /<\|(?:cursor|\/?(?:code_to_edit|current_file_content|edit_diff_history|recently_viewed_code_snippets?))\|>/;

/**
 * The last characters, without half of a surrogate pair.
 * @param {string} text
 * @param {number} most
 */
function tail(text, most) {
  const from = Math.max(0, text.length - most);
  return text.slice(isInsidePair(text, from) ? from + 1 : from);
}

/**
 * The first characters, without half of a surrogate pair.
 * @param {string} text
 * @param {number} most
 */
function head(text, most) {
  const to = Math.min(text.length, most);
  return text.slice(0, isInsidePair(text, to) ? to - 1 : to);
}

/** @param {string} text @param {number} at */
function isInsidePair(text, at) {
  return at > 0 && at < text.length && /^[\uD800-\uDBFF][\uDC00-\uDFFF]$/.test(text.slice(at - 1, at + 1));
}

/**
 * The line breaks of the model; those of the file are the editor's affair.
 * @param {string} text
 */
function withPlainBreaks(text) {
  return text.replaceAll("\r\n", "\n");
}

/**
 * The message of an edit.
 * @param {string} instruction
 * @param {string} before
 * @param {string} region
 * @param {string} after
 */
function editMessage(instruction, before, region, after) {
  const tag = TAG.exec([instruction, before, region, after].join("\n"));
  if (tag) {
    throw new Error(`the text holds ${tag[0]}, which is a tag of the request; remove it`);
  }
  return (
    `${instruction}\n<|current_file_content|>\n${before}` +
    `<|code_to_edit|>\n${region}\n<|/code_to_edit|>${after}<|/current_file_content|>`
  );
}

module.exports = { MARK, editMessage, head, tail, withPlainBreaks };
