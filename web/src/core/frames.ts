/** A trace as a sequence of pictures: what stands at each position after each moment, and how sure it is.
 * The same as `dgemma/trace/frames.py`, and the text of earlier canvases before it. */

import { CENTINATS, type Candidate, type Trace, type TraceRequest } from "./trace";
import { visible } from "./visible";

export type State = "noise" | "accepted" | "pinned" | "final" | "corrected";
/** At most so many nats: sure, likely, unsure; above: open. ln 2 is a toss-up between two tokens. */
export const LIMITS = [0.1, 0.7, 2.0] as const;
export const LEVEL_NAMES = ["sure", "likely", "unsure", "open"] as const;

export interface Cell {
  canvas: number;
  at: number; // its position
  token: number;
  text: string; // as it is shown
  nats: number;
  level: number; // from 0, sure, to 3, open
  state: State;
  isChanged: boolean; // another token than after the step before
  endsLine: boolean;
  isEarlier: boolean; // of a canvas before the one that is shown
}

export interface Frame {
  cells: Cell[];
  title: string;
  canvas: number;
  isCommit: boolean;
  sure: number; // share of the canvas, from 0 to 1
}

export function levelOf(nats: number): number {
  return LIMITS.reduce((level, limit) => level + (nats > limit ? 1 : 0), 0);
}

export function frameAt(trace: Trace, request: TraceRequest, index: number): Frame {
  const moment = request.moments[index];
  const cells: Cell[] = [];
  for (let at = 0; at < index; at += 1) {
    const commit = request.moments[at]!.commit;
    if (commit !== undefined) cells.push(...committed(trace, request, commit.canvas, commit.tokens, commit.accepted, true));
  }
  if (moment === undefined) return { cells, title: "nothing yet", canvas: 0, isCommit: false, sure: 0 };
  if (moment.commit !== undefined) {
    const { canvas, tokens, accepted, steps } = moment.commit;
    const own = committed(trace, request, canvas, tokens, accepted, false);
    const corrected = own.some((cell) => cell.state === "corrected");
    let title = `canvas ${canvas + 1}, final${steps > 0 ? `, ${count(steps, "step")}` : ""}`;
    if (corrected) title = `canvas ${canvas + 1}, verified: ${accepted} accepted, 1 by the causal pass`;
    else if (steps === 0 && !hasSteps(request)) title = `token ${cells.length + own.length}, left to right`;
    return { cells: [...cells, ...own], title, canvas, isCommit: true, sure: 1 };
  }
  const { step } = moment;
  const before = request.moments[index - 1]?.step;
  const last = before !== undefined && before.canvas === step.canvas ? before : undefined;
  const own: Cell[] = [];
  const length = withoutFillers(request, step.argmax);
  for (let at = 0; at < length; at += 1) {
    const token = step.argmax[at]!;
    if (request.ends.has(token)) break; // nothing after the end is part of the answer
    const state: State = step.pinned.has(at) ? "pinned" : step.accepted.has(at) ? "accepted" : "noise";
    const isChanged = last !== undefined && last.argmax[at] !== token;
    own.push(made(trace, step.canvas, at, token, step.entropy[at]! / CENTINATS, state, isChanged, false));
  }
  const sure = own.length === 0 ? 1 : own.filter((cell) => cell.level === 0).length / own.length;
  const title = `canvas ${step.canvas + 1}, step ${step.step}, ${Math.round(100 * sure)} % sure`;
  return { cells: [...cells, ...own], title, canvas: step.canvas, isCommit: false, sure };
}

/** A gap's canvas goes on past its text: what fills it up to its end says nothing. */
function withoutFillers(request: TraceRequest, tokens: number[]): number {
  return tokens.findLastIndex((token) => !request.fillers.has(token)) + 1;
}

function hasSteps(request: TraceRequest): boolean {
  return request.numSteps > 0;
}

