"""Rows that continue others: links, the workflow's input, job order, and failures."""

from __future__ import annotations

import hashlib
import json
import random
import re
from contextlib import suppress

import pytest
import torch
from PIL import Image

from wanstream.batch import output_store
from wanstream.batch.backend import Ended, MadeFile, own_nodes
from wanstream.batch.errors import RefusedError, SetupError, UnreachableError
from wanstream.batch.journal.entry import State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.rows import rows as row_file
from wanstream.batch.rows.continued import continue_from, latent_name
from wanstream.batch.rows.lanes import lane_jobs
from wanstream.cli import main
from wanstream.cli.arguments import DONE, INVALID
from wanstream.host.embedded.workflow.inputs import InputError
from wanstream.tests.support.batch.command import Prompt, command_line, shipped, write_rows
from wanstream.tests.support.batch.fake_batch import Bench, Killed, Mishaps, Server, raising
from wanstream.tests.support.host.embedded import run_workflow
from wanstream.wan.latents.file import read_latent, write_latent

WORKFLOW = shipped("continue_video")
CHAIN = [
    {"name": "a", "sampler.seed": 1},
    {"name": "b", "continues": "a", "sampler.seed": 2},
    {"name": "c", "continues": "B", "sampler.seed": 3},
    {"sampler.seed": 4},
]
CIRCLE = "which continues it in turn: a circle"


@pytest.fixture
def rows_of(tmp_path):
    """`rows_of(*rows)` returns rows read from JSON lines."""
    return lambda *rows: row_file.read_rows(write_rows(tmp_path, *rows))


def test_a_row_has_the_hash_and_the_depth_of_its_source(rows_of):
    a, b, c, other = rows = rows_of(*CHAIN)
    assert [row.fault for row in rows] == [None] * 4
    assert [row.depth for row in rows] == [0, 1, 2, 0]
    assert (b.source, c.source, other.source) == (a.hash, b.hash, None)
    assert dict(b.values) == {"sampler.seed": 2}
    shuffled = rows_of(*(CHAIN[at] for at in (2, 3, 1, 0)))
    assert {row.hash for row in shuffled} == {row.hash for row in rows}
    assert [row.depth for row in shuffled] == [2, 0, 1, 0]
    changed = rows_of({"name": "a", "sampler.seed": 9}, *CHAIN[1:])
    same = [old.hash == new.hash for old, new in zip(rows, changed, strict=True)]
    assert same == [False, False, False, True]


def test_the_digest_of_a_plain_row_is_that_of_earlier_versions(rows_of):
    """Otherwise a batch from an earlier version would run again."""
    (row,) = rows_of({"sampler.seed": 1})
    text = json.dumps({"sampler.seed": 1}, sort_keys=True)
    assert row.hash == hashlib.sha256(json.dumps([text, 0]).encode()).hexdigest()


def test_a_row_that_can_continue_none_is_at_fault(rows_of):
    names = {"a": "a", "b": "x", "c": "c", "d": "e", "e": "d", "f": "d", "g": "", "h": 5, "i~": "i"}
    rows = [{"name": name, "continues": source} for name, source in names.items()]
    faults = [row.fault or "" for row in rows_of(*rows, {"continues": "i~"})]
    nobody = "no row has this name"
    wanted = [
        f"continues 'a', {CIRCLE}",
        f"continues 'x': {nobody}",
        f"continues 'c', {CIRCLE}",
        "it continues 'e' (line 5), which cannot run",
        f"continues 'd', {CIRCLE}",
        "it continues 'd' (line 4), which cannot run",
        nobody,
        "continues is a text, not 5",
        "not a valid file name",
        "it continues 'i~' (line 9), which cannot run",
    ]
    assert all(part in fault for fault, part in zip(faults, wanted, strict=True)), faults


