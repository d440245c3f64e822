"""A chat bot: it streams its answers, canvas by canvas, and knows what was said before."""

import sys

import dgemma

RECENT = 9  # messages that the model sees: four questions with their answers, and the new one


def main(model: str = "bundled:text") -> None:
    lm, history = dgemma.load(model), list[dict[str, str]]()
    for line in sys.stdin:
        history.append({"role": "user", "content": line.strip()})
        answer = ""
        for event in lm.stream_chat(history[-RECENT:], max_tokens=128, drafts=False):
            if isinstance(event, dgemma.Commit):
                answer += event.text
                print(event.text, end="", flush=True)
        history.append({"role": "assistant", "content": answer})
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
