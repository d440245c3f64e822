"""A recipe file or a name=value gives a checked recipe or one sentence that says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.model.lora import PARTS, LoraSettings
from dgemma.training import recipe_file
from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    SavingRecipe,
)
from dgemma.training.recipe_file import read_recipe, to_plain, with_new_entries

NEEDED = ("model=my-model", "out=runs/first", "data=chats.jsonl")
HEAD = "model: my-model\nout: runs/first\ndata: chats.jsonl\n"


def read(text: str, *changes: str, suffix: str = ".yaml", where: Path) -> Recipe:
    file = where / f"recipe{suffix}"
    file.write_text(text, encoding="utf-8")
    return read_recipe(file, changes)


def changed(*changes: str) -> Recipe:
    return read_recipe(None, (*NEEDED, *changes))


def refusal(*changes: str) -> str:
    with pytest.raises(InputError) as caught:
        changed(*changes)
    return str(caught.value)


# The forms


def test_yaml_json_python_and_changes_give_the_same_recipe(tmp_path: Path) -> None:
    expected = Recipe(
        model="my-model",
        out="runs/first",
        data=DataRecipe(path="chats.jsonl", max_length=64),
        held_out=HeldOutRecipe(data=DataRecipe(path="held.jsonl"), every=5),
        optimizer=OptimizerRecipe(learning_rate=1e-4, betas=(0.9, 0.99), clip=None),
        lora=LoraSettings(rank=2, targets=("attention", "mlp")),
        freeze=(),
    )
    text = """
model: my-model
out: runs/first
data: {path: chats.jsonl, max_length: 64}
held_out: {data: held.jsonl, every: 5}
optimizer:
  learning_rate: 1e-4  # YAML 1.1 reads this as text
  betas: [0.9, 0.99]
  clip: null
lora: {rank: 2, targets: [attention, mlp]}
freeze: []
"""
    assert read(text, where=tmp_path) == expected
    plain = yaml.safe_load(text)
    assert read(json.dumps(plain), suffix=".json", where=tmp_path) == expected
    assert read(f"recipe = {plain!r}", suffix=".py", where=tmp_path) == expected
    assert read(f"def recipe():\n    return {plain!r}", suffix=".py", where=tmp_path) == expected
    changes = ("data.max_length=64", "held_out.data=held.jsonl", "held_out.every=5", "freeze=[]")
    changes += ("optimizer.learning_rate=1e-4", "optimizer.betas=[0.9, 0.99]", "optimizer.clip=null")
    assert changed(*changes, "lora.rank=2", "lora.targets=[attention, mlp]") == expected


def test_changes_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    found = read(HEAD + "steps: 5\nbatch: 2\n", "steps=6", "steps=7", where=tmp_path)
    assert (found.steps, found.batch) == (7, 2)


def test_a_change_of_a_part_keeps_its_other_parts(tmp_path: Path) -> None:
    text = HEAD + "optimizer: {learning_rate: 0.5}\nheld_out: {data: held.jsonl}\n"
    found = read(
        text, "optimizer.eps=1e-6", "data.max_length=9", "held_out.data.max_length=8", where=tmp_path
    )
    assert found.optimizer == OptimizerRecipe(learning_rate=0.5, eps=1e-6)
    assert found.data == DataRecipe(path="chats.jsonl", max_length=9)
    assert found.held_out == HeldOutRecipe(data=DataRecipe(path="held.jsonl", max_length=8))


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    assert read("\ufeff" + HEAD, where=tmp_path).model == "my-model"
    plain = json.dumps({"model": "m", "out": "o", "data": "d"})
    assert read("\ufeff" + plain, suffix=".json", where=tmp_path).model == "m"


def test_json_is_read_as_json(tmp_path: Path) -> None:
    """PyYAML reads an escaped pair as two halves, and no tabs."""
    text = '{\n\t"model": "\\ud83d\\ude00",\n\t"out": "o",\n\t"data": "d\\/e"}'
    found = read(text, suffix=".json", where=tmp_path)
    assert (found.model, found.data.path) == ("\U0001f600", "d/e")


# Python recipes


def python(body: str, *changes: str, where: Path) -> Recipe:
    names = "DataRecipe, HeldOutRecipe, NoiseRecipe, OptimizerRecipe, Recipe"
    return read(f"from dgemma.training.recipe import {names}\n{body}\n", *changes, suffix=".py", where=where)


def test_a_python_recipe_brings_its_own_records(tmp_path: Path) -> None:
    body = """
