"""A text with blanks, filled one after another: each sees those that are filled and the text after it."""

import dgemma

TEXT = (
    "On Sunday Emma and Tom went to the <FILL>. It was so cold that Emma put on her <FILL>. "
    "In the evening <FILL> were tired but happy."
)


def main() -> None:
    lm = dgemma.load("bundled:text", dtype="float32")
    done, *rest = TEXT.split("<FILL>")
    while rest:
        done += lm.fill(done, rest[0], max_tokens=6, seed=1).text + rest.pop(0)
    print(done)


if __name__ == "__main__":
    main()