function committed(trace: Trace, request: TraceRequest, canvas: number, tokens: number[], accepted: number | null, isEarlier: boolean): Cell[] {
  const cells: Cell[] = [];
  tokens.slice(0, withoutFillers(request, tokens)).forEach((token, at) => {
    if (request.ends.has(token)) return;
    const state: State = accepted !== null && at >= accepted ? "corrected" : "final";
    cells.push(made(trace, canvas, at, token, 0, state, false, isEarlier));
  });
  return cells;
}

function made(trace: Trace, canvas: number, at: number, token: number, nats: number, state: State, isChanged: boolean, isEarlier: boolean): Cell {
  const text = visible(trace.text(token));
  const level = levelOf(nats);
  // A line's end that is at least likely: others come and go with each step.
  return { canvas, at, token, text, nats, level, state, isChanged, endsLine: text.endsWith("\u21b5") && level < 2, isEarlier };
}

/** What stood at a position, from step to step: one entry for each change. */
export interface Stretch {
  first: number;
  last: number;
  text: string;
  nats: number; // at its last step
  note: string;
  alternatives: { text: string; probability: number }[];
}

export function historyOf(trace: Trace, request: TraceRequest, canvas: number, at: number): Stretch[] {
  const found: Stretch[] = [];
  let token = -1;
  for (const moment of request.moments) {
    const { step, commit } = moment;
    if (step !== undefined && step.canvas === canvas && at < step.argmax.length) {
      const now = step.argmax[at]!;
      const note = step.pinned.has(at) ? "pinned" : step.accepted.has(at) ? "accepted" : "not accepted";
      const nats = step.entropy[at]! / CENTINATS;
      const alternatives = named(trace, step.logprobs?.[at] ?? []);
      const last = found.at(-1);
      if (last !== undefined && now === token) Object.assign(last, { last: step.step, nats, note, alternatives });
      else found.push({ first: step.step, last: step.step, text: spaced(trace.text(now)), nats, note, alternatives });
      token = now;
    } else if (commit !== undefined && commit.canvas === canvas && at < commit.tokens.length) {
      const now = commit.tokens[at]!;
      const last = found.at(-1);
      if (last !== undefined && now === token) last.note = "final";
      else {
        const note = commit.accepted !== null ? "by the causal pass" : last === undefined ? "left to right" : "final, drawn";
        found.push({ first: commit.steps, last: commit.steps, text: spaced(trace.text(now)), nats: 0, note, alternatives: last?.alternatives ?? [] });
      }
    }
  }
  return found;
}

/** The entropies of a position, step by step, in nats. */
export function natsOf(request: TraceRequest, canvas: number, at: number): number[] {
  return request.moments.flatMap(({ step }) =>
    step !== undefined && step.canvas === canvas && at < step.entropy.length ? [step.entropy[at]! / CENTINATS] : [],
  );
}

/** A token alone: of one that is nothing but spaces, each is to be seen. */
function spaced(text: string): string {
  const shown = visible(text);
  return shown.trim() === "" ? shown.replaceAll(" ", "\u2423") : shown;
}

function named(trace: Trace, row: Candidate[]): { text: string; probability: number }[] {
  return row.map(([token, logprob]) => ({ text: spaced(trace.text(token)), probability: Math.exp(logprob) }));
}

export interface Figures {
  tokens: number;
  steps: number;
  forwards: number;
  requests: number;
  revisions: number; // changes of a position's argmax after the first step
}

export function figuresOf(trace: Trace): Figures {
  const found: Figures = { tokens: 0, steps: 0, forwards: 0, requests: trace.requests.length, revisions: 0 };
  for (const request of trace.requests) {
    let before: { canvas: number; argmax: number[] } | undefined;
    found.steps += request.numSteps;
    found.forwards += request.numSteps;
    for (const { step, commit } of request.moments) {
      if (commit !== undefined) {
        found.tokens += commit.tokens.length;
        if (request.numSteps === 0) found.forwards += 1;
      } else {
        if (before !== undefined && before.canvas === step.canvas) {
          const old = before.argmax;
          found.revisions += step.argmax.reduce((sum, token, at) => sum + (old[at] !== token ? 1 : 0), 0);
        }
        before = step;
      }
    }
  }
  return found;
}

export function count(number: number, word: string): string {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}
