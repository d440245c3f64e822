import { expect, test } from "vitest";
import { applied, pieces } from "../src/core/changes";
import { grounded, makePrompt } from "../src/core/forms";
import { asCurl, asPython, literal } from "../src/core/snippets";
import { events } from "../src/core/sse";
import { answeredCells, CELL_PLACES, conflicts, readCells, solves, toText } from "../src/core/sudoku";

const SOLUTION = "548139627976542381213867945487695213639721854152483796861974532394256178725318469";

test("a form's prompt is that of the training", () => {
  expect(makePrompt("appointment", " Lunch with Ann Hill tomorrow at noon.\n", "2026-11-18")).toBe(
    "appointment 2026-11-18 wed\n1thu11-19 2fri11-20 3sat11-21 4sun11-22 5mon11-23 6tue11-24 7wed11-25\n\nLunch with Ann Hill tomorrow at noon.",
  );
  expect(makePrompt(null, "x", "2026-12-30")).toContain("record 2026-12-30 wed\n1thu12-31 2fri01-01");
});

test("verbatim strings are bound to the message, unless that is too much", () => {
  const schema = { properties: { name: { type: "string", "x-verbatim": true } } };
  expect(grounded(schema, "Ann")).toEqual({ properties: { name: { type: "string", "x-spanOf": "Ann" } } });
  expect(grounded(schema, "x".repeat(12_001))).toBe(schema);
});

test("a Sudoku is written with its row letters, and read back", () => {
  expect(toText(SOLUTION).slice(0, 12)).toBe("A548139627B9");
  expect(answeredCells(toText(SOLUTION))).toBe(SOLUTION);
  expect(answeredCells("A12").slice(0, 10)).toBe("12????????");
  expect(CELL_PLACES[9]).toBe(11);
  expect(solves(SOLUTION, ".".repeat(81))).toBe(true);
  expect(solves(SOLUTION, "9" + ".".repeat(80))).toBe(false);
  expect(conflicts("55" + ".".repeat(79))).toEqual(new Set([0, 1]));
  expect(readCells("0".repeat(81))).toBe(".".repeat(81));
  expect(readCells("12")).toBeNull();
});

test("changes count characters as Python does, and each may be left", () => {
  const text = "\u{1f600} functoin here";
  const changes = [{ start: 2, stop: 10, old: "functoin", new: "function", gain: 1 }];
  expect(applied(text, changes, [true])).toBe("\u{1f600} function here");
  expect(applied(text, changes, [false])).toBe(text);
  expect(pieces(text, changes).length).toBe(3);
});

test("a request becomes a command and a program, and no quote ends it", () => {
  const request = { base: "/text", path: "/v1/completions", body: { prompt: "it's\n\u202e\u{1f600}", stream: true, seed: null, n: [true] } };
  expect(asCurl(request, "http://h", true)).toContain("it'\\''s");
  expect(asCurl(request, "http://h", true)).toContain("$DGEMMA_API_KEY");
  const program = asPython(request, "http://h", false);
  expect(program).toContain('"prompt": "it\'s\\n\\U0000202e\u{1f600}"');
  expect(program).toContain('"stream": True, "seed": None, "n": [True]');
  expect(program).not.toContain("environ");
  expect(literal({ a: 1.5 })).toBe('{"a": 1.5}');
});

test("events come whole, however the bytes are cut, and comments are skipped", async () => {
  const bytes = new TextEncoder().encode(': waiting\n\ndata: {"a":"\u{1f600}"}\n\ndata: [DONE]\n\n');
  const body = new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
      controller.close();
    },
  });
  const found: string[] = [];
  for await (const data of events(body)) found.push(data);
  expect(found).toEqual(['{"a":"\u{1f600}"}', "[DONE]"]);
});