def test_a_long_chain_is_linked_from_either_end(rows_of):
    chain = [{"name": "0"}, *({"name": str(n), "continues": str(n - 1)} for n in range(1, 1500))]
    assert [row.depth for row in rows_of(*chain)] == [*range(1500)]
    assert [row.depth for row in rows_of(*reversed(chain))] == [*reversed(range(1500))]


def test_a_fault_that_is_found_later_is_passed_on(rows_of):
    a, b, c, other = rows_of(*CHAIN)
    faulty = row_file.Row(line=1, position=1, hash=a.hash, name="a", fault="no such input")
    faults = [bool(row.fault) for row in row_file.fail_dependents([c, b, faulty, other])]
    assert faults == [True, True, True, False]


def test_the_workflow_of_a_row_names_the_latent_of_its_source(rows_of):
    a, b, *_ = rows_of(*CHAIN)
    other = shipped("continue_video", sampler={"steps": 7})
    prompts = [
        row_file.apply_row(*given, {}) for given in ((WORKFLOW, a), (WORKFLOW, b), (other, b))
    ]
    names = [prompt["clip"]["inputs"]["previous_file"] for prompt in prompts]
    assert names[:2] == ["none", latent_name(row_file.workflow_digest(WORKFLOW), a.hash)]
    assert names[2] != names[1], "other batches have other latents on a server"
    assert all(name.startswith("continued/") and name.endswith(".latent") for name in names[1:])
    assert prompts[1]["sampler"]["inputs"]["seed"] == 2
    assert shipped("continue_video") == WORKFLOW, "unchanged"


def without(node: str) -> Prompt:
    return {node_id: value for node_id, value in WORKFLOW.items() if node_id != node}


@pytest.mark.parametrize(
    ("workflow", "reason"),
    [
        (without("clip"), "one WanStreamContinueVideo whose previous is not connected .* has 0"),
        ({**WORKFLOW, "more": WORKFLOW["clip"]}, r"which has 2 \(clip, more\)"),
        (without("keep"), "needs one WanStreamSaveLatent or SaveLatent .* which has 0"),
    ],
)
def test_a_workflow_needs_one_place_for_the_latent(workflow, reason):
    with pytest.raises(InputError, match=reason):
        continue_from(workflow, workflow, "continued/x.latent")


def test_clip_that_continues_its_own_workflow_is_no_place():
    inner = shipped("continue_video", clip={"previous": ["sampler", 0]})["clip"]
    prompt = continue_from({**WORKFLOW, "inner": inner}, WORKFLOW, "continued/x.latent")
    assert prompt["clip"]["inputs"]["previous_file"] == "continued/x.latent"
    assert prompt["inner"]["inputs"]["previous_file"] == "none"


def test_a_row_does_not_choose_a_file_too(rows_of):
    row = {"continues": "a", "clip.previous_file": "mine.latent [input]"}
    with pytest.raises(InputError, match=r"sets clip\.previous_file, and continues a row"):
        row_file.apply_row(WORKFLOW, rows_of({"name": "a"}, row)[1], {})


def test_rows_that_continue_one_another_never_share_a_pass(rows_of):
    rows = rows_of(*CHAIN, {"name": "d", "continues": "a", "sampler.seed": 5})
    jobs = lane_jobs({row: row_file.apply_row(WORKFLOW, row, {}) for row in rows}, 4)
    assert [[row.position for row in job.rows] for job in jobs] == [[1, 4], [2, 5], [3]]


def test_a_latent_in_the_folder_is_checked_and_has_its_workflow(tmp_path):
    path = tmp_path / "a.latent"
    metadata = {"prompt": WORKFLOW, "wanstream_node": "keep"}
    write_latent(path, torch.zeros(1, 16, 2, 4, 4), metadata=metadata)
    output_store.check_media(path)
    assert output_store.stored_prompt(path) == (WORKFLOW, "keep")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(output_store.UnreadableFileError, match="cannot be read to its end"):
        output_store.check_media(path)
    assert output_store.stored_prompt(path) == (None, None)


