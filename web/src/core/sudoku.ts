/** The token format of the Sudoku model, and the rules. As `dgemma/sudoku/tokens.py`. */

const ROWS = "ABCDEFGHI";
export const EMPTY = ".";
export const ANSWER_LEN = 91;

/** Positions of the 81 cells in an answer. */
export const CELL_PLACES = Array.from({ length: 81 }, (_, cell) => 10 * Math.floor(cell / 9) + 1 + (cell % 9));

export function toText(cells: string): string {
  return [...ROWS].map((letter, row) => letter + cells.slice(9 * row, 9 * row + 9)).join("");
}

/** The 81 cells of an answer's text; `?` for a missing one. */
export function answeredCells(text: string): string {
  return [...ROWS]
    .map((letter) => {
      const from = text.indexOf(letter);
      const cells = from < 0 ? "" : (/^[.1-9]*/.exec(text.slice(from + 1, from + 10))?.[0] ?? "");
      return cells.padEnd(9, "?");
    })
    .join("");
}

/** Cells that have the same digit as another one of their row, column or box. */
export function conflicts(cells: string): Set<number> {
  const found = new Set<number>();
  for (const unit of UNITS) {
    for (const a of unit) for (const b of unit) if (a !== b && /[1-9]/.test(cells[a]!) && cells[a] === cells[b]) found.add(a);
  }
  return found;
}

export function solves(cells: string, clues: string): boolean {
  return /^[1-9]{81}$/.test(cells) && conflicts(cells).size === 0 && [...clues].every((clue, at) => clue === EMPTY || clue === cells[at]);
}

/** 81 cells out of what somebody typed or pasted; null if it has another number of cells. */
export function readCells(text: string): string | null {
  const cells = text.replace(/[^0-9._*x]/gi, "").replace(/[0_*x]/gi, EMPTY);
  return cells.length === 81 ? cells : null;
}

const nine = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const UNITS: number[][] = [
  ...nine.map((row) => nine.map((column) => 9 * row + column)),
  ...nine.map((column) => nine.map((row) => 9 * row + column)),
  ...nine.map((box) => nine.map((at) => 27 * Math.floor(box / 3) + 3 * (box % 3) + 9 * Math.floor(at / 3) + (at % 3))),
];