WORDS = ["a", "b"]
class Stream:
    def __iter__(self):
        return iter([{"prompt": word, "response": word} for word in WORDS])
def recipe():
    return Recipe(model="m", out="o", data=DataRecipe(records=Stream()))
"""
    found = python(body, "steps=3", "data.max_length=7", where=tmp_path)
    assert (found.steps, found.data.max_length, found.data.path) == (3, 7, None)
    assert found.data.records is not None
    assert [record["prompt"] for record in found.data.records] == ["a", "b"]


@pytest.mark.parametrize("records", ["[1, 2]", "(1, 2)", "(n for n in (1, 2))", "Lines(2)", "Pieces()"])
def test_records_reach_the_recipe_as_they_are_and_its_json_by_type_only(records: str, tmp_path: Path) -> None:
    body = f"""
from dataclasses import dataclass
@dataclass
class Lines:
    count: int
    def __iter__(self):
        return iter(range(self.count))
class Pieces:
    def __getitem__(self, index):
        return range(1, 3)[index]
    def __len__(self):
        return 2
records = {records}
recipe = Recipe(model="m", out="o", data=DataRecipe(records=records), steps=5)
"""
    for changes in ((), ("data.max_length=7", "batch=2")):
        found = python(body, *changes, where=tmp_path)
        assert found.data.records is not None
        kind = type(found.data.records).__name__
        assert to_plain(found)["data"]["records"] == f"<{kind}>"
        assert len(list(found.data.records)) == 2
        json.dumps(to_plain(found))


def test_a_python_recipe_may_mix_values_and_dictionaries(tmp_path: Path) -> None:
    body = """
recipe = {
    "model": "m", "out": "o",
    "data": DataRecipe(path="chats.jsonl", max_length=40),
    "optimizer": OptimizerRecipe(learning_rate=0.5),
    "noise": {"self_conditioning": 1},
}"""
    found = python(body, where=tmp_path)
    assert found.data == DataRecipe(path="chats.jsonl", max_length=40)
    assert found.noise == NoiseRecipe(self_conditioning=1.0)
    # A change of one entry leaves the section's others as they were made.
    found = python(body, "optimizer.eps=1e-6", "data.shuffle=false", where=tmp_path)
    assert found.optimizer == OptimizerRecipe(learning_rate=0.5, eps=1e-6)
    assert found.data == DataRecipe(path="chats.jsonl", max_length=40, shuffle=False)


def test_a_python_recipes_types_are_checked_like_a_files(tmp_path: Path) -> None:
    body = 'recipe = Recipe(model="m", out="o", data=DataRecipe(path="d", thinking=1))'
    with pytest.raises(InputError, match=r"data\.thinking is 1; it must be true or false"):
        python(body, where=tmp_path)


@pytest.mark.parametrize("body", ["", "recipe = 3", "recipe = None", "def recipe():\n    return []"])
def test_a_python_file_without_a_recipe_is_refused(body: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"recipe\.py defines no `recipe`: a Recipe, a dictionary, or a func"
    ):
        python(body, where=tmp_path)


def test_reading_a_recipe_does_not_change_the_files_own_dictionary(tmp_path: Path) -> None:
    body = """
