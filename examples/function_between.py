"""Complete a function between two given ends: its head, and what follows it."""

import dgemma

BEFORE = """\
def read_lines(path):
    with open(path) as file:
        """
AFTER = """

def write_lines(path, lines):
    with open(path, "w") as file:
        file.writelines(lines)
"""


def main() -> None:
    lm = dgemma.load("bundled:text", dtype="float32")
    filled = lm.fill(BEFORE, AFTER, max_tokens=12, seed=1)
    print(BEFORE + filled.text + AFTER)
    for candidate in filled.candidates:
        print(f"# {candidate.log_likelihood:8.1f} {candidate.text!r}")


if __name__ == "__main__":
    main()
