"""Mutation testing: make one small mistake at a time in a source file, and see whether a test fails.

    OMP_NUM_THREADS=1 python -m tools.mutate --sample 30 --seed 1 --out mutants.jsonl
    OMP_NUM_THREADS=1 python -m tools.mutate --out mutants.jsonl --retry     # the survivors once more
    python -m tools.mutate --list --sample 0 engine/scheduler.py             # only print the mutants

The working tree is copied and only the copy is mutated. One traced run of the tests finds which of them
execute which lines; a mutant gets these, fastest first, up to the first failure. The process that has
imported torch forks once per mutant. Results are appended to `--out`: an interrupted run goes on from there.
A mutant that hangs is killed. `tools/mutate_equivalent.json` lists mutants that change nothing, with the
reason; they are not counted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import gc
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutate_equivalent.json")

_SCHEDULER = (
    "engine/test_block_pool.py engine/test_kv_cache_manager.py engine/test_prefix_cache.py "
    "engine/test_scheduler.py engine/test_capacity.py engine/test_simulation.py"
)
_ENGINE = (
    "engine/test_deadlines.py engine/test_failed_batches.py engine/test_chunked_prefill.py "
    "engine/test_scoring.py engine/test_pins.py engine/test_simulation.py"
)
_SAMPLING = "sampling/test_sampler.py sampling/test_top_k.py sampling/test_pinned.py"
_MODEL = (
    "parity/test_transformer_equals_oracle.py model/test_rope.py model/test_rows.py model/test_gradients.py "
    "kernels/test_elementwise.py"
)
_ROWS = "engine/test_chunked_prefill.py engine/test_short_canvases.py engine/test_pins.py"
_HTTP = "server/test_body.py server/test_keys.py server/test_errors.py server/test_admission.py"
_CHECKPOINT = (
    "checkpoint/test_safetensors_file.py checkpoint/test_refuses_broken.py checkpoint/test_round_trip.py "
    "checkpoint/quantized/test_readers.py checkpoint/quantized/test_recipes.py "
    "checkpoint/quantized/test_names.py"
)
TESTS = {
    "server/http/auth.py": _HTTP,
    "server/http/body.py": _HTTP,
    "server/http/admission.py": _HTTP,
    "engine/scheduler.py": _SCHEDULER,
    "engine/block_pool.py": _SCHEDULER,
    "engine/prefix_cache.py": _SCHEDULER,
    "engine/kv_cache_manager.py": _SCHEDULER,
    "engine/async_engine.py": "engine/test_async_engine.py engine/test_simulation.py",
    "sampling/sampler.py": _SAMPLING,
    "sampling/top_k.py": _SAMPLING,
    "sampling/pinned.py": _SAMPLING,
    "sampling/rng.py": "sampling/test_rng.py",
    "sampling/vocab_scan.py": (
        "sampling/test_vocab_scan.py sampling/test_top_k.py sampling/test_constrained.py "
        "sampling/test_pinned.py model/test_ranks.py engine/test_pins.py"
    ),
    "sampling/forward_backward.py": "sampling/test_forward_backward.py",
    "model/attention.py": (
        f"{_MODEL} {_ROWS} model/test_attention.py "
        "parity/test_images_equal_oracle.py training/test_objective.py"
    ),
    "model/layers.py": _MODEL,
    "model/kv_cache.py": f"model/test_kv_cache.py {_MODEL} {_ROWS}",
    "model/moe.py": "model/test_moe.py model/test_gradients.py model/test_rows.py model/test_ranks.py",
    "checkpoint/safetensors_file.py": _CHECKPOINT,
    "checkpoint/load.py": _CHECKPOINT,
    "checkpoint/source.py": _CHECKPOINT,
    "checkpoint/quantized/reader.py": _CHECKPOINT,
    "checkpoint/quantized/tensor_index.py": _CHECKPOINT,
    "engine/engine.py": _ENGINE,
}
"""Source files below src/dgemma, and their test files below tests."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    column: int
    before: str
    after: str
    lines: tuple[int, ...]  # a test that executes one of them may notice the mutant; empty: every test
    node: int  # of `ast.walk`
    variant: int

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.before} -> {self.after}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of `node`, each with one mistake."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for at, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:at], _COMPARISONS[type(op)](), *ops[at + 1 :]], others)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=keywords):
            yield ast.Call(ast.Name("max" if name == "min" else "min"), args, keywords)
        case ast.Slice(lower=lower, upper=upper, step=step):
            if lower is not None:
                yield ast.Slice(None, upper, step)
            if upper is not None:
                yield ast.Slice(lower, None, step)
        case ast.AugAssign(target=target, op=op, value=value):
            if type(op) in _OPERATORS:
                yield ast.AugAssign(target, _OPERATORS[type(op)](), value)
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Return(value=value) if value is None or _is_none(value):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Pass()
        case ast.Break():
            yield ast.Pass()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_skipped(node: ast.AST) -> bool:
    """Assertions, messages, logging and `repr` are not what the tests are for."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.keyword(arg="repr") | ast.FunctionDef(name="__repr__"):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_LOG")))):
            return True
    return False


def _sites(node: ast.AST, lines: tuple[int, ...]) -> Iterator[tuple[ast.AST, tuple[int, ...]]]:
    """Nodes that may be mutated, each with the lines of its statement; empty for what runs at import."""
    if _is_skipped(node):
        return
    inside = lines
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = (node.lineno,)
    elif isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef) and lines:
        end = node.end_lineno or node.lineno
        if isinstance(node, _COMPOUND):
            heads = [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr | ast.withitem)
            ]
            ends = [getattr(head, "end_lineno", None) or node.lineno for head in heads]
            end = max([node.lineno, *ends])
        inside = tuple(range(node.lineno, end + 1))
    if not isinstance(node, ast.Module):
        yield node, inside
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        # Default values of arguments are computed at import.
        below = () if name == "args" and isinstance(value, ast.arguments) else inside
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _sites(child, below)


def mutants_of(file: str, source: str) -> list[Mutant]:
    tree = ast.parse(source)
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    found: dict[str, Mutant] = {}
    for node, lines in _sites(tree, ()):
        for variant, other in enumerate(variants(node)):
            line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
            before, after = (ast.unparse(ast.fix_missing_locations(n)).split("\n")[0] for n in (node, other))
            mutant = Mutant(file, line, column, before, after, lines, numbers[id(node)], variant)
            found[mutant.key] = mutant
    return list(found.values())


def place_of(mutant: Mutant, source: str) -> str:
    """Function and text of the mutant's line: unlike its number, they outlive edits above it."""
    functions = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= mutant.line <= (node.end_lineno or node.lineno)
    ]
    # An inner function comes after the outer one.
    return f"{(functions or [''])[-1]}: {source.splitlines()[mutant.line - 1].strip()}"


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def mutated(mutant: Mutant, source: str) -> str:
    tree = ast.parse(source)
    old = list(ast.walk(tree))[mutant.node]
    new = list(variants(old))[mutant.variant]
    return ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(tree)))


