"""A protein-like sequence with a motif at fixed positions.

The model knows nothing of proteins: what is shown is the shape. Motif positions are fixed, all others are
limited to the letters of amino acids, and the model chooses among them.
"""

import dgemma

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
LENGTH = 32
MOTIF = {8: "C", 11: "C", 20: "H", 24: "H"}  # a zinc finger's: C-x2-C, H-x3-H


def main() -> None:
    lm = dgemma.load("bundled:text", dtype="float32")
    letters = {letter: lm.tokenizer.encode(letter)[0] for letter in AMINO_ACIDS}
    pins: dict[int, int | list[int]] = {}
    for position in range(LENGTH):
        motif = MOTIF.get(position)
        pins[position] = sorted(letters.values()) if motif is None else letters[motif]
    answer = lm.generate("Sequence: ", max_tokens=LENGTH, pins=pins, seed=1)
    print(answer.text)
    print("".join("^" if position in MOTIF else " " for position in range(LENGTH)))
    assert all(answer.text[position] == letter for position, letter in MOTIF.items())
    assert set(answer.text) <= set(AMINO_ACIDS)


if __name__ == "__main__":
    main()
