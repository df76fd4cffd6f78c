"""Row files, faults in them, and row values in a workflow."""

from __future__ import annotations

import copy

import pytest

from wanstream.batch.rows.rows import JobsError, Row, apply_row, lines_by_reason, read_rows
from wanstream.host.embedded.workflow.inputs import InputError
from wanstream.host.embedded.workflow.validate import sockets_of


@pytest.fixture
def rows_of(tmp_path):
    """`rows_of(name, content)` reads a row file."""

    def read(name: str, content: str | bytes) -> list[Row]:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_rows(path)

    return read


def test_csv_cells_are_text_and_an_empty_one_changes_nothing(rows_of):
    head = "sampler.seed,text.positive,name,continues"
    table = f'{head}\n7,"a boat, at dawn\nmist",shot_1\n\n8,,,shot_1\n9,fog\n'
    rows = rows_of("jobs.csv", table)
    assert [(row.line, row.position, row.name, row.continues, row.values) for row in rows] == [
        (2, 1, "shot_1", None, {"sampler.seed": "7", "text.positive": "a boat, at dawn\nmist"}),
        (5, 2, None, "shot_1", {"sampler.seed": "8"}),
        (6, 3, None, None, {"sampler.seed": "9", "text.positive": "fog"}),
    ]
    assert all(row.as_text and row.fault is None for row in rows)


def test_json_lines_keep_their_types(rows_of):
    values = b'{"sampler.seed": 7, "129:86.images.image0": ["3", 0]}'
    lines = b"\xef\xbb\xbf" + values + b'\r\n\n{"a.b": null, "name": "x"}\n'
    first, second = rows_of("jobs.jsonl", lines)
    assert first.values == {"sampler.seed": 7, "129:86.images.image0": ["3", 0]}
    assert (second.line, second.name, second.values) == (3, "x", {"a.b": None})
    assert not first.as_text


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "this is not JSON"),
        (b"\xff", "this is not JSON"),
        (b"[" * 100_000, "this is not JSON"),
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
    ],
)
def test_a_bad_json_line_fails_alone(rows_of, bad, reason):
    lines = b'{"a.b": 1, "name": "one"}\n' + bad + b'\n{"a.b": 3}'
    first, faulty, last = rows_of("jobs.jsonl", lines)
    assert (first.fault, faulty.line, last.fault) == (None, 2, None)
    assert reason in str(faulty.fault)