import sys
recipe = sys.dgemma_test_recipe = {"model": "m", "out": "o", "data": {"path": "d"}}"""
    try:
        python(body, "data.max_length=7", "steps=2", where=tmp_path)
        assert sys.dgemma_test_recipe == {"model": "m", "out": "o", "data": {"path": "d"}}
    finally:
        del sys.dgemma_test_recipe


# Files that are no recipes


def test_without_pydantic_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    recipe_file._adapter.cache_clear()
    with pytest.raises(InputError, match=r'recipes need pydantic; run: pip install "dgemma\[train\]"'):
        read_recipe(None, ["model=m", "out=o", "data.path=d"])


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(
            InputError, match=r"is not a file; give a recipe in YAML or Python, or name=value"
        ):
            read_recipe(path)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_that_is_not_text_is_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"recipe{suffix}"
    file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(InputError, match=r"is not UTF-8 text; it is no recipe"):
        read_recipe(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(HEAD)

    def refuse(*args: Any, **options: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)  # the tests may run as root, who may read everything
    with pytest.raises(InputError, match=r"recipe\.yaml cannot be read: Permission denied"):
        read_recipe(file)


@pytest.mark.parametrize(
    "text",
    [
        "model: [",
        "a: b: c",
        "\x00",
        "out: 2024-13-45",  # PyYAML: ValueError
        "out: !!bool perhaps",  # KeyError
        "out: !!int ''",  # IndexError
        "out: !!timestamp soon",  # AttributeError
        "out: 0x_",
        f"steps: {'9' * 5000}",
        "out: !!python/object:os.system x",
        f"out: {'[' * 5000}",
        "a: &a [*b]",
    ],
)
def test_what_is_not_yaml_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(text, where=tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/recipe.yaml is not valid YAML: ")
    assert "\n" not in message
    assert len(message) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "", "{'a': 1}", "[" * 100_000, '{"steps": ' + "9" * 5000 + "}"])
def test_what_is_not_json_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe\.json is not valid JSON: "):
        read(text, suffix=".json", where=tmp_path)


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b", "5", "null"])
def test_a_file_without_names_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no recipe; write lines such as `model: my-model`"):
        read(text, where=tmp_path)


def test_yaml_without_pyyaml_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    for act in (lambda: changed("steps=5"), lambda: read(HEAD, where=tmp_path)):
        with pytest.raises(
            InputError, match=r"recipes in YAML need PyYAML; run: pip install 'dgemma\[train\]'"
        ):
            act()
    plain = '{"model": "m", "out": "o", "data": "d"}'  # what a run writes down needs nothing
    assert read(plain, suffix=".json", where=tmp_path).model == "m"


# What is missing or not known


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), "the recipe lacks model and out and data; for example: model=my-model"),
        (("model=m", "data=d"), "the recipe lacks out; for example: out=runs/first"),
        (("model=m", "out=o"), "the recipe lacks data; for example: data=chats.jsonl"),
        ((*NEEDED, "held_out.every=5"), "the recipe lacks held_out.data."),
        ((*NEEDED, "data={}"), "data needs a path, or records from a Python recipe, and not both."),
        (
            (*NEEDED, "held_out.data.max_length=5"),
            "held_out.data: data needs a path, or records from a Python recipe, and not both.",
        ),
    ],
)
def test_what_is_missing_is_named(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_recipe(None, changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ("step=5", "the recipe has no step; did you mean 'steps'? Known: model, out, data, "),
        ("banana=5", "the recipe has no banana. Known: "),
        (
            "optimizer.lerning_rate=1",
            "the recipe has no optimizer.lerning_rate; did you mean 'learning_rate'?",
        ),
        ("data.maxlength=5", "the recipe has no data.maxlength; did you mean 'max_length'? Known: path, "),
        ("held_out.data.pth=x", "the recipe has no held_out.data.pth; did you mean 'path'?"),
        ("lora.ranks=5", "the recipe has no lora.ranks; did you mean 'rank'? Known: rank, expert_rank, "),
        (".steps=5", "the recipe has no . Known: "),
        ("{1: 2}=5", "the recipe has no {1: 2}. Known: "),
    ],
)
def test_an_unknown_name_is_refused_with_a_guess(change: str, begins: str) -> None:
    assert refusal(change).startswith(begins)


@pytest.mark.parametrize("key", ["5", "null", "2024-01-01", "true", "1.5"])
def test_a_name_that_is_not_text_is_unknown(key: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^the recipe has no .*Known: model"):
        read(f"{HEAD}{key}: 5\n", where=tmp_path)


@pytest.mark.parametrize("change", ["steps", "", "=5", "="])
def test_a_change_needs_a_name_and_a_value(change: str) -> None:
    message = refusal(change)
    assert message == f"{change!r} is no change of the recipe; write name=value, for example steps=100."


# Types


FROM_PYTHON = "records come from a Python recipe. In YAML give a path."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps=true", "steps is True; it must be a whole number."),
        ("steps=1.0", "steps is 1.0; it must be a whole number."),
        ("steps=1e3", "steps is '1e3'; it must be a whole number."),
        ("steps=", "steps is ''; it must be a whole number."),
        ("steps=null", "steps is None; it must be a whole number."),
        ("steps=[5]", "steps is [5]; it must be a whole number."),
        ("steps.x=5", "steps is {'x': 5}; it must be a whole number."),
        (f"steps={1 << 64}", "steps is a number of 65 bits; it must fit into 63."),
        ("model=5", "model is 5; it must be text."),
        ("model=null", "model is None; it must be text."),
        ("model=- a", "model is ['a']; it must be text."),
        ("compile=1", "compile is 1; it must be true or false."),
        ("compile='true'", "compile is 'true'; it must be true or false."),
        ("optimizer.learning_rate=true", "optimizer.learning_rate is True; it must be a number."),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast'; it must be a number."),
        (f"optimizer.clip=0x{'f' * 300}", "optimizer.clip is a number of 1200 bits; it must fit into 63."),
        ("optimizer.betas=0.9", "optimizer.betas is 0.9; give a list, such as [0.95, 0.99]."),
        ("optimizer.betas=[0.9]", "optimizer.betas has 1 values; it takes 2."),
        ("optimizer.betas=[0.9, x]", "optimizer.betas is 'x'; it must be a number."),
        ("freeze=router", "freeze is 'router'; give a list, such as [router]."),
        ("freeze=[1]", "freeze is 1; it must be text."),
        ("lora.targets=mlp", "lora.targets is 'mlp'; give a list, such as [attention, experts]."),
        ("train=lore", "train is 'lore'; did you mean 'lora'? Choices: lora, all."),
        ("rollout.sampling=5", "rollout.sampling is 5; it must be names with values, such as {t_max: 0.6}."),
        ("train=5", "train is 5. Choices: lora, all."),
        ("precision=[bf16]", "precision is ['bf16']. Choices: auto, bf16, fp32."),
        (
            "data.prompt_format=caht",
            "data.prompt_format is 'caht'; did you mean 'chat'? Choices: auto, chat, raw.",
        ),
        ("optimizer=fast", "optimizer is 'fast'; it has parts, such as optimizer.kind."),
        ("optimizer=null", "optimizer is None; it has parts, such as optimizer.kind."),
        ("held_out=held.jsonl", "held_out is 'held.jsonl'; it has parts, such as held_out.data."),
        ("data=null", "data is None; it has parts, such as data.path."),
        ("data={records: chats.jsonl}", f"data.records is 'chats.jsonl'; {FROM_PYTHON}"),
        ("data={records: {a: b}}", f"data.records is {{'a': 'b'}}; {FROM_PYTHON}"),
        ("data={records: 5}", f"data.records is 5; {FROM_PYTHON}"),
        ("data={records: !!binary eA==}", f"data.records is b'x'; {FROM_PYTHON}"),
    ],
)
def test_a_wrong_type_is_refused_by_name_value_and_rule(change: str, message: str) -> None:
    assert refusal(change) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.warmup=2", "optimizer.warmup is 2.0; it must be a number from 0 to 1."),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate is nan; it must be a number of at least 0."),
        ("lora.rank=-1", "lora: rank is -1; it must be a whole number of at least 0."),
        ("micro_batch=3", "micro_batch is 3, batch is 8; it must divide batch."),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_section(change: str, message: str) -> None:
    assert refusal(change) == message


def test_numbers_may_be_written_as_people_write_them() -> None:
    for text in ("1e-4", "1.0e-4", "0.0001", "'1e-4'", "1E-4"):
        assert changed(f"optimizer.learning_rate={text}").optimizer.learning_rate == 1e-4
    one = changed("optimizer.clip=1").optimizer.clip
    assert (one, type(one)) == (1.0, float)
    assert changed("optimizer.clip=null").optimizer.clip is None
    assert changed("optimizer.betas=[0, 9e-1]").optimizer.betas == (0.0, 0.9)


@pytest.mark.parametrize(
    "text", ["@home", "2024-13-45", "C:\\models", "!!int x", "[" * 5000, "a\n---\nb", ""]
)
def test_a_value_that_is_no_yaml_is_text(text: str) -> None:
    assert changed(f"model={text}").model == text


def test_a_value_may_hold_an_equals_sign_and_spaces_around_it() -> None:
    assert changed("out= a=b ").out == "a=b"


LAUGHS = ["&a [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
LAUGHS += [f"&{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghijk")]


@pytest.mark.parametrize("long", [f"[{', '.join(LAUGHS)}]", f"0x{'f' * 5000}", f"[0x{'f' * 5000}]"])
@pytest.mark.parametrize(
    "entry", ["steps: {}", "optimizer: {}", "train: {}", "freeze: [{}]", "data: {{records: {{a: {}}}}}"]
)
def test_a_message_stays_short_whatever_the_value(entry: str, long: str, tmp_path: Path) -> None:
    """A few lines of YAML can mean a billion words, or a number that Python refuses to write out."""
    with pytest.raises(InputError) as caught:
        read(f"{HEAD}{entry.format(long)}\n", where=tmp_path)
    name = entry.partition(":")[0]
    assert str(caught.value).startswith(name)
    assert len(str(caught.value)) < 2000


def test_a_name_that_is_a_huge_number_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^the recipe has no <int.*Known: "):
        read(f"{HEAD}? 0x{'f' * 5000}\n: 1\n", where=tmp_path)


# Any input


NAMES = [
    f.name for kind in (Recipe, DataRecipe, OptimizerRecipe, HeldOutRecipe) for f in dataclasses.fields(kind)
]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
    | st.dates() | st.datetimes() | st.sampled_from(["lora", "cosine", "1e-4", "router", "bf16", 10**400])
)  # fmt: skip
keys = st.sampled_from(NAMES) | st.text(max_size=6) | st.integers() | st.none() | st.booleans()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)
quick = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@quick
@given(st.dictionaries(keys, values, max_size=6))
def test_any_yaml_value_gives_a_recipe_or_an_input_error(tmp_path: Path, content: dict[Any, Any]) -> None:
    text = yaml.safe_dump({"model": "m", "out": "o", "data": "d", **content}, allow_unicode=True)
    with suppress(InputError):
        json.dumps(to_plain(read(text, where=tmp_path)), allow_nan=False)


@quick
@given(st.text() | st.text(alphabet="a:-[]{}&*!|>'\"%@`#,?\n 0x.~"))
def test_any_text_gives_a_recipe_or_an_input_error(tmp_path: Path, text: str) -> None:
    for suffix in (".yaml", ".json"):
        for before in ("", HEAD):
            with suppress(InputError):
                read(before + text, suffix=suffix, where=tmp_path)


names = st.lists(st.sampled_from(NAMES) | st.text(max_size=5), min_size=1, max_size=4).map(".".join)
some_changes = st.text() | st.tuples(names, st.text() | values.map(repr)).map("=".join)


@quick
@given(st.lists(some_changes, max_size=4))
def test_any_changes_give_a_recipe_or_an_input_error(changes: list[str]) -> None:
    for before in (NEEDED, ()):
        with suppress(InputError):
            read_recipe(None, (*before, *changes))


# There and back


small = st.integers(1, 1 << 40)
positive = st.floats(1e-30, 1e30)
shares = st.floats(0, 1)
data = st.builds(
    DataRecipe,
    path=st.text(),
    max_length=st.integers(2, 1 << 40),
    prompt_format=st.sampled_from(["auto", "chat", "raw"]),
    thinking=st.booleans(),
    shuffle=st.booleans(),
    shuffle_buffer=small,
)
recipes = st.builds(
    Recipe,
    model=st.text(),
    out=st.text(),
    data=data,
    held_out=st.none() | st.builds(HeldOutRecipe, data=data, every=small, examples=small),
    train=st.sampled_from(["lora", "all"]),
    freeze=st.lists(st.sampled_from(["embedding", "norms", *PARTS])).map(tuple),
    lora=st.builds(
        LoraSettings,
        rank=st.integers(1, 64),
        alpha=positive,
        targets=st.lists(st.sampled_from(PARTS)).map(lambda parts: ("mlp", *parts)),
    ),
    noise=st.builds(
        NoiseRecipe, canvas_len=st.none() | small, self_conditioning=shares, encoder_weight=positive
    ),
    optimizer=st.builds(
        OptimizerRecipe,
        learning_rate=positive,
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
        clip=st.none() | positive,
        warmup=shares,
        decay=st.sampled_from(["cosine", "linear", "constant"]),
        final=shares,
    ),
    steps=small,
    batch=small,
    seed=st.integers(0, (1 << 63) - 1),
    saving=st.builds(SavingRecipe, every=small, keep=small),
    compile=st.booleans(),
)


@quick
@given(recipes)
def test_what_a_run_writes_down_reads_back_as_the_same_recipe(tmp_path: Path, recipe: Recipe) -> None:
    plain = to_plain(recipe)
    assert read(json.dumps(plain), suffix=".json", where=tmp_path) == recipe
    assert read(yaml.safe_dump(plain), where=tmp_path) == recipe
    texts = (recipe.model, recipe.out, recipe.data.path, recipe.held_out and recipe.held_out.data.path)
    if "".join(text or "" for text in texts).isprintable():  # else it is JSON, but not YAML
        assert read(json.dumps(plain, ensure_ascii=False), where=tmp_path) == recipe


def test_records_written_down_are_not_taken_for_data(tmp_path: Path) -> None:
    recipe = Recipe(model="m", out="o", data=DataRecipe(records=[1, 2, 3]))
    assert to_plain(recipe)["data"]["records"] == "<list>"
    with pytest.raises(InputError, match=r"data\.records is '<list>'; records come from a Python recipe"):
        read(json.dumps(to_plain(recipe)), suffix=".json", where=tmp_path)


def test_what_is_no_plain_data_is_named_by_its_type() -> None:
    assert to_plain(Path("x")) == f"<{type(Path('x')).__name__}>"
    assert to_plain((1, None, (2.5, "a"), DataRecipe)) == [1, None, [2.5, "a"], "<type>"]


def test_a_recipe_of_an_earlier_version_gets_the_defaults_of_what_it_could_not_know() -> None:
    recipe = Recipe(model="m", out="o", data=DataRecipe(path="a.jsonl"), steps=7)
    plain = to_plain(recipe)
    older = {name: value for name, value in plain.items() if name not in ("compile", "lora")}
    older["data"] = {name: value for name, value in plain["data"].items() if name != "also"}
    assert with_new_entries(older, recipe) == plain
    changed = dataclasses.replace(
        recipe, compile=True, data=dataclasses.replace(recipe.data, also=("b.jsonl",))
    )
    assert with_new_entries(older, changed) == plain != to_plain(changed)


def test_of_a_misspelt_name_and_the_one_it_stands_for_the_first_is_reported() -> None:
    with pytest.raises(InputError, match=r"the recipe has no dta; did you mean 'data'\?"):
        read_recipe(None, ["model=m", "out=o", "dta=d"])
