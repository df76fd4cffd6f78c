"""Rows that continue others: links, the workflow's input, job order, and failures."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wanstream.batch.backend import (
    Ended,
    JobFailed,
    MadeFile,
    Outcome,
    Unknown,
    own_nodes,
)
from wanstream.batch.errors import (
    RefusedError,
    SetupError,
    UnreachableError,
)
from wanstream.batch.journal.entry import State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.output_store import (
    OutputStore,
    UnreadableFileError,
    check_media,
    stored_prompt,
)
from wanstream.batch.rows.continued import continue_from, latent_name
from wanstream.batch.rows.lanes import lane_jobs
from wanstream.batch.rows.rows import (
    BatchJob,
    Row,
    apply_row,
    fail_dependents,
    read_rows,
    workflow_digest,
)
from wanstream.cli import main
from wanstream.cli.arguments import DONE, INVALID
from wanstream.host.embedded.workflow.inputs import InputError
from wanstream.tests.support.embedded import run_workflow
from wanstream.tests.support.fake_batch import Bench, Killed
from wanstream.wan.latents.file import read_latent, write_latent

WORKFLOW: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "workflows" / "api" / "continue_video.json").read_text(
        encoding="utf-8"
    )
)


def rows_of(folder: Path, *rows: object, name: str = "jobs.jsonl") -> list[Row]:
    (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return read_rows(folder / name)


CHAIN = [
    {"name": "a", "sampler.seed": 1},
    {"name": "b", "continues": "a", "sampler.seed": 2},
    {"name": "c", "continues": "B", "sampler.seed": 3},
    {"sampler.seed": 4},
]


def test_a_row_has_the_hash_and_the_depth_of_the_row_that_it_continues(tmp_path: Path) -> None:
    a, b, c, other = rows_of(tmp_path, *CHAIN)
    assert [row.fault for row in (a, b, c, other)] == [None] * 4
    assert [row.depth for row in (a, b, c, other)] == [0, 1, 2, 0]
    assert (b.source, c.source, other.source) == (a.hash, b.hash, None)
    assert dict(b.values) == {"sampler.seed": 2}
    shuffled = rows_of(tmp_path, *(CHAIN[at] for at in (2, 3, 1, 0)))
    assert {row.hash for row in shuffled} == {row.hash for row in (a, b, c, other)}
    assert [row.depth for row in shuffled] == [2, 0, 1, 0]


def test_a_table_has_a_column_for_it(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("name,continues,sampler.seed\na,,1\nb,a,2\n")
    a, b = read_rows(tmp_path / "jobs.csv")
    assert (a.continues, b.continues, b.source) == (None, "a", a.hash)


def test_a_change_of_the_row_before_changes_the_row(tmp_path: Path) -> None:
    before = rows_of(tmp_path, *CHAIN)
    after = rows_of(tmp_path, {"name": "a", "sampler.seed": 9}, *CHAIN[1:])
    assert [old.hash == new.hash for old, new in zip(before, after, strict=True)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        ([{"name": "a"}, {"continues": "x"}], [None, "continues 'x': no row has this name"]),
        (
            [{"name": "a", "continues": "a"}],
            ["continues 'a', which continues it in turn: a circle"],
        ),
        (
            [
                {"name": "a", "continues": "b"},
                {"name": "b", "continues": "a"},
                {"continues": "a", "name": "c"},
            ],
            [
                "it continues 'b' (line 2), which cannot run",
                "continues 'a', which continues it in turn: a circle",
                "it continues 'a' (line 1), which cannot run",
            ],
        ),
        (
            [{"name": "a~"}, {"continues": "a~"}],
            ["not a valid file name", "it continues 'a~' (line 1), which cannot"],
        ),
        ([{"continues": 5}], ["continues is a text, not 5"]),
        ([{"name": "a"}, {"continues": ""}], [None, "no row has this name"]),
    ],
)
def test_a_row_that_can_continue_none_is_at_fault(
    tmp_path: Path, rows: list[object], faults: list[str | None]
) -> None:
    found = rows_of(tmp_path, *rows)
    for row, fault in zip(found, faults, strict=True):
        assert row.fault == fault if fault is None else fault in str(row.fault)


def test_a_long_chain_is_linked_from_either_end(tmp_path: Path) -> None:
    chain = [
        {"name": str(number), **({"continues": str(number - 1)} if number else {})}
        for number in range(3000)
    ]
    assert [row.depth for row in rows_of(tmp_path, *chain)] == [*range(3000)]
    assert [row.depth for row in rows_of(tmp_path, *reversed(chain))] == [*reversed(range(3000))]


def test_a_fault_that_is_found_later_is_passed_on(tmp_path: Path) -> None:
    a, b, c, other = rows_of(tmp_path, *CHAIN)
    rows = fail_dependents(
        [c, b, Row(line=1, position=1, hash=a.hash, name="a", fault="no such input"), other]
    )
    assert [bool(row.fault) for row in rows] == [True, True, True, False]


def test_the_workflow_of_a_row_names_the_latent_of_the_row_before(tmp_path: Path) -> None:
    a, b, *_ = rows_of(tmp_path, *CHAIN)
    prompts = [apply_row(WORKFLOW, row, {}) for row in (a, b)]
    assert [prompt["clip"]["inputs"]["previous_file"] for prompt in prompts] == [
        "none",
        latent_name(workflow_digest(WORKFLOW), a.hash),
    ]
    assert prompts[1]["sampler"]["inputs"]["seed"] == 2
    assert WORKFLOW["clip"]["inputs"]["previous_file"] == "none"


def test_batches_of_other_workflows_have_other_latents_on_a_server(tmp_path: Path) -> None:
    _, row, *_ = rows_of(tmp_path, *CHAIN)
    other = json.loads(json.dumps(WORKFLOW))
    other["sampler"]["inputs"]["steps"] += 1
    names = [
        apply_row(workflow, row, {})["clip"]["inputs"]["previous_file"]
        for workflow in (WORKFLOW, other)
    ]
    assert names[0] != names[1]
    assert all(name.startswith("continued/") and name.endswith(".latent") for name in names)


def without(node: str) -> dict[str, Any]:
    return {node_id: value for node_id, value in WORKFLOW.items() if node_id != node}


@pytest.mark.parametrize(
    ("workflow", "reason"),
    [
        (
            without("clip"),
            "needs one WanStreamContinueVideo whose previous is not connected .* which has 0",
        ),
        ({**WORKFLOW, "more": WORKFLOW["clip"]}, r"which has 2 \(clip, more\)"),
        (
            without("keep"),
            "needs one WanStreamSaveLatent or SaveLatent in the workflow, which has 0",
        ),
    ],
)
def test_a_workflow_needs_one_place_for_the_latent(workflow: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        continue_from(workflow, workflow, "continued/x.latent")


def test_a_clip_that_continues_one_of_its_own_workflow_is_not_the_place() -> None:
    inner = {
        **WORKFLOW["clip"],
        "inputs": {**WORKFLOW["clip"]["inputs"], "previous": ["sampler", 0]},
    }
    prompt = continue_from({**WORKFLOW, "inner": inner}, WORKFLOW, "continued/x.latent")
    assert prompt["clip"]["inputs"]["previous_file"] == "continued/x.latent"
    assert prompt["inner"]["inputs"]["previous_file"] == "none"


def test_a_row_does_not_choose_a_file_too(tmp_path: Path) -> None:
    _, row = rows_of(
        tmp_path, {"name": "a"}, {"continues": "a", "clip.previous_file": "mine.latent [input]"}
    )
    with pytest.raises(InputError, match=r"sets clip\.previous_file, and continues a row"):
        apply_row(WORKFLOW, row, {})


def test_rows_that_continue_one_another_never_share_a_pass(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, *CHAIN, {"name": "d", "continues": "a", "sampler.seed": 5})
    jobs = lane_jobs({row: apply_row(WORKFLOW, row, {}) for row in rows}, 4)
    assert [[row.position for row in job.rows] for job in jobs] == [[1, 4], [2, 5], [3]]


def test_a_latent_in_the_folder_is_checked_and_has_its_workflow(tmp_path: Path) -> None:
    path = tmp_path / "a.latent"
    write_latent(
        path, torch.zeros(1, 16, 2, 4, 4), metadata={"prompt": WORKFLOW, "wanstream_node": "keep"}
    )
    check_media(path)
    assert stored_prompt(path) == (WORKFLOW, "keep")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnreadableFileError, match="cannot be read to its end"):
        check_media(path)
    assert stored_prompt(path) == (None, None)


IN_MEMORY = pytest.mark.usefixtures("text_for_latents")


class Machine:
    """A backend in memory, with hashes of seed and continued latent as videos."""

    name = address = "http://there"
    window = 2

    def __init__(self, chance: Callable[[str], None] = lambda call: None) -> None:
        self.chance = chance
        self.latents: dict[tuple[str, str], str] = {}
        self.ended: dict[str, Outcome] = {}
        self.files: dict[str, str] = {}
        self.posted: list[str] = []
        self.bad: frozenset[str] = frozenset()

    def check(self) -> None:
        self.chance("check")

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        self.chance("provide")
        self.latents[prompt_id, name] = latent.read_text()

    def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
        self.chance("post")
        text, name = str(prompt["seed"]), prompt["file"]
        self.posted.append(text)
        if text in self.bad:
            self.ended[prompt_id] = JobFailed(reason="no memory")
            return
        video = video_of(text, None if name is None else self.latents[prompt_id, name])
        made = []
        for suffix in ("latent.latent", "video.txt"):
            path = f"{len(self.files)}_{suffix}"
            self.files[path] = video
            made.append(MadeFile(node_id=suffix, filename=path, subfolder=""))
        self.ended[prompt_id] = Ended(files=tuple(made))
        self.chance("posted")

    def outcome(self, prompt_id: str) -> Outcome:
        self.chance("outcome")
        return self.ended.get(prompt_id, Unknown())

    def fetch(self, file: MadeFile, part: Path) -> None:
        part.write_text(self.files[file.filename][:3])
        self.chance("fetch")
        part.write_text(self.files[file.filename])

    def withdraw(self, prompt_id: str) -> None:
        self.chance("withdraw")

    def interrupt(self, prompt_id: str) -> None:
        self.chance("interrupt")

    def release(self, prompt_id: str) -> None:
        pass


def video_of(seed: str, latent: str | None) -> str:
    return hashlib.sha256(f"{seed} after {latent}".encode()).hexdigest()


def plan(rows: Sequence[Row]) -> list[BatchJob]:
    jobs = []
    for row in rows:
        name = None if row.source is None else latent_name("w", row.source)
        prompt: Any = {"seed": row.values["sampler.seed"], "file": name}
        jobs.append(BatchJob(prompt=prompt, rows=(row,), saves={row.hash: None}))
    return jobs


def run(
    folder: Path, machine: Any, rows: Sequence[Row], *others: Any, max_failures: int | None = None
) -> tuple[dict[str, State], list[str]]:
    """Run a batch on some machines, and return the states by row name and the failures."""
    bench = Bench(folder, machine, *others, rows=rows)
    bench.planner, bench.max_failures = plan, max_failures
    entries = bench.run().journal.entries
    return {str(row.name): entries[row.hash].state for row in rows}, bench.reporter.failures


@pytest.fixture
def text_for_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept `Machine`'s files, which are text."""
    monkeypatch.setattr("wanstream.batch.output_store.check_media", lambda path: None)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*~*"))}