class Machine(Server):
    """A server with hashes of seed and continued latent as videos. All workflows end at once."""

    def __init__(self, name: str = "there", **behaviour) -> None:
        super().__init__(name, steps=0, **behaviour)
        self.latents: dict[str | None, str] = {}

    def provide(self, prompt_id, latent, name):
        self._enter("provide")
        self.latents[name] = latent.read_text()

    def _save(self, prompt):
        self.made.append(prompt["seed"])
        video = video_of(prompt["seed"], prompt["file"] and self.latents[prompt["file"]])
        files = {f"{len(self.files)}_{kind}": video for kind in ("latent.latent", "video.txt")}
        self.files |= files
        return Ended(files=tuple(MadeFile(node_id="n", filename=n, subfolder="") for n in files))


def video_of(seed: str, latent: str | None) -> str:
    return hashlib.sha256(f"{seed} after {latent}".encode()).hexdigest()


def plan(rows):
    jobs = []
    for row in rows:
        seed = str(row.values["sampler.seed"])
        prompt = {"seed": seed, "file": row.source and latent_name("w", row.source)}
        jobs.append(row_file.BatchJob(prompt=prompt, rows=(row,), saves={row.hash: None}))
    return jobs


class Chain:
    """Batches with the same output folder and rows. The files of `Machine` are text."""

    def __init__(self, folder):
        self.folder = folder / "out"
        self.machine = Machine()
        # Each row continues the one before by number.
        rows = [{"name": f"r{n}", "sampler.seed": n, "continues": f"r{n - 1}"} for n in range(10)]
        del rows[0]["continues"]
        random.Random(3).shuffle(rows)
        self.use(*rows)

    def use(self, *rows: object) -> None:
        self.rows = row_file.read_rows(write_rows(self.folder.parent, *rows))

    def run(self, *machines: Machine, max_failures: int | None = None) -> dict[str, State]:
        """Run, and return the states by row name."""
        bench = Bench(self.folder, *(machines or [self.machine]), rows=self.rows)
        bench.planner = plan
        bench.max_failures = max_failures
        entries = bench.run().journal.entries
        self.failures = bench.reporter.failures
        return {str(row.name): entries[row.hash].state for row in self.rows}

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.folder.glob("*~*"))}

    def check_ten(self, states: dict[str, State]) -> None:
        """All ten rows are done, and each continues the right one."""
        latent = None
        wanted = dict[str, str]()
        for number in range(10):
            latent = video_of(str(number), latent)
            wanted |= dict.fromkeys((f"r{number}~1.latent", f"r{number}~2.txt"), latent)
        assert {*states.values()} == {State.done}
        assert self.files() == wanted


@pytest.fixture
def chain(tmp_path, monkeypatch):
    monkeypatch.setattr("wanstream.batch.output_store.check_media", lambda path: None)
    return Chain(tmp_path)


def bad(*seeds):
    return lambda prompt: prompt["seed"] in seeds and "no memory"


def test_a_chain_goes_on_at_another_server(chain):
    """The client has the previous row's latent, whichever server made it."""
    lost = Machine("lost")
    other = Machine("other")
    lost.called = lambda call: setattr(lost, "gone", len(lost.ids) >= 3 and call != "fetch")
    other.called = lambda call: setattr(other, "gone", call == "post" and len(lost.ids) < 3)
    chain.check_ten(chain.run(lost, other))
    assert (lost.made, other.made) == (["0", "1"], [str(number) for number in range(2, 10)])


@pytest.mark.parametrize("seed", range(6))
def test_kills_lose_double_and_change_no_row(chain, seed):
    mishaps = Mishaps(seed, 30, 0.1)

    def happen(_: object) -> None:
        what = mishaps.next("kill", "silence")
        if what:
            raise Killed if what == "kill" else UnreachableError(what)

    chain.machine.called = chain.machine.fetching = happen
    states: dict[str, State] = {}
    while not states:
        with suppress(Killed):
            states = chain.run()
    assert mishaps.happened
    chain.check_ten(states)


