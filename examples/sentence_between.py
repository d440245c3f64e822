"""Complete a text between two given ends: its beginning, and what follows."""

import dgemma

BEFORE = "Emma had a little dog. Every morning Emma gave the"
AFTER = " some fresh water. When Emma came home, the dog was already waiting."


def main() -> None:
    lm = dgemma.load("bundled:text", dtype="float32")
    filled = lm.fill(BEFORE, AFTER, max_tokens=12, seed=1)
    print(BEFORE + filled.text + AFTER)
    for candidate in filled.candidates:
        print(f"# {candidate.log_likelihood:8.1f} {candidate.text!r}")


if __name__ == "__main__":
    main()
