/** Changes of a text, each of which may be taken or left. Places count characters, as Python does. */

export interface Change {
  start: number;
  stop: number;
  old: string;
  new: string;
  gain: number;
}

/** A piece of the text: unchanged, or one of the changes. */
export type Piece = { text: string; change?: undefined } | { change: number; text?: undefined };

export function pieces(text: string, changes: readonly Change[]): Piece[] {
  const chars = [...text];
  const found: Piece[] = [];
  let at = 0;
  changes.forEach((change, number) => {
    if (change.start > at) found.push({ text: chars.slice(at, change.start).join("") });
    found.push({ change: number });
    at = change.stop;
  });
  if (at < chars.length) found.push({ text: chars.slice(at).join("") });
  return found;
}

export function applied(text: string, changes: readonly Change[], isTaken: readonly boolean[]): string {
  return pieces(text, changes)
    .map((piece) => {
      if (piece.text !== undefined) return piece.text;
      const change = changes[piece.change]!;
      return isTaken[piece.change] ? change.new : change.old;
    })
    .join("");
}
