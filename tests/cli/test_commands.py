"""Each command as a user types it: results on stdout, errors in one line, help complete."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma.checkpoint.safetensors_file import read_entries
from dgemma.cli.doctor import first_step, what_it_means
from dgemma.cli.main import COMMANDS, IMPORT_TORCH_FIRST, build_parser, main
from dgemma.machine import GpuFacts, MachineFacts, TorchFacts
from gguf_files import write_model


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    status, out, _ = run(capsys, "new", "--preset", "tiny", str(tmp_path / "tiny"))
    assert status == 0
    assert "preset tiny" in out
    return tmp_path / "tiny"


def test_threads_sleep_soon_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, found in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        with monkeypatch.context() as patch:
            for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            run(capsys, "--version")
            assert os.environ.get("GOMP_SPINCOUNT") == found


def test_the_choice_of_waiting_is_made_before_torch_is_imported() -> None:
    code = "import sys, dgemma.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_that_imports_torch_first_says_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(IMPORT_TORCH_FIRST) < set(COMMANDS)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, out, err = run(capsys, "doctor")
    assert (status, err.split("\r")[0]) == (0, "starting dgemma doctor ...")
    assert "starting" not in out
    monkeypatch.undo()
    assert run(capsys, "doctor")[2] == ""


def test_a_model_that_is_not_there_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A <FILL> b.")
    (tmp_path / "text.jsonl").write_text('{"prompt": "a", "response": "b"}')
    (tmp_path / "empty").mkdir()
    commands = (
        "generate MODEL Hello", "chat MODEL", "run MODEL Hello", "fill MODEL text", "edit MODEL text x",
        "extract MODEL text", "decide MODEL x --ask y", "solve --model MODEL " + 81 * ".", "serve MODEL",
        "run-batch MODEL text out", "eval MODEL text.jsonl", "merge MODEL adapter out", "quantize MODEL out",
        "export MODEL out", "selfcheck MODEL", "bench MODEL", "plan MODEL --rps 1 --p99 1",
        "play MODEL --no-open",
    )  # fmt: skip
    code = (
        "import sys; from dgemma.cli.main import main\n"
        "for model in ('./none', 'bundled:txet', './empty'):\n"
        f"    for command in {commands}:\n"
        "        print(main([model if word == 'MODEL' else word for word in command.split()]), command)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.splitlines() == [f"1 {command}" for command in 3 * commands], done.stderr
    assert done.returncode == 0
    names = [f"dgemma {command.split()[0]}: " for command in commands]
    assert done.stderr.splitlines() == [
        *(f"{name}none does not exist. Give the directory of a checkpoint." for name in names),
        *(
            f"{name}no bundled model is called 'txet'; did you mean 'text'? Bundled: forms, sudoku, text."
            for name in names
        ),
        *(f"{name}empty/config.json is missing; it is not a checkpoint directory." for name in names),
    ]


def test_info_json_has_the_documented_keys_and_the_published_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "new", "--preset", "26b", "--config-only", str(tmp_path / "big"))[0] == 0
    assert [f.name for f in (tmp_path / "big").iterdir()] == ["config.json"]
    status, out, _ = run(capsys, "info", str(tmp_path / "big"), "--json")
    assert status == 0
    found = json.loads(out)
    assert found["total_parameters"] // 10**8 == 252
    assert found["active_parameters"] // 10**8 == 38
    parts = found["parameters_by_part"]
    assert {"experts", "attention", "shared_mlp", "embedding", "self_conditioning"} <= parts.keys()
    assert sum(parts.values()) == found["total_parameters"]
    idle = parts["experts"] * (1 - 8 / 128)
    assert found["active_parameters"] == found["total_parameters"] - idle
    assert found["bytes"].keys() == {"bf16", "int8", "4bit"}
    assert found["kv_bytes_per_1k_tokens"].keys() == {"sliding", "full"}
    assert found["fits_this_machine"]["bf16"] == (found["bytes"]["bf16"] + 2e9 <= found["memory_bytes"])
    status, page, _ = run(capsys, "info", str(tmp_path / "big" / "config.json"))
    assert status == 0
    assert "25.25 B" in page
    assert "3.84 B" in page
    assert "50.5 GB" in page


def test_info_check_reads_the_weights_headers(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", str(tiny), "--check")
    assert status == 0
    assert re.search(r"weights: \d+\.\d kB in 1 files, complete", out)
    assert json.loads(run(capsys, "info", str(tiny), "--check", "--json")[1])["weights_complete"]


def test_info_says_the_types_of_a_gguf_file_and_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "Q4_K")
    status, page, _ = run(capsys, "info", str(path))
    assert status == 0
    assert re.search(r"weights: 1\.6 MB in 1 files, complete, quantized \(GGUF Q4_K\)", page)
    assert re.search(r"GGUF Q4_K +1\.5 MB   21 tensors", page)
    transformer = dgemma.load(path, dtype="bfloat16").transformer
    buffers = (held for name, held in transformer.named_buffers() if not name.startswith("rope."))
    found = json.loads(run(capsys, "info", str(tmp_path), "--json")[1])
    assert found["loaded_bytes"] == sum(held.nbytes for held in (*transformer.parameters(), *buffers))
    assert found["tensors_by_type"]["GGUF Q4_K"][0] == 21
    assert found["geometry"]["layers"] == 2
    path.write_bytes(path.read_bytes()[:-1])
    status, _, error = run(capsys, "info", str(path))
    assert status != 0
    assert "is truncated" in error


def test_new_makes_what_the_oracle_and_we_both_load(tiny: Path) -> None:
    lm = dgemma.load(tiny)
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(tiny, dtype="auto").eval()
    name = "model.decoder.layers.1.experts.down_proj"
    assert torch.equal(
        lm.transformer.get_parameter("layers.1.experts.down.weight"), theirs.state_dict()[name]
    )
    assert theirs.generation_config.sampler_config.entropy_bound == 0.1
    assert theirs.generation_config.eos_token_id == [1, 106]


def test_new_carries_a_real_tokenizer(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == dgemma.load(tiny).config.vocab_size
    for text in ("Fill the gap.", "naïve ☕ 日本 🎉", "def f(x):\n\treturn x  # two  spaces"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    assert tokenizer.convert_tokens_to_ids(["<|turn>", "<turn|>", "<|think|>"]) == [105, 106, 98]


def test_new_is_deterministic_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run(capsys, "new", str(tmp_path / name), "--seed", seed, "--dtype", "float32")
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b
    assert a != c
    assert {e.dtype for e in read_entries(tmp_path / "a" / "model.safetensors")} == {"F32"}


def test_new_never_overwrites_and_checks_the_disk(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = run(capsys, "new", str(tiny))
    assert (status, out) == (1, "")
    assert "already holds a checkpoint; choose another directory" in err
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    status, _, err = run(capsys, "new", str(tmp_path / "x" / "y"))
    assert status == 1
    assert "Choose a smaller preset, or --config-only" in err


def test_doctor_reports_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_bytes"] >= found["machine"]["available_bytes"] > 0
    assert found["torch"]["version"] == torch.__version__
    assert found["versions"]["dgemma"] == dgemma.__version__
    status, page, _ = run(capsys, "doctor")
    assert status == 0
    assert "what that means" in page


@pytest.mark.parametrize(
    ("features", "cuda", "mps", "threads", "no_kernel", "expected"),
    [
        (
            ("avx2",),
            (),
            False,
            2,
            "no VNNI",
            ["No GPU", "no bf16 instructions", "(no VNNI): they save memory"],
        ),
        (("avx512_vnni", "avx512_bf16"), (), False, 2, None, ["AVX-512", "saves memory and time"]),
        (("avx512f",), (), False, 2, None, ["AVX-512", "saves memory, and time against bfloat16"]),
        (
            ("amx_bf16",),
            (GpuFacts("H100", 80_000_000_000),),
            False,
            2,
            None,
            ["device='cuda'", "dgemma selfcheck", "AMX"],
        ),
        ((), (), True, 99, "no VNNI", ["device='mps'", "OMP_NUM_THREADS"]),
        (("avx2",), (), False, 2, "there is no C++ compiler", ["Install a C++ compiler"]),
    ],
)
def test_doctors_advice_follows_from_the_facts(
    features: tuple[str, ...],
    cuda: tuple[GpuFacts, ...],
    mps: bool,
    threads: int,
    no_kernel: str | None,
    expected: list[str],
) -> None:
    machine = MachineFacts("Linux", "cpu", 4, features, 64_000_000_000, 32_000_000_000)
    facts = TorchFacts("2.13", threads, "AVX2", cuda, mps)
    advice = "\n".join(
        what_it_means(machine, facts, no_kernel, has_compiler="compiler" not in str(no_kernel))
    )
    assert all(words in advice for words in expected), advice
    assert "15.0 B parameters" in advice


@pytest.mark.parametrize(
    ("gpus", "mps", "free_gb", "cores", "expected"),
    [
        ([("NVIDIA H100 80GB HBM3", 85)], False, 100, 32, ("h100", "fits as bf16", "--format plain")),
        ([("NVIDIA GeForce RTX 4090", 25.3)], False, 8, 8, ("rtx-4090-5090", "nvfp4", "--device cuda")),
        ([("NVIDIA GB10", 128)], False, 100, 20, ("dgx-spark", "nvfp4", "--device cuda")),
        ([], True, 96, 16, ("apple-silicon", "fits as bf16", "--device mps --format plain")),
        ([], True, 30, 10, ("apple-silicon", "fits as int4", "--device mps --format int4")),
        ([], False, 64, 32, ("cpu", "fits as int4", "--device cpu --format int4")),
        ([], False, 64, 2, ("cpu", "minutes for a canvas on 2 cores", "bundled:text")),
        ([], False, 12, 32, ("cpu", "does not fit into 12.0 GB", "bundled:text")),
    ],
)
def test_doctor_ends_with_a_page_and_a_command_that_suit_the_machine(
    gpus: list[tuple[str, float]], mps: bool, free_gb: float, cores: int, expected: tuple[str, str, str]
) -> None:
    machine = MachineFacts("Linux", "cpu", cores, ("avx2",), 256_000_000_000, int(free_gb * 1e9))
    found = tuple(GpuFacts(name, int(size * 1e9)) for name, size in gpus)
    start = first_step(machine, TorchFacts("2.13", 2, "AVX2", found, mps))
    assert start.playbook.name == expected[0]
    assert expected[1] in start.why
    assert expected[2] in start.command
    build_parser().parse_args(shlex.split(start.command)[1:])


def test_doctors_page_comes_with_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "doctor", "--json")[1])["playbook"]
    page = run(capsys, "doctor", "--playbook")[1]
    assert page == (Path(__file__).parents[2] / found["page"]).read_text()
    last = run(capsys, "doctor")[1].splitlines()[-3:]
    assert found["page"] in last[0]
    assert last[2].strip() == found["command"]


def test_selfcheck_passes_here_in_both_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    status, out, _ = run(capsys, "selfcheck", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["passed"]
    assert {f["dtype"] for f in found["findings"]} == {"float32", "bfloat16"}
    assert time.process_time() - started < 120
    status, report, _ = run(capsys, "selfcheck", "--dtype", "float32")
    assert status == 0
    assert "PASSED" in report
    assert "bfloat16" not in report


def test_selfcheck_can_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import dgemma.model.moe as experts

    combine = experts.combine
    monkeypatch.setattr(experts, "combine", lambda answers, w, route: combine(answers, w**2, route))
    status, report, _ = run(capsys, "selfcheck")
    assert status == 1
    assert report.count("FAILED") >= 5


def test_selfcheck_on_a_device_that_is_not_here_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    device = "mps" if torch.cuda.is_available() else "cuda"
    status, out, err = run(capsys, "selfcheck", "--device", device)
    assert (status, out) == (1, "")
    assert err == (
        f"dgemma selfcheck: device {device!r} is not available here; "
        "`dgemma doctor` shows what this machine has.\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inof", "x"], "did you mean 'info'?"),
        (["info", "x", "--jsno"], "did you mean '--json'?"),
        (["new", "--preset", "tinny", "x"], "did you mean 'tiny'?"),
        (["new", "x", "--seed", "abc"], "invalid int value: 'abc'"),
        (["--"], "the following arguments are required: COMMAND"),
        (["info"], "the following arguments are required: MODEL"),
    ],
)
def test_a_wrong_word_gets_a_guess_and_status_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert out == ""
    assert message in err
    assert "--help" in err


def test_a_wrong_path_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "info", str(tmp_path / "nothing"))
    assert status == 1
    assert err == f"dgemma info: {tmp_path}/nothing does not exist. Give the directory of a checkpoint.\n"


def test_interrupting_is_clean(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dgemma.cli.info.resolve_config", interrupted)
    assert run(capsys, "info", "x") == (130, "", "dgemma info: interrupted\n")


def test_help_is_complete_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, page, _ = run(capsys, "--help")
    assert status == 0
    for name, help_line in COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(help_line)}$", page, re.M)
        status, text, _ = run(capsys, name, "--help")
        assert status == 0
        module = importlib.import_module(f"dgemma.cli.{name.replace('-', '_')}")
        assert (module.__doc__ or "").splitlines()[0] in text
    for action in build_parser()._subparsers._group_actions[0].choices.values():  # type: ignore[union-attr]
        assert all(a.help for a in action._actions), action.prog


def test_help_imports_no_command_and_nothing_slow() -> None:
    code = (
        "import sys; from dgemma.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stderr.split()
    ours = {name for name in imported if name.startswith("dgemma")}
    assert ours == {
        "dgemma", "dgemma.cli", "dgemma.cli.main", "dgemma.errors", "dgemma.events", "dgemma.model",
        "dgemma.model.config", "dgemma.model.config_fields", "dgemma.model.vision_config",
        "dgemma.params",
    }  # fmt: skip
    assert not {"torch", "numpy", "rich", "psutil", "asyncio"} & set(imported)


def test_a_command_imports_no_other_command() -> None:
    code = (
        "import sys; from dgemma.cli.main import main\n"
        "try: main(['info', '--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commands = {f"dgemma.cli.{name.replace('-', '_')}" for name in COMMANDS}
    assert commands & set(done.stderr.split()) == {"dgemma.cli.info"}
    assert "torch" not in done.stderr.split()


def test_a_closed_pipe_is_not_an_error(tiny: Path) -> None:
    command = f"{sys.executable} -m dgemma.cli.main info {tiny} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_full_disk_is_one_line(tiny: Path) -> None:
    command = f"{sys.executable} -m dgemma.cli.main info {tiny} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1, "dgemma info: the output cannot be read or written: No space left on device\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(13, "Permission denied", "/x/y"),
            "/x/y cannot be read or written: Permission denied",
        ),
        (MemoryError(), "out of memory; take smaller weights (dgemma quantize)"),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes. Error 12"),
            "close other programs. can't allocate memory: you tried 9 bytes. Error 12",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), "CUDA out of memory. Tried 2 GiB"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr("dgemma.cli.info.resolve_config", refused)
    status, out, err = run(capsys, "info", "bundled:text")
    assert (status, out) == (1, "")
    assert message in err
    assert err.startswith("dgemma info: ")
    assert err.count("\n") == 1


def test_a_bug_of_ours_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr("dgemma.cli.info.resolve_config", broken)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        run(capsys, "info", "bundled:text")


def test_progress_is_plain_lines_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dgemma.cli.views import progress

    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.byte_progress("writing", 2_000_000_000) as advance:
        advance(500_000_000)
    assert capsys.readouterr().err == "writing: 0.50 of 2.00 GB\n"


def test_progress_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dgemma.cli.views import progress

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.byte_progress("writing", 100) as advance:
        advance(50)
    out, err = capsys.readouterr()
    assert out == ""
    assert "GB\n" not in err