@dataclass(frozen=True)
class Baseline:
    """The tests that pass without a mutant, their seconds, and those that executed a line."""

    seconds: dict[str, float]
    setup_s: dict[str, float]  # of the fixtures of a test file
    tests_of: dict[str, list[str]]  # by "file:line"; a test file stands for all of its tests
    modules: list[str]  # imported by the tests, and by no file of the tree

    def cost_of(self, file: str) -> float:
        return self.setup_s.get(file, 0.0) + sum(s for t, s in self.seconds.items() if _file_of(t) == file)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


class _Tracer:
    """A pytest plugin that records the lines that each test executes."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files  # absolute path -> name
        self._known: dict[CodeType, str | None] = {}
        self._now = ""
        self.seconds: dict[str, float] = {}
        self.setup_s: dict[str, float] = {}
        self.failed: set[str] = set()
        self.lines: dict[str, set[str]] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = self._files.get(code.co_filename)
        name = self._known[code]
        if name is None or not self._now:
            return None

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            self.lines.setdefault(f"{name}:{frame.f_lineno}", set()).add(self._now)
            return line

        return line(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        # A fixture may serve every test of the file.
        self._now = _file_of(item.nodeid)
        # Python drops a trace function that fails, and at the recursion limit any function fails.
        sys.settrace(self.trace)
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._now = item.nodeid
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds[report.nodeid] = report.duration
        else:
            file = _file_of(report.nodeid)
            self.setup_s[file] = self.setup_s.get(file, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


class _Chosen:
    """A pytest plugin that runs the given tests in the given order, and remembers the first that fails."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"


