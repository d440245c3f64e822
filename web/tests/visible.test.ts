import { expect, test } from "vitest";
import { visible, visibleLines } from "../src/core/visible";

test("controls, bidirectional and zero-width characters become signs", () => {
  expect(visible("a\nb\tc\r")).toBe("a\u21b5b\u21e5c\u240d");
  expect(visible("\x1b[31m\x00")).toBe("\u241b[31m\u2400");
  expect(visible("\u202eabc\u200b\u2066\ufeff\x7f\x85")).toBe("\ufffdabc\ufffd\ufffd\ufffd\ufffd\ufffd");
  expect(visible("\ud800")).toBe("\ufffd");
  expect(visible("a\u00a0b\u2003c")).toBe("a b c");
});

test("marks cover no neighbours, and a long token is cut", () => {
  expect(visible("e" + "\u0301".repeat(9))).toBe("e\u0301\u0301");
  expect(visible("x".repeat(100))).toBe("x".repeat(60) + "\u2026");
  expect([...visible("\u{1f600}".repeat(61))].length).toBe(61);
});

test("a text of lines keeps its lines and nothing else that acts", () => {
  expect(visibleLines("a\n\tb\x1b\u202e")).toBe("a\n\tb\u241b\ufffd");
  expect(visibleLines("abcdef", 3)).toBe("abc\u2026");
});

test("markup stays what it is: text", () => {
  expect(visible("<b>&amp;</b>")).toBe("<b>&amp;</b>");
});
