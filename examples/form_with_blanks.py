"""A form with blanks, filled one after another: each sees those that are filled and the text after it."""

import dgemma

FORM = """\
Name: <FILL>
Language: Python
License: <FILL>
Description: This module provides <FILL> for reading and writing files.
"""


def main() -> None:
    lm = dgemma.load("bundled:text", dtype="float32")
    done, *rest = FORM.split("<FILL>")
    while rest:
        done += lm.fill(done, rest[0], max_tokens=6, seed=1).text + rest.pop(0)
    print(done)


if __name__ == "__main__":
    main()