def ten(folder: Path) -> list[Row]:
    """Return ten rows in random order, where each one continues the one before by number."""
    rows = [{"name": f"r{number}", "sampler.seed": number} for number in range(10)]
    rows = [
        {**row, "continues": f"r{number - 1}"} if number else row for number, row in enumerate(rows)
    ]
    random.Random(3).shuffle(rows)
    return rows_of(folder, *rows)


def expected_of_ten() -> dict[str, str]:
    found, latent = {}, None
    for number in range(10):
        latent = video_of(str(number), latent)
        found |= {f"r{number}~1.latent": latent, f"r{number}~2.txt": latent}
    return found


@IN_MEMORY
def test_rows_run_after_those_that_they_continue(tmp_path: Path) -> None:
    machine = Machine()
    states, _ = run(tmp_path / "out", machine, ten(tmp_path))
    assert {*states.values()} == {State.done}
    assert machine.posted == [str(number) for number in range(10)]
    assert contents(tmp_path / "out") == expected_of_ten()


@IN_MEMORY
def test_a_chain_goes_on_at_another_server(tmp_path: Path) -> None:
    """The client has the previous row's latent, whichever server made it."""
    lost, other = Machine(), Machine()
    other.name = other.address = "http://other"

    def leave(call: str) -> None:
        if len(lost.posted) >= 3 and call != "fetch":
            raise UnreachableError("no answer")

    def wait(call: str) -> None:
        if call == "post" and len(lost.posted) < 3:
            raise UnreachableError("no answer yet")

    lost.chance, other.chance = leave, wait
    states, _ = run(tmp_path / "out", lost, ten(tmp_path), other)
    assert {*states.values()} == {State.done}
    assert contents(tmp_path / "out") == expected_of_ten()
    assert lost.posted == ["0", "1", "2"]
    assert other.posted == [str(number) for number in range(2, 10)]


