import { expect, test } from "vitest";
import { figuresOf, frameAt, historyOf } from "../src/core/frames";
import { readTrace, readTraceFile, TraceError } from "../src/core/trace";

const HEAD = { format: "dgemma-trace", version: 1, about: {} };
const TEXTS = { texts: { "10": "The", "11": " sea", "12": " sky", "1": "<eos>", "13": "\n" } };
const REQUEST = { request: { number: 0, round: 0, row: 0, seed: 1, prompt: [], params: { logprobs: 2 } } };
const STEPS = [
  { step: { request: 0, canvas: 0, step: 1, at_ms: 5, argmax: [10, 12, 1, 1], entropy: [5, 250, 60, 1], accepted: "1", pinned: [0] } },
  { step: { request: 0, canvas: 0, step: 2, at_ms: 9, changed: [1, 11], entropy: [0, 30, 20, 1], accepted: "f", drawn: [1, 12], logprobs: [[[10, 0]], [[11, -0.5], [12, -1]], [], []] } },
];
const COMMIT = { commit: { request: 0, canvas: 0, tokens: [10, 11, 1], steps: 2 } };
const ANSWER = { answer: { request: 0, text: "The sea", tokens: [10, 11, 1], finish_reason: "stop", seconds: 0.5 } };

function file(...lines: unknown[]): string {
  return [...lines, { end: { lines: lines.length } }].map((line) => JSON.stringify(line)).join("\n");
}
const WHOLE = file(HEAD, TEXTS, REQUEST, ...STEPS, COMMIT, ANSWER);

test("frames have the tokens, how sure they are, and what changed", () => {
  const trace = readTrace(WHOLE);
  const request = trace.requests[0]!;
  const first = frameAt(trace, request, 0);
  expect(first.cells.map((cell) => [cell.text, cell.level, cell.state])).toEqual([["The", 0, "pinned"], [" sky", 3, "noise"]]);
  expect(first.title).toBe("canvas 1, step 1, 50 % sure");
  const second = frameAt(trace, request, 1);
  expect(second.cells.map((cell) => [cell.text, cell.level, cell.isChanged])).toEqual([["The", 0, false], [" sea", 1, true]]);
  const last = frameAt(trace, request, 2);
  expect(last.cells.map((cell) => cell.text).join("")).toBe("The sea");
  expect(last.isCommit).toBe(true);
});

test("a position has a history, with alternatives", () => {
  const trace = readTrace(WHOLE);
  const history = historyOf(trace, trace.requests[0]!, 0, 1);
  expect(history.map((one) => [one.first, one.last, one.text, one.note])).toEqual([[1, 1, " sky", "not accepted"], [2, 2, " sea", "final"]]);
  expect(history[1]!.alternatives.map((one) => one.text)).toEqual([" sea", " sky"]);
});

test("figures count tokens, steps, forwards and revisions", () => {
  expect(figuresOf(readTrace(WHOLE))).toEqual({ tokens: 3, steps: 2, forwards: 2, requests: 1, revisions: 1 });
});

test("left to right, the text grows by a token", () => {
  const tokens = [10, 11].map((token, canvas) => ({ commit: { request: 0, canvas, tokens: [token] } }));
  const trace = readTrace(file(HEAD, TEXTS, REQUEST, ...tokens));
  const frame = frameAt(trace, trace.requests[0]!, 1);
  expect(frame.cells.map((cell) => [cell.text, cell.isEarlier])).toEqual([["The", true], [" sea", false]]);
  expect(figuresOf(trace).forwards).toBe(2);
});

test("what fills up the canvas of a gap is left out", () => {
  const request = { request: { ...REQUEST.request, params: { ignore_end: true } } };
  const trace = readTrace(file(HEAD, TEXTS, request, STEPS[0]));
  expect(frameAt(trace, trace.requests[0]!, 0).cells.length).toBe(2);
});

test("a file is written as it was read, packed or plain", async () => {
  expect(readTrace(readTrace(WHOLE).toFile()).requests[0]!.answer!.text).toBe("The sea");
  const packed = new Blob([WHOLE]).stream().pipeThrough(new CompressionStream("gzip"));
  const read = await readTraceFile(await new Response(packed).blob());
  expect(read.requests.length).toBe(1);
  expect((await readTraceFile(new Blob([WHOLE]))).isComplete).toBe(true);
});

test.each([
  ["", "incomplete"],
  ["not json", "not a trace"],
  ['{"format": "other"}', "not a trace"],
  [file(HEAD).split("\n")[0]!, "end is missing"],
  [WHOLE.replace('"lines":7', '"lines":6'), "missing"],
  [file(HEAD, { step: { request: 0 } }), "request is missing"],
  [file(HEAD, REQUEST, { step: { ...STEPS[0]!.step, entropy: [1] } }), "another length"],
  [file(HEAD, REQUEST, { step: { ...STEPS[0]!.step, accepted: "1f" } }), "outside"],
  [file(HEAD, REQUEST, { step: { ...STEPS[0]!.step, accepted: "<b>" } }), "hexadecimal"],
  [file(HEAD, REQUEST, { step: { ...STEPS[0]!.step, argmax: [-1, 1, 1, 1] } }), "argmax"],
  [file(HEAD, REQUEST, STEPS[0], { step: { ...STEPS[1]!.step, changed: [9, 1] } }), "outside"],
  [file(HEAD, REQUEST, STEPS[1]), "no first step"],
  [file(HEAD, { texts: { "1": 5 } }), "not a text"],
  [file(HEAD, { texts: [] }), "not an object"],
  [file(HEAD, { unknown: 1 }), "no known name"],
])("a broken trace is refused: %#", (text, why) => {
  expect(() => readTrace(text)).toThrow(TraceError);
  expect(() => readTrace(text)).toThrow(why);
});

test("a damaged file is refused", async () => {
  await expect(readTraceFile(new Blob([new Uint8Array([0x1f, 0x8b, 1, 2, 3])]))).rejects.toThrow("damaged");
});
