/** What the page knows for as long as it is open: the key, and what a screen reader shall say. */

import type { JsonObject } from "./trace";

export type Mode = "chat" | "fill" | "edit" | "decide" | "forms" | "sudoku" | "canvas" | "race" | "trace";

export interface Model {
  base: string;
  name: string;
  modes: Mode[];
  traces: boolean;
  canvas_len: number;
  note: string;
}

export interface Facts {
  version: string;
  models: Model[];
  record_types: { [name: string]: JsonObject };
  trained_on_record_types: boolean;
  puzzles: { band: string; clues: string }[];
}

/** key: in memory only; a reload forgets it. */
export const session = $state({ key: "", announcement: "" });

export function headers(): Record<string, string> {
  return session.key === "" ? {} : { authorization: `Bearer ${session.key}` };
}

const WAIT_MS = 1200;
let waiting = "";
let timer: ReturnType<typeof setTimeout> | undefined;

/** Have a screen reader say what was committed. Drafts are never said; tokens that come fast are joined. */
export function announce(text: string): void {
  waiting += text;
  timer ??= setTimeout(() => {
    session.announcement = waiting.slice(-2000);
    waiting = "";
    timer = undefined;
  }, WAIT_MS);
}

export class KeyNeeded extends Error {}

export async function fetchFacts(): Promise<Facts> {
  const response = await fetch("/playground.json", { headers: headers() });
  if (response.status === 401) throw new KeyNeeded();
  if (!response.ok) throw new Error(`the server says ${response.status}.`);
  return (await response.json()) as Facts;
}