@IN_MEMORY
@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_is_killed_loses_doubles_and_changes_no_row(
    tmp_path: Path, seed: int
) -> None:
    chance, left = random.Random(seed), [30]

    def kill_or_silence(call: str) -> None:
        if left[0] and chance.random() < 0.1:
            left[0] -= 1
            if chance.random() < 0.5:
                raise Killed
            raise UnreachableError("silence")

    machine, rows = Machine(kill_or_silence), ten(tmp_path)
    for _ in range(40):
        try:
            states, _ = run(tmp_path / "out", machine, rows)
        except Killed:
            continue
        break
    assert left[0] < 30, "nothing happened"
    assert {*states.values()} == {State.done}
    assert contents(tmp_path / "out") == expected_of_ten()


@IN_MEMORY
def test_rows_that_continue_a_failed_one_are_not_run_and_said_so(tmp_path: Path) -> None:
    machine, rows = Machine(), ten(tmp_path)
    machine.bad = frozenset({"3"})
    states, failures = run(tmp_path / "out", machine, rows)
    assert machine.posted == ["0", "1", "2", "3"]
    assert [states[f"r{number}"] for number in range(10)] == [State.done] * 3 + [State.failed] * 7
    line = next(row.line for row in rows if row.name == "r3")
    assert failures[:2] == [
        "failed r3: no memory",
        f"failed r4: not run: it continues 'r3' (line {line}), which failed",
    ]
    assert len(failures) == 7
    machine.bad = frozenset()
    states, _ = run(tmp_path / "out", machine, rows)
    assert {*states.values()} == {State.done}
    assert contents(tmp_path / "out") == expected_of_ten()


