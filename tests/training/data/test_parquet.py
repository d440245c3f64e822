"""Rows of Parquet files are the records of the same JSON lines, read group by group; faults name the row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from dgemma.errors import InputError
from dgemma.training.data.parquet import ParquetRows, RowGroupCache
from dgemma.training.data.records import RecordReader
from dgemma.training.data.sources import open_files
from dgemma.training.data.stream import ExampleStream
from text.bundled import TEMPLATE, TOKENIZER

READER = RecordReader(tokenizer=TOKENIZER, template=TEMPLATE)


def write(path: Path, records: list[dict[str, Any]], rows_per_group: int = 3) -> Path:
    keys = dict.fromkeys(key for record in records for key in record)
    table = pa.table({key: [record.get(key) for record in records] for key in keys})
    pq.write_table(table, path, row_group_size=rows_per_group)
    return path


def texts(num: int) -> list[dict[str, Any]]:
    return [{"text": f"Number {n}."} for n in range(num)]


@pytest.mark.parametrize(
    "records",
    [
        [{"text": "a"}, {"text": "ü"}],
        [{"prompt": "a", "response": "x"}, {"prompt": "b", "response": "y"}],
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]}],
        [
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
            {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "y"}]},
        ],
        [{"instruction": "a", "input": "", "output": "x"}, {"instruction": "b", "input": "c", "output": "y"}],
        [{"tokens": [1, 2, 3], "responses": [[1, 3]], "clipped": True}],
        [{"text": "a", "id": 7}, {"prompt": "b", "response": "y"}],  # columns that not every row has are null
    ],
    ids=range(7),
)
def test_rows_are_the_records_of_the_same_json_lines(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    lines = tmp_path / "d.jsonl"
    lines.write_text("\n".join(map(json.dumps, records)))
    expected = open_files([lines], READER)
    found = open_files([write(tmp_path / "d.parquet", records, 1)], READER)
    assert found.num_records == expected.num_records == len(records)
    for index in range(len(records)):
        assert found.read(index, epoch=0, seed=0) == expected.read(index, epoch=0, seed=0)


def test_every_row_of_every_group_is_found(tmp_path: Path) -> None:
    rows = ParquetRows(write(tmp_path / "d.parquet", texts(10)), RowGroupCache())
    assert len(rows) == 10
    for index in (9, 0, 5, 2, 3, 8, 6, 1, 7, 4):
        assert rows[index] == {"text": f"Number {index}."}
        assert rows.where(index) == f"{tmp_path}/d.parquet, row {index + 1}"


def test_several_files_are_one_source(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", texts(3))
    write(tmp_path / "a.parquet", [{"text": "first"}])
    write(tmp_path / "c.parquet", [{"text": "last"}])
    source = open_files([tmp_path], READER)
    found = [source.read(n, epoch=0, seed=0).examples[0].tokens for n in range(source.num_records)]
    assert [TOKENIZER.decode(tokens) for tokens in found] == [
        "first", "Number 0.", "Number 1.", "Number 2.", "last",
    ]  # fmt: skip


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read = pq.ParquetFile.read_row_group
    numbers: list[int] = []

    def counted(self: Any, number: int, **options: Any) -> Any:
        numbers.append(number)
        return read(self, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    return numbers


def test_a_row_reads_its_group_alone_and_once(tmp_path: Path, groups_read: list[int]) -> None:
    rows = ParquetRows(write(tmp_path / "d.parquet", texts(300)), RowGroupCache())
    assert groups_read == []  # opening reads the footer
    for index in (21, 23, 22, 21, 290):
        assert rows[index] == {"text": f"Number {index}."}
    assert groups_read == [7, 96]


def test_old_groups_make_room_and_the_files_of_a_source_share_it(
    tmp_path: Path, groups_read: list[int]
) -> None:
    one = write(tmp_path / "a.parquet", texts(9))
    two = write(tmp_path / "b.parquet", texts(9))
    size = pq.ParquetFile(one).read_row_group(0).nbytes
    groups_read.clear()
    cache = RowGroupCache(max_bytes=2 * size)
    first, second = ParquetRows(one, cache), ParquetRows(two, cache)
    for rows, index in ((first, 0), (first, 3), (first, 0), (second, 0)):  # the group used longest ago goes
        assert rows[index] == {"text": f"Number {index}."}
    assert groups_read == [0, 1, 0]
    assert first[0] == second[0]
    assert groups_read == [0, 1, 0]
    assert first[3] == {"text": "Number 3."}
    assert groups_read == [0, 1, 0, 1]


def test_a_group_above_the_limit_is_read_too(tmp_path: Path, groups_read: list[int]) -> None:
    rows = ParquetRows(write(tmp_path / "d.parquet", texts(6)), RowGroupCache(max_bytes=1))
    assert [rows[n]["text"] for n in (0, 1, 5, 4)] == ["Number 0.", "Number 1.", "Number 5.", "Number 4."]
    assert groups_read == [0, 1]


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    records = [{"text": f"{n} " + "x" * 10_000} for n in range(2_000)]  # 20 MB in groups of 1 MB
    file = write(tmp_path / "d.parquet", records, 100)
    before = pa.total_allocated_bytes()
    rows = ParquetRows(file, RowGroupCache(max_bytes=3_000_000))
    for index in range(0, 2_000, 50):
        assert rows[index]["text"].startswith(f"{index} ")
    assert pa.total_allocated_bytes() - before < 5_000_000


def test_faults_are_told_with_file_and_row_and_stop_nobody(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "response": "x"},
        {"prompt": "a", "response": None},
        {"prompt": "b", "response": "y"},
    ]
    file = write(tmp_path / "d.parquet", records, 2)
    source = open_files([file], READER)
    with pytest.raises(InputError, match=r"d\.parquet, row 2: the record has 'prompt' and no response"):
        source.read(1, epoch=0, seed=0)
    report = ExampleStream(source).check_all(canvas_len=8)
    assert (report.num_records, report.num_broken) == (3, 1)
    assert report.problems[0].startswith(f"{file}, row 2: ")


def test_text_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    column = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "d.parquet")
    source = open_files([tmp_path / "d.parquet"], READER)
    source.read(0, epoch=0, seed=0)
    with pytest.raises(InputError, match=r"d\.parquet, row 2: the row cannot be read: .*utf-8"):
        source.read(1, epoch=0, seed=0)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(InputError, match=r"d\.parquet is not a Parquet file that can be read: "):
        open_files([tmp_path / "d.parquet"], READER)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"d\.parquet cannot be read: No such file"):
        ParquetRows(tmp_path / "d.parquet", RowGroupCache())


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=r"d\.parquet holds no records"):
        open_files([tmp_path / "d.parquet"], READER)


def test_a_damaged_group_names_its_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "d.parquet", texts(9))
    start = pq.ParquetFile(file).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + 20] = b"\xff" * 20
    file.write_bytes(content)
    source = open_files([file], READER)
    source.read(2, epoch=0, seed=0)
    with pytest.raises(InputError, match=r"d\.parquet is damaged; rows 4 to 6 cannot be read: ."):
        source.read(3, epoch=0, seed=0)
    source.read(6, epoch=0, seed=0)


def test_a_file_that_changes_while_in_use_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "d.parquet", texts(9))
    source = open_files([file], READER)
    write(file, texts(10))
    with pytest.raises(InputError, match=r"d\.parquet changed while it was in use; start again"):
        source.read(0, epoch=0, seed=0)


def test_without_pyarrow_the_command_to_install_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "d.parquet", texts(1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        InputError, match=r'd\.parquet: Parquet files need pyarrow; run: pip install "dgemma\['
    ):
        open_files([file], READER)


def test_parquet_beside_other_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d.parquet", texts(1))
    (tmp_path / "d.jsonl").write_text('{"text": "a"}')
    with pytest.raises(InputError, match="holds both JSON lines and Parquet files; give one"):
        open_files([tmp_path], READER)
    source = open_files([tmp_path / "d.parquet", tmp_path / "d.jsonl"], READER)
    assert source.num_records == 2


def test_opening_tells_the_size(tmp_path: Path) -> None:
    file = write(tmp_path / "d.parquet", texts(3))
    seen: list[tuple[int, int | None]] = []
    open_files([file], READER, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(file.stat().st_size, file.stat().st_size)]