def test_rows_that_continue_a_failed_one_are_not_run(chain):
    chain.machine.bad = bad("3")
    states = chain.run()
    assert chain.machine.made == ["0", "1", "2"]
    assert [states[f"r{number}"] for number in range(10)] == [State.done] * 3 + [State.failed] * 7
    line = next(row.line for row in chain.rows if row.name == "r3")
    reason = f"not run: it continues 'r3' (line {line}), which failed"
    assert chain.failures[:2] == ["failed r3: no memory", f"failed r4: {reason}"]
    assert len(chain.failures) == 7
    chain.machine.bad = bad()
    chain.check_ten(chain.run())


def test_changed_rows_run_when_the_former_files_are_moved_away(chain):
    chain.use(*CHAIN[:3])
    chain.run()
    former = chain.files()
    chain.use({"name": "a", "sampler.seed": 9}, *CHAIN[1:3])
    assert chain.run() == dict.fromkeys("abc", State.failed)
    with Journal(chain.folder / "journal.sqlite", workflow="w") as journal:
        for row in chain.rows:
            error = str(journal.entries[row.hash].error)
            assert f"name '{row.name}' is used by the files of a former row" in error
            assert "rename it, or move those files away" in error
    assert chain.files() == former
    changed = chain.rows
    renamed = {"name": "b2", "continues": "a2", "sampler.seed": 2}
    chain.use({"name": "a2", "sampler.seed": 9}, renamed)
    assert chain.run() == {"a2": State.done, "b2": State.done}
    for path in chain.folder.glob("[abc]~*"):
        path.unlink()
    chain.rows = changed
    assert chain.run() == dict.fromkeys("abc", State.done)
    assert chain.files()["c~1.latent"] == video_of("3", video_of("2", video_of("9", None)))


@pytest.mark.parametrize("first", [CHAIN[0], {"name": "a", "continues": "nobody"}])
def test_rows_that_were_not_run_do_not_count_as_failures(chain, first):
    chain.machine.bad = bad("1")
    chain.use(first, *CHAIN[1:3], {"name": "z", "sampler.seed": 8})
    assert chain.run(max_failures=2) == {**dict.fromkeys("abc", State.failed), "z": State.done}
    if "continues" in first:
        chain.use(first, {"name": "y", "sampler.seed": 7})
        assert chain.run(max_failures=1)["y"] is State.waiting, "its own fault counts"


@pytest.mark.parametrize(
    ("removed", "killed_at"),
    [("b~1.latent", ""), ("b~2.txt", "outcome"), ("b~1.latent", "fetch"), ("b~2.txt", "place")],
)
def test_a_row_of_which_one_file_was_removed_is_made_again(chain, monkeypatch, removed, killed_at):
    chain.use(*CHAIN)
    chain.run()
    made = chain.files()
    (chain.folder / removed).unlink()
    chain.machine.made.clear()
    if killed_at:
        target = output_store.OutputStore if killed_at == "place" else chain.machine
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(target, killed_at, lambda *_: raising(Killed())(""))
            chain.run()
    assert {*chain.run().values()} == {State.done}
    assert {*chain.machine.made} == {"2"}
    assert chain.files() == made
    # A changed file of a row that runs again is not replaced.
    (chain.folder / "b~1.latent").unlink()
    (chain.folder / "b~2.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"b~2\.txt, which is not from this batch or was changed"):
        chain.run()
    assert (chain.folder / "b~2.txt").read_text() == "mine"


class Forgetful(Machine):
    """A server without the latents."""

    def _save(self, prompt):
        return Ended(files=super()._save(prompt).files[1:])


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Forgetful(), "it continues 'a', of whose files one latent is needed in .*, not no latent"),
        (Machine(provide=lambda *_: raising(RefusedError("too large"))("")), "too large$"),
    ],
)
def test_a_row_without_its_latent_fails(chain, machine, reason):
    chain.use(*CHAIN[:2])
    assert chain.run(machine) == {"a": State.done, "b": State.failed}
    assert re.match(f"failed b: {reason}", chain.failures[0])