@IN_MEMORY
def test_a_changed_row_and_those_behind_it_run_when_the_former_files_are_moved_away(
    tmp_path: Path,
) -> None:
    machine, changed = Machine(), [{"name": "a", "sampler.seed": 9}, *CHAIN[1:3]]
    run(tmp_path / "out", machine, rows_of(tmp_path, *CHAIN[:3]))
    former = contents(tmp_path / "out")
    rows = rows_of(tmp_path, *changed)
    states, _ = run(tmp_path / "out", machine, rows)
    assert states == dict.fromkeys("abc", State.failed)
    with Journal(tmp_path / "out" / "journal.sqlite", workflow="w") as journal:
        for row in rows:
            assert f"name '{row.name}' is used by the files of a former row" in str(
                journal.entries[row.hash].error
            )
            assert "rename it, or move those files away" in str(journal.entries[row.hash].error)
    assert contents(tmp_path / "out") == former
    renamed = [
        {"name": "a2", "sampler.seed": 9},
        {"name": "b2", "continues": "a2", "sampler.seed": 2},
    ]
    assert run(tmp_path / "out", machine, rows_of(tmp_path, *renamed))[0] == dict.fromkeys(
        ("a2", "b2"), State.done
    )
    for path in (tmp_path / "out").glob("[abc]~*"):
        path.unlink()
    states, _ = run(tmp_path / "out", machine, rows)
    assert states == dict.fromkeys("abc", State.done)
    latent = video_of("2", video_of("9", None))
    assert contents(tmp_path / "out")["c~1.latent"] == video_of("3", latent)


@IN_MEMORY
def test_rows_that_were_not_run_do_not_count_as_failures(tmp_path: Path) -> None:
    machine = Machine()
    machine.bad = frozenset({"1"})
    rows = rows_of(
        tmp_path, {"name": "a", "sampler.seed": 1}, *CHAIN[1:], {"name": "z", "sampler.seed": 8}
    )
    states, _ = run(tmp_path / "out", machine, rows, max_failures=2)
    assert states["z"] is State.done


@IN_MEMORY
def test_rows_behind_one_with_a_fault_do_not_count_as_failures(tmp_path: Path) -> None:
    rows = [{"name": "a", "continues": "nobody"}, *CHAIN[1:3], {"name": "z", "sampler.seed": 8}]
    states, _ = run(tmp_path / "out", Machine(), rows_of(tmp_path, *rows), max_failures=2)
    assert states == {**dict.fromkeys("abc", State.failed), "z": State.done}
    states, _ = run(tmp_path / "one", Machine(), rows_of(tmp_path, *rows), max_failures=1)
    assert states["z"] is State.waiting, "its own fault counts"


