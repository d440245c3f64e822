"""Close a Markdown table: the row that is missing between those that stand."""

import dgemma

BEFORE = """\
| Option | Meaning |
|--------|---------|
| `-h`   | show this help |
| `-o`   |"""
AFTER = """ |
| `-v`   | show the version |
"""


def main() -> None:
    lm = dgemma.load("bundled:text", dtype="float32")
    filled = lm.fill(BEFORE, AFTER, max_tokens=8, seed=1)
    print(BEFORE + filled.text + AFTER)


if __name__ == "__main__":
    main()