class Runner:
    """Runs tests in forked children, in a copy of the tree."""

    def __init__(self, scratch: Path) -> None:
        self.tree = scratch / "tree"
        self._answer = scratch / "answer.json"
        self._log = scratch / "error.txt"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)
        # Failures are not shrunk, and every run has the same examples.
        settings.register_profile(
            "mutate",
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

    def _fork(self, act: Any, timeout_s: float) -> Any:
        """What `act` returned in a child; None if it hung or died."""
        self._answer.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                silent = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(silent, stream)
                os.chdir(self.tree)
                sys.path[:] = [p for p in sys.path if not Path(p or ".").resolve().is_relative_to(ROOT)]
                sys.path.insert(0, str(self.tree / "src"))
                os.environ["PYTHONPATH"] = str(self.tree / "src")
                self._answer.write_text(json.dumps(act()))
            except BaseException:
                self._log.write_text(traceback.format_exc())
            finally:
                os._exit(0)
        deadline = time.monotonic() + timeout_s
        try:
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    _kill(child)
                    os.waitpid(child, 0)
                    return None
                time.sleep(0.02)
        except KeyboardInterrupt:
            _kill(child)
            raise
        _kill(child)  # processes that a test left behind
        return json.loads(self._answer.read_text()) if self._answer.exists() else None

    def baseline(self, sources: list[str]) -> Baseline:
        files = {str(self.tree / "src/dgemma" / name): name for name in sources}
        tests = sorted({f"tests/{test}" for name in sources for test in TESTS[name].split()})
        outside = (str(self.tree), str(ROOT))

        def act() -> dict[str, Any]:
            tracer = _Tracer(files)
            threading.settrace(tracer.trace)
            sys.settrace(tracer.trace)
            pytest.main([*_OPTIONS, *tests], plugins=[tracer])
            sys.settrace(None)
            modules = [
                name
                for name, module in sys.modules.items()
                if (getattr(module, "__file__", None) or outside[0]).startswith(outside) is False
            ]
            passed = {test: s for test, s in tracer.seconds.items() if test not in tracer.failed}
            lines = {line: sorted(tests) for line, tests in tracer.lines.items()}
            return {
                "seconds": passed, "setup_s": tracer.setup_s, "failed": sorted(tracer.failed),
                "lines": lines, "modules": modules,
            }  # fmt: skip

        found = self._fork(act, 3600)
        assert found is not None, self._log.read_text()
        for test in found["failed"]:
            print(f"not used, it fails or is skipped without a mutant: {test}")
        return Baseline(found["seconds"], found["setup_s"], found["lines"], found["modules"])

    def killer(self, mutant: Mutant, baseline: Baseline, budget_s: float) -> str | None:
        """The test that fails under the mutant; None if all pass."""
        tests = self._tests_for(mutant, baseline, budget_s)
        if not tests:
            return None
        path = self.tree / "src/dgemma" / mutant.file
        source = path.read_text()

        def act() -> list[Any]:
            # The compiled files of the baseline serve all that is not mutated.
            sys.dont_write_bytecode = True
            chosen = _Chosen(tests)
            files = dict.fromkeys(map(_file_of, tests))
            code = pytest.main([*_OPTIONS, "-x", *files], plugins=[chosen])
            return [int(code), chosen.failed]

        path.write_text(mutated(mutant, source))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        try:
            expected = sum(baseline.seconds[test] for test in tests)
            expected += sum(baseline.setup_s.get(file, 0.0) for file in set(map(_file_of, tests)))
            found = self._fork(act, 20 + 2 * expected)  # the expected seconds were traced, and slower
        finally:
            path.write_text(source)
        if found is None:
            return "hangs"
        return None if found[0] == 0 else found[1] or f"exit {found[0]}"

    def _tests_for(self, mutant: Mutant, baseline: Baseline, budget_s: float) -> list[str]:
        files = tuple(f"tests/{test}" for test in TESTS[mutant.file].split())
        own = [test for test in baseline.seconds if _file_of(test) in files]
        if mutant.lines:
            covering = {
                t for line in mutant.lines for t in baseline.tests_of.get(f"{mutant.file}:{line}", ())
            }
            own = [test for test in own if test in covering or _file_of(test) in covering]
        own.sort(key=lambda test: baseline.seconds[test] + baseline.setup_s.get(_file_of(test), 0.0))
        chosen: dict[str, list[str]] = {}  # by file, whose fixtures are then made once
        spent_s = 0.0
        for test in own:
            file = _file_of(test)
            cost_s = baseline.seconds[test] + (0.0 if file in chosen else baseline.setup_s.get(file, 0.0))
            if not chosen or spent_s + cost_s <= budget_s:
                spent_s += cost_s
                chosen.setdefault(file, []).append(test)
        return [test for file in sorted(chosen, key=baseline.cost_of) for test in chosen[file]]


_OPTIONS = (
    "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutate",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # plugins are imported before the fork
)  # fmt: skip


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def preload(modules: list[str]) -> None:
    """Import what every child would import again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def summary(results: list[dict[str, Any]], reasons: dict[str, str]) -> dict[str, Any]:
    """Counts and survivors of results in the form of the lines of `--out`."""
    survivors = [result for result in results if result["killed_by"] is None]
    equivalent = [s for s in survivors if _reason_key(s) in reasons]
    rest = [s for s in survivors if _reason_key(s) not in reasons]
    counted = len(results) - len(equivalent)
    by_file: dict[str, list[int]] = {}
    for result in results:
        counts = by_file.setdefault(result["file"], [0, 0])
        counts[0] += result["killed_by"] is not None
        counts[1] += 1
    return {
        "mutants": len(results),
        "killed": len(results) - len(survivors),
        "hung": sum(result["killed_by"] == "hangs" for result in results),
        "equivalent": len(equivalent),
        "kill_rate": round((len(results) - len(survivors)) / max(1, counted), 4),
        "mean_s": round(sum(result["seconds"] for result in results) / max(1, len(results)), 2),
        "killed_of_by_file": by_file,
        "survivors": [f"{s['file']}:{s['line']} {s['before']} -> {s['after']}" for s in rest],
        "equivalent_mutants": {
            f"{s['file']}:{s['line']} {s['before']} -> {s['after']}": reasons[_reason_key(s)]
            for s in equivalent
        },
    }


def _reason_key(result: dict[str, Any]) -> str:
    return f"{result['file']} {result['place']}: {result['before']} -> {result['after']}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    if not path.exists():
        return {}
    return {found["key"]: found for found in map(json.loads, path.read_text().splitlines())}


def write_record(path: Path, findings: dict[str, Any]) -> None:
    from dgemma.machine import inspect_machine

    machine = inspect_machine()
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m tools.mutate " + " ".join(sys.argv[1:]),
        "machine": {
            "processor": machine.processor,
            "cores": machine.cores,
            "memory_gb": round(machine.memory_bytes / 1e9, 1),
        },
        **findings,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def run(mutants: list[Mutant], out: Path, done: dict[str, dict[str, Any]], budget_s: float) -> None:
    """Run the mutants that are not done; append each result to `out` and to `done`."""
    left = [mutant for mutant in mutants if mutant.key not in done]
    groups: dict[str, list[Mutant]] = {}  # of files with the same tests
    for mutant in left:
        groups.setdefault(TESTS[mutant.file], []).append(mutant)
    number, spent_s = 0, 0.0
    for tests, group in groups.items():
        with tempfile.TemporaryDirectory() as scratch:
            runner = Runner(Path(scratch))
            print(f"{len(group)} mutants of {tests}; first without a mutant", flush=True)
            baseline = runner.baseline(sorted({mutant.file for mutant in group}))
            preload(baseline.modules)
            for mutant in group:
                started = time.perf_counter()
                killer = runner.killer(mutant, baseline, budget_s)
                seconds = time.perf_counter() - started
                result = {
                    "key": mutant.key, "file": mutant.file, "line": mutant.line, "before": mutant.before,
                    "after": mutant.after, "killed_by": killer, "seconds": round(seconds, 2),
                }  # fmt: skip
                done[mutant.key] = result
                with out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                number, spent_s = number + 1, spent_s + seconds
                minutes = spent_s / number * (len(left) - number) / 60
                print(
                    f"[{number}/{len(left)}, {minutes:.0f} min left] {seconds:5.1f} s "
                    f"{'SURVIVES' if killer is None else 'killed  '} {mutant.key}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument(
        "files", nargs="*", help="below src/dgemma; all that have tests here if none is named"
    )
    parser.add_argument("--sample", type=int, default=30, help="mutants of each file; 0 for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests per mutant")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="results, one per line")
    parser.add_argument("--retry", action="store_true", help="run the survivors in --out once more")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--record", type=Path, help="write the summary to this file")
    options = parser.parse_args()

    mutants = []
    for name in options.files or TESTS:
        found = mutants_of(name, (ROOT / "src/dgemma" / name).read_text())
        # Drawn for each file alone: a run of some files does a part of the run of all.
        chosen = random.Random(f"{options.seed} {name}").sample(range(len(found)), len(found))
        mutants += [found[at] for at in sorted(chosen[: options.sample or len(found)])]
    if options.list:
        for mutant in mutants:
            print(mutant.key)
        return
    place_of_key = {
        mutant.key: place_of(mutant, (ROOT / "src/dgemma" / mutant.file).read_text()) for mutant in mutants
    }
    reasons = json.loads(EQUIVALENT.read_text())
    done = read_results(options.out)
    done = {key: {**done[key], "place": place} for key, place in place_of_key.items() if key in done}
    if options.retry:
        is_over = {key: found["killed_by"] or _reason_key(found) in reasons for key, found in done.items()}
        done = {key: found for key, found in done.items() if is_over[key]}
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell lets its background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        run(mutants, options.out, done, options.budget)
    results = [
        {**done[mutant.key], "place": place_of_key[mutant.key]} for mutant in mutants if mutant.key in done
    ]
    findings = summary(results, reasons)
    print(json.dumps(findings, indent=2))
    if options.record is not None:
        write_record(options.record, findings)


if __name__ == "__main__":
    main()