@IN_MEMORY
def test_a_latent_that_was_removed_is_made_again_for_the_rows_after_it(tmp_path: Path) -> None:
    machine, rows = Machine(), ten(tmp_path)
    run(tmp_path / "out", machine, rows)
    for path in (tmp_path / "out").glob("r[46]~*"):
        path.unlink()
    machine.posted.clear()
    run(tmp_path / "out", machine, rows)
    assert sorted(machine.posted) == ["4", "6"], "r5 still has its files"
    assert contents(tmp_path / "out") == expected_of_ten()


@IN_MEMORY
@pytest.mark.parametrize("removed", ["b~1.latent", "b~2.txt"])
@pytest.mark.parametrize("killed_at", ["", "outcome", "fetch", "place"])
def test_a_row_of_which_one_file_was_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str, killed_at: str
) -> None:
    machine, rows = Machine(), rows_of(tmp_path, *CHAIN)
    run(tmp_path / "out", machine, rows)
    made = contents(tmp_path / "out")
    (tmp_path / "out" / removed).unlink()
    machine.posted.clear()

    def kill(*_: object) -> None:
        raise Killed

    if killed_at:
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(
                *((OutputStore, "place") if killed_at == "place" else (machine, killed_at)), kill
            )
            run(tmp_path / "out", machine, rows)
    states, _ = run(tmp_path / "out", machine, rows)
    assert {*states.values()} == {State.done}
    assert {*machine.posted} == {"2"}
    assert contents(tmp_path / "out") == made


@IN_MEMORY
def test_a_changed_file_of_a_row_that_runs_again_is_not_replaced(tmp_path: Path) -> None:
    machine, rows = Machine(), rows_of(tmp_path, *CHAIN)
    run(tmp_path / "out", machine, rows)
    (tmp_path / "out" / "b~1.latent").unlink()
    (tmp_path / "out" / "b~2.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"contains b~2\.txt, which is not from this batch or was changed"
    ):
        run(tmp_path / "out", machine, rows)
    assert (tmp_path / "out" / "b~2.txt").read_text() == "mine"


@IN_MEMORY
def test_a_row_without_a_latent_cannot_be_continued(tmp_path: Path) -> None:
    class Forgetful(Machine):
        def outcome(self, prompt_id: str) -> Outcome:
            found = super().outcome(prompt_id)
            return Ended(files=found.files[1:]) if isinstance(found, Ended) else found

    states, failures = run(tmp_path / "out", Forgetful(), rows_of(tmp_path, *CHAIN[:2]))
    assert states == {"a": State.done, "b": State.failed}
    assert "it continues 'a', of whose files one latent is needed" in failures[0]
    assert "not no latent" in failures[0]


@IN_MEMORY
def test_a_latent_that_was_changed_is_not_continued(tmp_path: Path) -> None:
    machine, rows = Machine(), rows_of(tmp_path, *CHAIN[:2])
    machine.bad = frozenset({"2"})
    run(tmp_path / "out", machine, rows)
    latent = tmp_path / "out" / "a~1.latent"
    made = latent.read_text()
    latent.write_text("x" * len(made))
    machine.bad = frozenset()
    with pytest.raises(
        SetupError, match=r"a~1\.latent, which is not from this batch or was changed: move it away"
    ):
        run(tmp_path / "out", machine, rows)
    latent.unlink()
    states, _ = run(tmp_path / "out", machine, rows)
    assert states == {"a": State.done, "b": State.done}
    assert latent.read_text() == made


@IN_MEMORY
def test_a_latent_that_the_backend_refuses_fails_its_row(tmp_path: Path) -> None:
    class Small(Machine):
        def provide(self, prompt_id: str, latent: Path, name: str) -> None:
            raise RefusedError("too large")

    states, failures = run(tmp_path / "out", Small(), rows_of(tmp_path, *CHAIN[:2]))
    assert states == {"a": State.done, "b": State.failed}
    assert failures == ["failed b: too large"]


def test_the_digest_of_a_plain_row_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """Otherwise a batch from an earlier version would run again."""
    (row,) = rows_of(tmp_path, {"sampler.seed": 1})
    text = json.dumps({"sampler.seed": 1}, sort_keys=True)
    assert row.hash == hashlib.sha256(json.dumps([text, 0]).encode()).hexdigest()
    assert workflow_digest(WORKFLOW) == workflow_digest(json.loads(json.dumps(WORKFLOW)))