def test_a_bad_csv_row_fails_alone(rows_of):
    rows = rows_of("jobs.csv", 'a.b,a.c\n1,2,3\n4,5,,\n6,"7"8\n9,10\n11,"12\n')
    assert [row.line for row in rows if row.fault] == [2, 4, 6]
    assert "3 cells, but 2 columns" in str(rows[0].fault)
    assert "this is not CSV" in str(rows[2].fault)
    values = [dict(row.values) for row in rows if not row.fault]
    assert values == [{"a.b": "4", "a.c": "5"}, {"a.b": "9", "a.c": "10"}]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("jobs.txt", "a.b\n1\n", "from a .csv file or from JSON lines"),
        ("jobs.csv", "", "has no rows"),
        ("jobs.csv", "a.b\n", "has no rows"),
        ("jobs.jsonl", "\n\n", "has no rows"),
        ("jobs.csv", "a.b;c\n1;2\n", "and separate them by commas"),
        ("jobs.csv", "a.b,seed\n1,2\n", "column 'seed'"),
        ("jobs.csv", "a.b,a.b\n1,2\n", "two columns 'a.b'"),
        ("jobs.csv", b"a.b\n1\n\xe4\n", "line 3 is not UTF-8"),
        ("jobs.csv", '"a.b\n', "line 1 is not CSV"),
    ],
)
def test_a_file_without_rows_is_refused(rows_of, tmp_path, name, content, reason):
    with pytest.raises(JobsError, match=reason):
        rows_of(name, content)
    with pytest.raises(JobsError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.csv")


def test_a_row_has_the_same_hash_wherever_it_stands(rows_of):
    lines = '{"a.b": 1}\n{"a.b": 2, "a.c": 3}\n{"a.b": 1}\n{"a.b": 1, "name": "x"}\n'
    before = rows_of("a.jsonl", lines)
    assert len({row.hash for row in before}) == 4
    after = rows_of("b.jsonl", '{"a.c": 3, "a.b": 2}\n{"a.b": 1}\n{"a.b": 9}\n{"a.b": 1}\n')
    common = {row.hash for row in before} & {row.hash for row in after}
    assert common == {row.hash for row in before[:3]}


def test_lines_with_one_reason_are_listed_as_ranges():
    found = {"line 4": [4], "lines 4, 9": [4, 9], "lines 2-4, 7-9": [9, 2, 3, 4, 7, 8]}
    for text, lines in found.items():
        assert lines_by_reason((line, "x") for line in lines) == {"x": (len(lines), text)}


WORKFLOW = {
    "3": {"class_type": "Sampler", "inputs": {"seed": 1, "cfg": 4.5, "model": ["1", 0]}},
    "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors", "strength": 2}},
    "129:86": {"class_type": "Loader", "inputs": {"own": "text", "made_up": 3}},
    "save": {"class_type": "Save"},
    "stack": {"class_type": "Stack", "inputs": {}},
}
TYPES = {
    "Sampler": {"seed": ["INT"], "cfg": ["FLOAT"], "model": ["MODEL"]},
    "Loader": {"file": [["a.safetensors", "7"]], "strength": [[1, 2]]},
    "Save": {"prefix": ["STRING"], "loop": ["BOOLEAN"]},
    "Stack": {"images": ["COMFY_AUTOGROW_V3"]},
}
SOCKETS = {node: sockets_of({"required": types}) for node, types in TYPES.items()}


def changed(values, *, as_text=True):
    row = Row(line=2, position=1, hash="h", values=values, as_text=as_text)
    return apply_row(WORKFLOW, row, SOCKETS)


@pytest.mark.parametrize(
    ("key", "text", "node", "value"),
    [
        ("3.seed", "7", "3", 7),
        ("Sampler.seed", "7", "3", 7),
        ("3.cfg", "3", "3", 3),
        ("3.model", '["129:86", 0]', "3", ["129:86", 0]),
        ("1.file", "7", "1", "7"),
        ("1.strength", "2", "1", 2),
        ("129:86.file", "c.safetensors", "129:86", "c.safetensors"),
        ("129:86.own", "12", "129:86", "12"),
        ("129:86.made_up", "12", "129:86", 12),
        ("Save.prefix", "12", "save", "12"),
        ("save.loop", "TRUE", "save", True),
        ("save.loop", "false", "save", False),
        ("stack.images.image0", '["1", 0]', "stack", ["1", 0]),
    ],
)
def test_a_cell_becomes_what_the_input_takes(key, text, node, value):
    before = copy.deepcopy(WORKFLOW)
    found = changed({key: text})[node]["inputs"][key.split(".", 1)[1]]
    assert (found, type(found)) == (value, type(value))
    assert before == WORKFLOW


def test_json_values_stay_as_they_are():
    found = changed({"3.seed": "7", "save.prefix": 5}, as_text=False)
    assert (found["3"]["inputs"]["seed"], found["save"]["inputs"]["prefix"]) == ("7", 5)


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("4.seed", "7", "no such node; the workflow has 3, 1, 129:86"),
        ("Loader.file", "x", "several nodes are of the class Loader: use an id, 1, 129:86"),
        ("3.sed", "7", "Sampler has no input sed; did you mean seed\\? it has seed, cfg, model"),
        ("3.seed", "seven", "3.seed is INT, but 'seven' is not a whole number$"),
        ("save.loop", "yes", "save.loop is BOOLEAN, but 'yes' is not true or false$"),
        ("129:86.made_up", "x", "129:86.made_up is not a text"),
    ],
)
def test_what_the_workflow_has_no_place_for_is_refused(key, text, reason):
    with pytest.raises(InputError, match=reason):
        changed({key: text})