def test_a_latent_that_was_changed_is_not_continued(chain):
    chain.use(*CHAIN[:2])
    chain.machine.bad = bad("2")
    chain.run()
    latent = chain.folder / "a~1.latent"
    made = latent.read_text()
    latent.write_text("x" * len(made))
    chain.machine.bad = bad()
    with pytest.raises(SetupError, match=r"a~1\.latent, which is not from .*: move it away"):
        chain.run()
    latent.unlink()
    assert chain.run() == {"a": State.done, "b": State.done}
    assert latent.read_text() == made


def small(name: str = "continue_video", count: int = 1) -> Prompt:
    """Return a shipped workflow with some clips, small enough for a test."""
    changes = {"start": {"width": 32, "height": 32, "frames": 5}}
    changes["experts"] = {"compute_dtype": "fp32"}
    for end in ("", "_2", "_3")[:count]:
        changes |= {f"clip{end}": {"frames": 5}, f"sampler{end}": {"steps": 2}}
    return shipped(name, **changes)


@pytest.fixture
def batch(tmp_path, sample_models):
    """`batch(*rows, options=())` runs the small workflow into `out` and returns the exit code."""
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "example.png")
    places = ["--models", sample_models, "--input", tmp_path]

    def run(*rows, options=()):
        return main(command_line(tmp_path, small(), *rows, options=[*places, *options]))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--share-weights", "2"]], ids=["alone", "shared"])
def test_rows_make_the_clips_of_one_long_workflow(batch, tmp_path, sample_models, options):
    rows = [
        {"name": "b2", "continues": "a", "sampler.seed": 9},
        {"name": "c", "continues": "b", "sampler.seed": 44},
        {"name": "b", "continues": "a", "sampler.seed": 43},
        {"name": "a", "sampler.seed": 42},
    ]
    assert batch(*rows, options=options) == DONE
    samplers = {"a": "sampler", "b": "sampler_2", "c": "sampler_3"}
    places = {"models": sample_models, "output": tmp_path / "one", "input_dir": tmp_path}
    nodes = [*own_nodes().values()]
    long = small("long_video", 3)
    results = run_workflow(long, only=[*samplers.values()], nodes=nodes, **places).results
    files = {name: tmp_path / "out" / f"{name}~1.latent" for name in ("a", "b", "c", "b2")}
    made = {name: read_latent(file).samples for name, file in files.items()}
    for name, sampler in samplers.items():
        assert torch.equal(made[name], results[sampler][0]["samples"]), name
    assert not torch.equal(made["b2"], made["b"])
    assert not [*(tmp_path / "out" / ".wanstream").rglob("*.latent")], "copies are removed"


@pytest.mark.slow
def test_a_lost_journal_finds_the_rows_of_a_chain_by_their_files(batch, tmp_path):
    rows = [{"name": "a", "sampler.seed": 1}, {"name": "b", "continues": "a", "sampler.seed": 1}]
    made = []
    for _ in range(2):
        assert batch(*rows) == DONE
        made.append({path.name: path.read_bytes() for path in (tmp_path / "out").glob("*~*")})
        for path in (tmp_path / "out").glob("journal.sqlite*"):
            path.unlink()
    assert made[0] == made[1]


def test_a_dry_run_does_not_miss_the_latents_that_will_be_made(batch, capsys):
    assert batch(*CHAIN[:3], options=["--dry-run"]) == DONE
    assert "3 of 3 rows are valid" in capsys.readouterr().out
    rows = [{"name": "a", "sampler.steps": 0}, CHAIN[1], {"name": "c", "continues": "nobody"}]
    assert batch(*rows, options=["--dry-run"]) == INVALID
    said = capsys.readouterr().err
    assert "line 1: node sampler" in said
    assert "line 3: continues 'nobody': no row has this name" in said
