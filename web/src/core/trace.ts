/** A trace: what every canvas of a request was after every step. Read line by line, as lines happen.
 * `docs/trace.md` describes the format. Every field is checked: a trace may come from anywhere. */

export const CENTINATS = 100;
const MAX_POSITIONS = 1 << 16;
const MAX_TOKENS = 1 << 22;

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type JsonObject = { [name: string]: Json };
/** A token and its log-probability. */
export type Candidate = readonly [number, number];

export interface TraceStep {
  canvas: number;
  step: number;
  atMs: number;
  argmax: number[];
  entropy: number[]; // hundredths of a nat
  accepted: Set<number>;
  drawn: Map<number, number>; // where an accepted token is not the argmax
  pinned: Set<number>;
  logprobs: Candidate[][] | null;
}

export interface TraceCommit {
  canvas: number;
  tokens: number[];
  steps: number;
  accepted: number | null; // verified: tokens after these are the causal pass's
}

export interface TraceAnswer {
  text: string;
  tokens: number[];
  finishReason: string;
  seconds: number;
}

/** A step or a commit, in the order in which they are shown, and when it came. */
export type Moment = { step: TraceStep; commit?: undefined; cameMs: number } | { commit: TraceCommit; step?: undefined; cameMs: number };

export interface TraceRequest {
  number: number;
  round: number;
  seed: number;
  prompt: number[];
  params: JsonObject;
  ends: Set<number>; // nothing after them is part of the answer
  fillers: Set<number>; // at its end they only fill up the canvas
  moments: Moment[];
  numSteps: number;
  answer: TraceAnswer | null;
}

export class TraceError extends Error {}

export class Trace {
  about: JsonObject = {};
  texts = new Map<number, string>();
  requests: TraceRequest[] = [];
  lines: JsonObject[] = []; // as they came
  isComplete = false;
  #last = new Map<number, TraceStep>(); // of each request

  /** cameMs: when the line came, since the request was sent. */
  add(value: unknown, cameMs = 0): void {
    const line = object(value, `line ${this.lines.length + 1}`);
    try {
      this.#add(line, cameMs);
    } catch (error) {
      if (error instanceof TraceError) throw new TraceError(`line ${this.lines.length + 1}: ${error.message}`);
      throw error;
    }
    this.lines.push(line);
  }

