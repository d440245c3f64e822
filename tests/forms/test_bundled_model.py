"""The bundled model finds what messages say: if it does not, loading or sampling is at fault."""

from __future__ import annotations

from dgemma.loading import load
from recipes.forms.messages import make_message

COUNT = 12


def test_most_fields_of_held_out_messages_are_right_in_few_steps() -> None:
    lm = load("bundled:forms", dtype="float32")
    right = total = steps = 0
    for number in range(COUNT):
        message = make_message("values", number, seed=1)
        found = lm.extract(message.text, message.type, today=message.today, seed=0)
        right += sum(found.record[key] == value for key, value in message.record.items())
        total += len(message.record)
        steps += found.answer.forwards
    assert right > 0.8 * total
    assert steps < 6 * COUNT