def small() -> dict[str, Any]:
    """Return the workflow, small enough for a test."""
    workflow: dict[str, Any] = json.loads(json.dumps(WORKFLOW))
    workflow["start"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
    workflow["clip"]["inputs"]["frames"] = 5
    workflow["sampler"]["inputs"]["steps"] = 2
    workflow["experts"]["inputs"]["compute_dtype"] = "fp32"
    return workflow


@pytest.fixture
def batch(tmp_path: Path, sample_models: Path) -> Callable[..., int]:
    """`batch(*rows, more=())` runs the small workflow into `out` and returns the exit code."""
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "example.png")
    (tmp_path / "workflow.json").write_text(json.dumps(small()), encoding="utf-8")

    def run(*rows: object, more: Sequence[str] = ()) -> int:
        (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        files = [str(tmp_path / "jobs.jsonl"), "--workflow", str(tmp_path / "workflow.json")]
        folders = [
            "--out",
            str(tmp_path / "out"),
            "--models",
            str(sample_models),
            "--input",
            str(tmp_path),
        ]
        return main(["batch", *files, *folders, *more])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--share-weights", "2"]], ids=["alone", "shared"])
def test_rows_make_the_clips_of_one_long_workflow(
    batch: Callable[..., int], tmp_path: Path, sample_models: Path, more: list[str]
) -> None:
    rows = [{"name": "a", "sampler.seed": 42}, {"name": "b", "continues": "a", "sampler.seed": 43}]
    rows += [
        {"name": "c", "continues": "b", "sampler.seed": 44},
        {"name": "b2", "continues": "a", "sampler.seed": 9},
    ]
    assert batch(*reversed(rows), more=more) == DONE
    long = small()
    for name, source, seed in (("2", "sampler", 43), ("3", "sampler2", 44)):
        inputs = {**long["clip"]["inputs"], "previous": [source, 0]}
        long[f"clip{name}"] = {**long["clip"], "inputs": inputs}
        links = {
            "positive": [f"clip{name}", 0],
            "negative": [f"clip{name}", 1],
            "latent": [f"clip{name}", 2],
        }
        long[f"sampler{name}"] = {
            **long["sampler"],
            "inputs": {**long["sampler"]["inputs"], **links, "seed": seed},
        }
    long["sampler"]["inputs"]["seed"] = 42
    long["keep"]["inputs"]["latent"] = ["sampler3", 0]
    samplers = {"a": "sampler", "b": "sampler2", "c": "sampler3"}
    nodes = [*own_nodes().values()]
    places = {"models": sample_models, "output": tmp_path / "one", "input_dir": tmp_path}
    results = run_workflow(long, nodes=nodes, keep=[*samplers.values()], **places).results
    for name, sampler in samplers.items():
        made = read_latent(tmp_path / "out" / f"{name}~1.latent").samples
        assert torch.equal(made, results[sampler][0]["samples"]), name
    branch = read_latent(tmp_path / "out" / "b2~1.latent").samples
    assert not torch.equal(branch, results["sampler2"][0]["samples"])
    assert not [*(tmp_path / "out" / ".wanstream").rglob("*.latent")], "copies are removed"


@pytest.mark.slow
def test_a_lost_journal_finds_the_rows_of_a_chain_by_their_files(
    batch: Callable[..., int], tmp_path: Path
) -> None:
    rows = [{"name": "a", "sampler.seed": 1}, {"name": "b", "continues": "a", "sampler.seed": 1}]
    assert batch(*rows) == DONE
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*~*")}
    for path in (tmp_path / "out").glob("journal.sqlite*"):
        path.unlink()
    assert batch(*rows) == DONE
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*~*")} == made


def test_a_dry_run_does_not_miss_the_latents_that_will_be_made(
    batch: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(*CHAIN[:3], more=["--dry-run"]) == DONE
    assert "3 of 3 rows are valid" in capsys.readouterr().out
    rows = [{"name": "a", "sampler.steps": 0}, *CHAIN[1:2], {"name": "c", "continues": "nobody"}]
    assert batch(*rows, more=["--dry-run"]) == INVALID
    said = capsys.readouterr().err
    assert "line 1: node sampler" in said
    assert "line 3: continues 'nobody': no row has this name" in said


def test_a_workflow_without_a_place_fails_the_row_and_those_behind_it(
    batch: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workflow.json").write_text(
        json.dumps({**small(), "keep": small()["save"]}), encoding="utf-8"
    )
    assert batch(*CHAIN[:3], more=["--dry-run"]) == INVALID
    said = capsys.readouterr().err
    assert (
        "line 2: a row that continues another one needs one WanStreamSaveLatent or SaveLatent"
        in said
    )
    assert "line 1" not in said