  #add(line: JsonObject, cameMs: number): void {
    if (this.isComplete) throw new TraceError("there is more after the end.");
    if (this.lines.length === 0) {
      if (line.format !== "dgemma-trace") throw new TraceError("this is not a trace.");
      if (line.version !== 1) throw new TraceError("the trace has another version than 1.");
      this.about = object(line.about, "about");
    } else if (line.texts !== undefined) {
      for (const [token, text] of Object.entries(object(line.texts, "texts"))) {
        if (typeof text !== "string") throw new TraceError("a token's text is not a text.");
        this.texts.set(whole(Number(token), MAX_TOKENS, "a token"), text);
      }
    } else if (line.request !== undefined) this.#addRequest(object(line.request, "request"));
    else if (line.step !== undefined) this.#addStep(object(line.step, "step"), cameMs);
    else if (line.commit !== undefined) this.#addCommit(object(line.commit, "commit"), cameMs);
    else if (line.answer !== undefined) this.#addAnswer(object(line.answer, "answer"));
    else if (line.end !== undefined) {
      if (object(line.end, "end").lines !== this.lines.length) throw new TraceError("some lines are missing.");
      this.isComplete = true;
    } else throw new TraceError("the line has no known name.");
  }

  #addRequest(own: JsonObject): void {
    if (own.number !== this.requests.length) throw new TraceError("requests are not in order.");
    const params = object(own.params ?? {}, "params");
    const ends = tokens(params.end_tokens ?? [1, 106], "end_tokens");
    this.requests.push({
      number: this.requests.length,
      round: whole(own.round ?? 0, 1 << 30, "round"),
      seed: typeof own.seed === "number" ? own.seed : 0,
      prompt: tokens(own.prompt ?? [], "prompt"),
      params,
      ends: new Set(params.ignore_end === true ? [] : ends),
      fillers: new Set(ends),
      moments: [],
      numSteps: 0,
      answer: null,
    });
  }

  #requestOf(own: JsonObject): TraceRequest {
    const found = this.requests[whole(own.request, 1 << 30, "request")];
    if (found === undefined) throw new TraceError("its request is missing.");
    return found;
  }

  #addStep(own: JsonObject, cameMs: number): void {
    const request = this.#requestOf(own);
    const canvas = whole(own.canvas, 1 << 30, "canvas");
    const last = this.#last.get(request.number);
    let argmax: number[];
    let pinned: Set<number>;
    if (own.argmax !== undefined) {
      argmax = tokens(own.argmax, "argmax");
      if (argmax.length > MAX_POSITIONS) throw new TraceError("a canvas is too long.");
      pinned = new Set(tokens(own.pinned ?? [], "pinned"));
    } else {
      if (last === undefined || last.canvas !== canvas) throw new TraceError("a canvas has no first step.");
      argmax = [...last.argmax];
      pinned = last.pinned;
      for (const [at, token] of pairs(own.changed ?? [], "changed")) {
        if (at >= argmax.length) throw new TraceError("a position is outside of its canvas.");
        argmax[at] = token;
      }
    }
    const entropy = numbers(own.entropy, "entropy");
    if (entropy.length !== argmax.length) throw new TraceError("entropy has another length than argmax.");
    const step: TraceStep = {
      canvas,
      step: whole(own.step, 1 << 30, "step"),
      atMs: typeof own.at_ms === "number" ? own.at_ms : 0,
      argmax,
      entropy,
      accepted: bits(own.accepted ?? "0", argmax.length),
      drawn: new Map(pairs(own.drawn ?? [], "drawn")),
      pinned,
      logprobs: own.logprobs == null ? null : candidates(own.logprobs),
    };
    this.#last.set(request.number, step);
    request.moments.push({ step, cameMs: cameMs || step.atMs });
    request.numSteps += 1;
  }

  #addCommit(own: JsonObject, cameMs: number): void {
    const request = this.#requestOf(own);
    const last = request.moments.at(-1);
    const commit: TraceCommit = {
      canvas: whole(own.canvas, 1 << 30, "canvas"),
      tokens: tokens(own.tokens, "tokens"),
      steps: whole(own.steps ?? 0, 1 << 30, "steps"),
      accepted: own.accepted == null ? null : whole(own.accepted, MAX_POSITIONS, "accepted"),
    };
    request.moments.push({ commit, cameMs: cameMs || (last?.cameMs ?? 0) });
  }

  #addAnswer(own: JsonObject): void {
    this.#requestOf(own).answer = {
      text: String(own.text ?? ""),
      tokens: tokens(own.tokens ?? [], "tokens"),
      finishReason: String(own.finish_reason ?? ""),
      seconds: typeof own.seconds === "number" ? own.seconds : 0,
    };
  }

  text(token: number): string {
    return this.texts.get(token) ?? `<${token}>`;
  }

  /** The request with most steps, then with most tokens: of a fill that which is worth watching.
   * wrote: of those that wrote this, if there are any. */
  longest(wrote = ""): TraceRequest | null {
    let found: TraceRequest | null = null;
    for (const request of this.requests) {
      if (request.moments.length === 0 || (wrote !== "" && !this.#written(request).includes(wrote))) continue;
      if (found === null || weight(request) > weight(found)) found = request;
    }
    return found ?? (wrote === "" ? (this.requests[0] ?? null) : this.longest());
  }

  #written(request: TraceRequest): string {
    return request.moments.map(({ commit }) => commit?.tokens.map((token) => this.text(token)).join("") ?? "").join("");
  }

  /** The content of a trace file. */
  toFile(): string {
    return this.lines.map((line) => `${JSON.stringify(line)}\n`).join("");
  }
}

