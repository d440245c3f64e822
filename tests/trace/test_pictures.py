"""Whatever a model writes is shown as text: in a terminal, in SVG, in PNG and GIF."""

from __future__ import annotations

import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dgemma import LanguageModel
from dgemma.cli.views.trace_player import TracePlayer, screen
from dgemma.engine.request import EngineRequest
from dgemma.params import GenerationParams
from dgemma.trace.frames import make_frames
from dgemma.trace.picture import write_gif, write_png
from dgemma.trace.svg import chosen_frames, to_svg
from dgemma.trace.trace import Trace, TraceCommit, TraceRequest, TraceStep
from dgemma.trace.visible import visible
from hostile_texts import hostile_texts

ACTIVE = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")


def trace_of(texts: list[str]) -> Trace:
    tokens = tuple(range(10, 10 + len(texts)))
    step = TraceStep(
        canvas=0,
        step=1,
        at_ms=1.0,
        argmax=tokens,
        entropy=tuple(40 * at for at in range(len(tokens))),
        accepted=(0,),
        drawn=(10,),
    )
    request = TraceRequest(
        round=0,
        request=EngineRequest(prompt=(2,), seed=1, params=GenerationParams()),
        steps=(step,),
        commits=(TraceCommit(canvas=0, tokens=tokens, steps=1, accepted=0),),
    )
    return Trace(requests=(request,), texts=dict(zip(tokens, texts, strict=True)))


@pytest.mark.parametrize("text", hostile_texts(), ids=map(str, range(200)))
def test_hostile_text_is_shown_as_text(text: str) -> None:
    shown = visible(text)
    assert len(shown) <= 3 * 60 + 1
    assert not any(unicodedata.category(char) in ACTIVE for char in shown)
    trace = trace_of([text, "plain"])
    frames = make_frames(trace, trace.requests[0])
    drawing = ElementTree.fromstring(to_svg(frames))  # noqa: S314  (our own)
    kinds = {element.tag.removeprefix("{http://www.w3.org/2000/svg}") for element in drawing.iter()}
    assert kinds <= {"svg", "title", "style", "text", "rect"}
    written = "".join(element.text or "" for element in drawing.iter() if element.tag.endswith("text"))
    assert visible(text).strip() in written or not visible(text).strip()
    for element in drawing.iter():
        assert not any(name.startswith("on") for name in element.attrib)
    terminal = screen(TracePlayer(frames), 80, 24, encoding="utf-8")
    allowed = {"H", "J", "K", "m", "h", "l"}
    for part in terminal.split("\x1b")[1:]:
        assert part[0] == "["
        end = next(at for at, char in enumerate(part[1:], start=1) if char.isalpha())
        assert part[end] in allowed
        assert part[1:end].strip("?0123456789;") == ""


def test_pictures_are_written(lm: LanguageModel, tmp_path: Path) -> None:
    from PIL import Image

    with lm.record() as recorder:
        lm.generate("The sea is", max_tokens=40, seed=5)
    trace = recorder.trace()
    frames = make_frames(trace, trace.requests[0])
    write_png(chosen_frames(frames, 2), tmp_path / "a.png")
    write_gif(frames, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.png") as png:
        assert png.format == "PNG"
        assert len(png.convert("RGB").getcolors(1 << 24) or []) > 4
    with Image.open(tmp_path / "a.gif") as gif:
        assert getattr(gif, "n_frames", 1) > 1


def test_a_frame_shows_what_was_drawn_what_is_open_and_what_the_causal_pass_wrote() -> None:
    trace = trace_of(["sure", "open"])
    step, commit, whole = make_frames(trace, trace.requests[0])
    assert [cell.state for cell in step.cells] == ["accepted", "noise"]
    assert [cell.level for cell in step.cells] == [0, 1]
    assert [cell.state for cell in commit.cells] == ["corrected", "corrected"]
    assert "by the causal pass" in commit.title
    assert whole.title == "0 tokens of drafts, 2 by the causal pass"


def test_the_first_and_the_last_frame_are_chosen() -> None:
    trace = trace_of(["a"])
    frame = make_frames(trace, trace.requests[0])[0]
    frames = [frame] * 3
    assert len(chosen_frames(frames, 2)) == 2
    assert chosen_frames(frames, 5) == frames
    assert len(chosen_frames(frames, 1)) == 1


def test_the_player_plays_steps_and_jumps() -> None:
    trace = trace_of(["a", "b"])
    frames = [*make_frames(trace, trace.requests[0])[:2], *make_frames(trace, trace.requests[0])[:2]]
    player = TracePlayer(frames)
    assert player.wait_s is not None
    player.tick()
    assert player.at == 1
    assert player.press(" ")
    assert player.wait_s is None, "paused"
    assert player.press("\x1b[C")
    assert player.at == 2
    assert player.press("\x1b[F")
    assert player.at == 3
    assert player.press("\x1b[C")
    assert player.at == 3
    assert player.press(" ")
    assert (player.at, player.is_playing) == (0, True), "from the beginning again"
    assert player.press("+")
    assert player.press("unknown")
    assert not player.press("q")
