"""Row files: formats, faults in single rows, and faults in whole files."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanstream.batch.rows.rows import JobsError, Row, read_rows


def rows_of(folder: Path, name: str, content: str | bytes) -> list[Row]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_rows(path)


def test_csv_cells_are_text_and_an_empty_one_changes_nothing(tmp_path: Path) -> None:
    table = 'sampler.seed,text.positive,name\n7,"a boat, at dawn\nmist",shot_1\n\n8,,\n9,fog\n'
    rows = rows_of(tmp_path, "jobs.csv", table)
    assert [(row.line, row.position, row.name, row.values) for row in rows] == [
        (2, 1, "shot_1", {"sampler.seed": "7", "text.positive": "a boat, at dawn\nmist"}),
        (5, 2, None, {"sampler.seed": "8"}),
        (6, 3, None, {"sampler.seed": "9", "text.positive": "fog"}),
    ]
    assert all(row.as_text and row.fault is None for row in rows)


def test_json_lines_keep_their_types(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbf{"sampler.seed": 7, "129:86.images.image0": ["3", 0]}\r\n'
        b'\n{"a.b": null, "name": "x"}\n'
    )
    first, second = rows_of(tmp_path, "jobs.jsonl", content)
    assert first.values == {"sampler.seed": 7, "129:86.images.image0": ["3", 0]}
    assert (second.line, second.name, second.values) == (3, "x", {"a.b": None})
    assert not first.as_text


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "this is not JSON"),
        (b"\xff", "this is not JSON"),
        (b"[1]", "a row is an object"),
        (b'{"seed": 1}', "'seed': write node.input"),
        (b'{".seed": 1}', "'.seed': write node.input"),
        (b'{"a.b": 1, "a.b": 2}', "'a.b' is given twice"),
        (b'{"a.b": NaN}', "NaN is not a JSON value"),
        (b'{"name": 7}', "name is a text"),
        (b'{"name": "../x"}', "not a valid file name"),
        (b'{"name": "x."}', "not a valid file name"),
        (b'{"name": "a~1"}', "not a valid file name"),
        (b'{"name": "Con.1"}', "is a device name on Windows"),
        (b'{"name": "ONE"}', "name 'ONE' is already used by line 1"),
        (b"[" * 100_000, "this is not JSON"),
    ],
)
def test_a_json_line_that_is_no_row_costs_itself_alone(
    tmp_path: Path, bad: bytes, reason: str
) -> None:
    first, faulty, last = rows_of(
        tmp_path, "jobs.jsonl", b'{"a.b": 1, "name": "one"}\n' + bad + b'\n{"a.b": 3}'
    )
    assert (first.fault, last.fault) == (None, None)
    assert reason in str(faulty.fault)
    assert faulty.line == 2


def test_a_csv_row_that_is_none_costs_itself_alone(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "jobs.csv", 'a.b,a.c\n1,2,3\n4,5,,\n6,"7"8\n9,10\n11,"12\n')
    assert [row.line for row in rows if row.fault] == [2, 4, 6]
    assert "3 cells, but 2 columns" in str(rows[0].fault)
    assert "this is not CSV" in str(rows[2].fault)
    assert [dict(row.values) for row in rows if not row.fault] == [
        {"a.b": "4", "a.c": "5"},
        {"a.b": "9", "a.c": "10"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("jobs.txt", "a.b\n1\n", "from a .csv file or from JSON lines"),
        ("jobs.csv", "", "has no rows"),
        ("jobs.csv", "a.b\n", "has no rows"),
        ("jobs.jsonl", "\n\n", "has no rows"),
        ("jobs.csv", "a.b;a.c\n1;2\n".replace("a.c", "c"), "and separate them by commas"),
        ("jobs.csv", "a.b,seed\n1,2\n", "column 'seed'"),
        ("jobs.csv", "a.b,a.b\n1,2\n", "two columns 'a.b'"),
        ("jobs.csv", b"a.b\n1\n\xe4\n", "line 3 is not UTF-8"),
        ("jobs.csv", '"a.b\n', "line 1 is not CSV"),
    ],
)
def test_a_file_without_rows_is_refused(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    with pytest.raises(JobsError, match=reason):
        rows_of(tmp_path, name, content)
    with pytest.raises(JobsError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.csv")


def test_a_row_is_known_again_wherever_it_stands(tmp_path: Path) -> None:
    before = rows_of(
        tmp_path,
        "jobs.jsonl",
        '{"a.b": 1}\n{"a.b": 2, "a.c": 3}\n{"a.b": 1}\n{"a.b": 1, "name": "x"}\n',
    )
    assert len({row.hash for row in before}) == 4
    after = rows_of(
        tmp_path, "jobs.jsonl", '{"a.c": 3, "a.b": 2}\n{"a.b": 1}\n{"a.b": 9}\n{"a.b": 1}\n'
    )
    assert {row.hash for row in before} & {row.hash for row in after} == {
        row.hash for row in before[:3]
    }
