"""The completion scripts offer what the parser takes: asked in a real shell where it is installed."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest

from dgemma.cli import completion
from dgemma.cli.main import COMMANDS, main
from terminal import Program, PseudoTerminal

MODELS = ["bundled:forms", "bundled:sudoku", "bundled:text"]


@cache
def script(shell: str) -> str:
    return completion.SCRIPTS[shell](completion.commands())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for directory in ("burrow", "my-model", "two words"):
        (tmp_path / directory).mkdir()
    (tmp_path / "data.jsonl").write_text("")
    (tmp_path / "dgemma.bash").write_text(script("bash"))
    return tmp_path


def complete(place: Path, line: str) -> list[str]:
    """What bash would offer at the end of `line`; readline itself adds files where nothing is offered."""
    code = (
        f"source {place}/dgemma.bash; COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}\n"
        '_dgemma; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=place, capture_output=True, text=True, check=True
    )
    # Outside of a completion there is nothing for compopt to set.
    assert all("compopt" in error for error in done.stderr.splitlines()), done.stderr
    return [word for word in done.stdout.split("\n") if word]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dgemma ", list(COMMANDS)),
        ("dgemma se", ["serve", "selfcheck"]),
        ("dgemma --ver", ["--version"]),
        ("dgemma train --", ["--help", "--dry-run", "--check-data", "--threads", "--nproc"]),
        ("dgemma generate --pre", ["--preset"]),
        ("dgemma generate --preset ", ["fast", "balanced", "thorough"]),
        ("dgemma generate --preset=f", ["fast"]),
        ("dgemma generate --preset fast --dtype b", ["bfloat16"]),
        ("dgemma generate --preset=fast ", [*MODELS, "burrow", "my-model", "two words"]),
        ("dgemma generate --raw b", [*MODELS, "burrow"]),
        ("dgemma generate bundled:t", ["text"]),  # readline keeps what stands before the colon
        ("dgemma generate my-m", []),  # no bundled one: readline's files
        ("dgemma generate bundled:text ", []),
        ("dgemma generate bundled:text --seed ", []),
        ("dgemma generate --seed 3 bundled:s", ["sudoku"]),
        ("dgemma solve --model b", [*MODELS, "burrow"]),
        ("dgemma fill b", [*MODELS, "burrow"]),
        ("dgemma quantize b", [*MODELS, "burrow"]),
        ("dgemma quantize bundled:text b", []),
        ("dgemma serve --no-pre", ["--no-prefix-reuse"]),
        ("dgemma rm b", []),
        ("dgemma completion ", ["bash", "zsh", "fish"]),
        ("dgemma nosuch --", ["--help", "--version"]),
        ("  dgemma   info --js", ["--json"]),
        ("dgemma", []),
    ],
)
def test_bash_offers_what_fits_at_the_cursor(place: Path, line: str, expected: list[str]) -> None:
    assert sorted(complete(place, line)) == sorted(expected)


def test_bash_offers_every_option_of_every_command(place: Path) -> None:
    for command in completion.commands():
        names = {name for option in command.options for name in option.names}
        assert set(complete(place, f"dgemma {command.name} -")) == names
        assert "--help" in names


def test_a_tab_in_bash_completes_a_bundled_model(place: Path) -> None:
    code = (
        "import os; os.environ['PS1'] = '$ '; os.chdir(os.environ['PLACE']); "
        "os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"
    )
    env = {"PLACE": str(place), "INPUTRC": os.devnull}
    with PseudoTerminal(80, 24) as terminal, Program(terminal, code, env=env):
        terminal.wait_for(lambda screen: screen.text() == ["$"])
        terminal.type("source ./dgemma.bash\n")
        terminal.wait_for(lambda screen: screen.text() == ["$ source ./dgemma.bash", "$"])
        terminal.type("dgemma gen\tbundled:t\t--pres\tfa\tdat\t")
        expected = "$ dgemma generate bundled:text --preset fast data.jsonl"
        terminal.wait_for(lambda screen: expected in screen.rows())
        terminal.type("\x15exit\n")


@pytest.mark.parametrize("shell", completion.SCRIPTS)
def test_every_script_names_all_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell)
    for command in completion.commands():
        assert command.name in text
        for option in command.options:
            for name in option.names:
                assert (f"-l {name[2:]}" if shell == "fish" and name.startswith("--") else name) in text
    assert "bundled:text" in text
    assert "fast balanced thorough" in text


@pytest.mark.parametrize(
    ("shell", "argv"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])]
)
def test_the_script_has_the_shells_syntax(tmp_path: Path, shell: str, argv: list[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script(shell))
    done = subprocess.run([*argv, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# As `dgemma completion --help` says; Ctrl-X writes the edited line to a file.
ZSHRC = """
PS1='ready> '
fpath+=(~/.zfunc)
autoload -U compinit && compinit -u -D
write-line() { print -r -- $BUFFER > ~/line.part && mv ~/line.part ~/line; BUFFER= }
zle -N write-line && bindkey '^X' write-line
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "dgemma gen\tbundled:t\t--pres\tfa\tdat\t",
            "dgemma generate bundled:text --preset=fast data.jsonl ",
        ),
        ("dgemma sel\t--dt\tbf\t", "dgemma selfcheck --dtype=bfloat16 "),
        ("dgemma completion z\t", "dgemma completion zsh "),
        ("dgemma info my-m\t", "dgemma info my-model/"),
        ("dgemma trace diff a.trace dat\t", "dgemma trace diff a.trace data.jsonl "),
    ],
)
def test_a_tab_in_zsh_completes_what_fits(place: Path, keys: str, expected: str) -> None:
    (place / ".zfunc").mkdir()
    (place / ".zfunc" / "_dgemma").write_text(script("zsh"))
    (place / ".zshrc").write_text(ZSHRC)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place)
        env = {"HOME": str(place), "PATH": os.environ["PATH"]}
        os.execvpe("zsh", ["zsh", "-i"], env)  # noqa: S606
    try:
        seen = b""
        while b"ready> " not in seen:
            seen += os.read(terminal, 4096)
        os.write(terminal, f"{keys}\x18".encode())
        while not (place / "line").exists():
            os.read(terminal, 4096)  # it echoes what is typed
        assert (place / "line").read_text() == f"{expected}\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dgemma se", ["selfcheck", "serve"]),
        ("dgemma generate --pre", ["--preset"]),
        ("dgemma generate --preset ", ["balanced", "fast", "thorough"]),
        ("dgemma generate b", [*MODELS, "burrow/"]),
        ("dgemma completion ", ["bash", "fish", "zsh"]),
        ("dgemma rm b", []),
    ],
)
def test_fish_offers_what_fits_at_the_cursor(place: Path, line: str, expected: list[str]) -> None:
    (place / "dgemma.fish").write_text(script("fish"))
    code = f"source dgemma.fish; complete -C {shlex.quote(line)}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], cwd=place, capture_output=True, text=True, check=True
    )
    assert [found.split("\t")[0] for found in done.stdout.splitlines()] == expected


def test_every_further_word_of_train_and_trace_is_completed_in_zsh() -> None:
    assert "'*:NAME=VALUE:_files'" in script("zsh")
    assert "'*:FILE:_files'" in script("zsh")


def test_help_with_brackets_and_colons_stays_one_word_in_zsh() -> None:
    option = completion.OptionWords(
        names=("--x",), value=completion.NOTHING, help="a: [b] it's", is_repeatable=True
    )
    assert completion._zsh_options(option) == [r"*--x=[a\: \[b\] it's]:value: "]


def test_quotes_stay_inside_a_string_in_fish() -> None:
    assert completion._fish_quoted("it's \\") == r"'it\'s \\'"


def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "bsh"])
    assert stopped.value.code == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