function weight(request: TraceRequest): number {
  return request.numSteps * 1000 + request.moments.length;
}

/** A whole trace from the text of a file. */
export function readTrace(text: string): Trace {
  const trace = new Trace();
  let at = 0;
  for (const line of text.split("\n")) {
    at += 1;
    if (line.trim() === "") continue;
    let value: unknown;
    try {
      value = JSON.parse(line);
    } catch {
      throw new TraceError(at === 1 ? "this is not a trace." : `line ${at} is not JSON.`);
    }
    trace.add(value);
  }
  if (!trace.isComplete) throw new TraceError("the trace is incomplete: its end is missing.");
  return trace;
}

const MAX_FILE_BYTES = 64 << 20; // unpacked; a browser tab holds all of it

/** The text of a trace file, packed with gzip or plain. */
export async function readTraceFile(file: Blob): Promise<Trace> {
  const head = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  let stream: ReadableStream<Uint8Array<ArrayBuffer>> = file.stream();
  if (head[0] === 0x1f && head[1] === 0x8b) stream = stream.pipeThrough(new DecompressionStream("gzip"));
  const parts: Uint8Array<ArrayBuffer>[] = [];
  let size = 0;
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      size += value.length;
      if (size > MAX_FILE_BYTES) throw new TraceError("the trace is larger than 64 MB.");
      parts.push(value);
    }
  } catch (error) {
    if (error instanceof TraceError) throw error;
    throw new TraceError("the file is damaged.");
  } finally {
    void reader.cancel().catch(() => undefined);
  }
  return readTrace(await new Blob(parts).text());
}

function object(value: unknown, name: string): JsonObject {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new TraceError(`${name} is not an object.`);
  return value as JsonObject;
}

function whole(value: unknown, most: number, name: string): number {
  if (typeof value !== "number" || !Number.isInteger(value) || value < 0 || value > most) {
    throw new TraceError(`${name} is not a number from 0 to ${most}.`);
  }
  return value;
}

function numbers(value: unknown, name: string): number[] {
  if (!Array.isArray(value) || !value.every((item) => typeof item === "number")) throw new TraceError(`${name} is not a list of numbers.`);
  return value as number[];
}

function tokens(value: unknown, name: string): number[] {
  const found = numbers(value, name);
  for (const token of found) whole(token, MAX_TOKENS, name);
  return found;
}

function pairs(value: unknown, name: string): [number, number][] {
  const flat = tokens(value, name);
  if (flat.length % 2 !== 0) throw new TraceError(`${name} is not pairs.`);
  return Array.from({ length: flat.length / 2 }, (_, at) => [flat[2 * at]!, flat[2 * at + 1]!]);
}

/** Positions as bits of a hexadecimal number, position 0 the lowest. */
function bits(value: unknown, length: number): Set<number> {
  if (typeof value !== "string" || !/^[0-9a-f]+$/.test(value) || value.length > MAX_POSITIONS / 4) throw new TraceError("accepted is not a hexadecimal number.");
  const found = new Set<number>();
  for (let digit = 0; digit < value.length; digit += 1) {
    const four = Number.parseInt(value[value.length - 1 - digit]!, 16);
    for (let bit = 0; bit < 4; bit += 1) if (four & (1 << bit)) found.add(4 * digit + bit);
  }
  for (const at of found) if (at >= length) throw new TraceError("a position is outside of its canvas.");
  return found;
}

function candidates(value: unknown): Candidate[][] {
  if (!Array.isArray(value)) throw new TraceError("logprobs is not a list.");
  return value.map((row) => {
    if (!Array.isArray(row)) throw new TraceError("logprobs is not a list of lists.");
    return row.map((pair) => {
      const [token, logprob] = numbers(pair, "logprobs");
      if (token === undefined || logprob === undefined) throw new TraceError("logprobs has no pair.");
      return [whole(token, MAX_TOKENS, "a token"), logprob] as const;
    });
  });
}
