/** A model's text where it must not act: control, format and bidirectional characters become visible signs.
 * The same as `dgemma/trace/visible.py`. */

export const MAX_CHARS = 60;
const SIGNS: Record<string, string> = { "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d" };
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/u;
const SPACE = /\p{Zs}/u;
const MARK = /\p{M}/u;
const MAX_MARKS = 2; // combining marks on one character; more would cover neighbours

/** The text in one line, every character of it to be seen; a long one is cut. */
export function visible(text: string, most: number = MAX_CHARS): string {
  const found: string[] = [];
  let marks = 0;
  for (const char of text) {
    marks = MARK.test(char) ? marks + 1 : 0;
    if (marks > MAX_MARKS) continue;
    if (found.length >= most) {
      found.push("\u2026");
      break;
    }
    found.push(sign(char));
  }
  return found.join("");
}

/** A text of several lines: line ends and tabs stay, all else that would act is shown. */
export function visibleLines(text: string, most: number = 100_000): string {
  const found: string[] = [];
  let marks = 0;
  for (const char of text) {
    marks = MARK.test(char) ? marks + 1 : 0;
    if (marks > MAX_MARKS) continue;
    if (found.length >= most) {
      found.push("\u2026");
      break;
    }
    found.push(char === "\n" || char === "\t" ? char : sign(char));
  }
  return found.join("");
}

function sign(char: string): string {
  const known = SIGNS[char];
  if (known !== undefined) return known;
  if (HIDDEN.test(char)) {
    const code = char.codePointAt(0) ?? 0;
    return code < 32 ? String.fromCodePoint(0x2400 + code) : "\ufffd";
  }
  return SPACE.test(char) ? " " : char;
}
