"""Rows as lanes in one pass: shared nodes, each row's nodes, and why rows run alone."""

from __future__ import annotations

import asyncio
import json

import pytest

from wanstream.batch.rows.lanes import (
    LANE,
    LANE_LATENT,
    LANE_SAMPLER,
    MAX_LANES,
    OWN_INPUTS,
    SAMPLER,
    digest_of_lane,
    lane_jobs,
    lane_planner,
)
from wanstream.batch.rows.rows import BatchJob, Row, workflow_digest
from wanstream.host.embedded.workflow.graph import as_link
from wanstream.nodes import WanStreamExtension
from wanstream.tests.support.batch.command import Prompt, shipped

NODES = asyncio.run(WanStreamExtension().get_node_list())
SCHEMAS = {node.__name__: node.define_schema() for node in NODES}
HIGH = "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"
UNSEEN = "no other row is left to share a pass with"
SAVER = "WanStreamSaveVideo"
TWICE = (LANE, LANE_LATENT, "WanStreamVAEDecode", SAVER)


def row(name="t2v", /, seed=0, **changes):
    """Return a shipped workflow with changed inputs by node."""
    changes["sampler"] = {"seed": seed, **changes.get("sampler", {})}
    return shipped(name, **changes)


def seeds(*numbers: int) -> dict[int, Prompt]:
    return {number: row(seed=number) for number in numbers}


def jobs_of(prompts: dict[int, Prompt], lanes: int) -> list[BatchJob]:
    """Return the jobs for rows with these workflows, by line."""
    rows = (Row(line=n, position=n, hash=str(n)) for n in prompts)
    return lane_jobs(dict(zip(rows, prompts.values(), strict=True)), lanes)


def lines(made: BatchJob) -> tuple[int, ...]:
    return tuple(row.line for row in made.rows)


def only(*prompts: Prompt, lanes: int = 8) -> BatchJob:
    """Return the one pass for these workflows, which are rows 1, 2 ..."""
    (made,) = jobs_of(dict(enumerate(prompts, 1)), lanes)
    return made


def ids_of(made: BatchJob) -> list[dict[str, str]]:
    """Return each row's own nodes in the merged workflow, by their ids in the row's workflow."""
    return [
        {each.removeprefix(f"lane{number}_"): each for each in own or ()}
        for number, own in enumerate(made.saves.values(), 1)
    ]


def classes(made: BatchJob) -> list[str]:
    return sorted(node["class_type"] for node in made.prompt.values())


def test_rows_with_other_seeds_share_conditioning():
    made = only(row(seed=7), row(seed=8))
    plain = row()
    assert (lines(made), made.reason) == ((1, 2), "")
    loaders = ["WanStreamExperts", "WanStreamLayerwise", "WanStreamTextEncode"]
    assert classes(made) == sorted([*TWICE, *TWICE, *loaders, "WanStreamEmptyLatent", LANE_SAMPLER])
    for node_id in ("experts", "policy", "text", "latent"):
        assert made.prompt[node_id] == plain[node_id]
    given = plain["sampler"]["inputs"].items()
    settings = {name: value for name, value in given if name not in OWN_INPUTS}
    assert made.prompt["sampler"]["inputs"] == {**settings, "lanes": ["lane_inputs2_sampler", 0]}
    first, second = made.saves.values()
    assert {"experts", "text", "sampler", "lane1_save"} <= first
    assert second == {"lane2_frames", "lane2_save", "lane2_sampler", "lane_inputs2_sampler"}


def test_every_row_keeps_what_is_its_own():
    texts = [f"a boat at {number} o'clock" for number in (1, 2, 3)]
    made = only(*(row(seed=n, text={"positive": text}) for n, text in enumerate(texts)))
    lanes = made.prompt["sampler"]["inputs"]["lanes"]
    for index in (2, 1, 0):
        lane = made.prompt[lanes[0]]
        assert lane["class_type"] == LANE
        assert lane["inputs"].keys() <= {*OWN_INPUTS, "lanes"}
        assert lane["inputs"]["seed"] == index
        text, output = lane["inputs"]["positive"]
        assert (made.prompt[text]["inputs"]["positive"], output) == (texts[index], 0)
        assert lane["inputs"]["negative"] == [text, 1]
        assert lane["inputs"]["latent"] == ["latent", 0]
        lanes = lane["inputs"].get("lanes")
        save = made.prompt[ids_of(made)[index]["save"]]["inputs"]
        assert made.prompt[save["images"][0]]["inputs"]["latent"] == save["latent"]
        latent = made.prompt[save["latent"][0]]
        assert latent["class_type"] == LANE_LATENT
        assert latent["inputs"] == {"latents": ["sampler", 0], "index": index}
    assert lanes is None, "the first lane has none before it"


def test_two_rows_with_one_text_encode_it_once():
    made = only(*(row(seed=n, text={"positive": t}) for n, t in enumerate(["sun", "rain", "sun"])))
    assert classes(made).count("WanStreamTextEncode") == 2
    lanes = [made.prompt[f"lane_inputs{n}_sampler"]["inputs"] for n in (1, 2, 3)]
    assert lanes[0]["positive"] == lanes[2]["positive"] != lanes[1]["positive"]


def test_a_picture_that_nobody_reads_is_saved_for_every_row():
    preview = {"class_type": "PreviewImage", "inputs": {"images": ["image", 0]}}
    found = classes(only(*({**row("i2v", seed=n), "preview": preview} for n in (1, 2))))
    shared = ("PreviewImage", "LoadImage", "WanStreamImageToVideo")
    assert [found.count(each) for each in shared] == [2, 1, 1]


def test_images_are_each_rows_own():
    made = only(*(row("i2v", image={"image": f"{n}.png"}) for n in (1, 2)))
    assert classes(made).count("WanStreamImageToVideo") == 2
    assert classes(made).count("WanStreamTextEncode") == 1
    for ids, name in zip(ids_of(made), ("1.png", "2.png"), strict=True):
        start = made.prompt[ids["start"]]["inputs"]
        assert made.prompt[start["image"][0]]["inputs"]["image"] == name


def test_two_samplers_in_a_row_are_shared_both():
    def in_two(seed: int) -> Prompt:
        second = {"latent": ["first", 0], "start_step": 10, "add_noise": False}
        first = row(seed=seed, sampler={"end_step": 10})["sampler"]
        return {**row(sampler=second), "first": first}

    made = only(in_two(1), in_two(2))
    assert classes(made).count(LANE_SAMPLER) == 2
    for index in range(2):
        lane = made.prompt[f"lane_inputs{index + 1}_sampler"]
        source = made.prompt[lane["inputs"]["latent"][0]]
        assert lane["class_type"] == LANE
        assert source["inputs"] == {"latents": ["first", 0], "index": index}


def test_every_link_leads_to_a_node_of_the_pass():
    made = only(*(row("t2v_lightning", seed=n, text={"positive": str(n % 3)}) for n in range(8)))
    for node in made.prompt.values():
        for link in filter(None, map(as_link, node["inputs"].values())):
            assert link.node_id in made.prompt
            assert link.output < len(SCHEMAS[made.prompt[link.node_id]["class_type"]].outputs)
    own = [each for ids in made.saves.values() for each in ids or ()]
    assert sorted(own) == sorted(made.prompt), "every node belongs to one row"


def test_inputs_of_lane_nodes():
    """Otherwise a row's setting would be lost on the way."""
    names = {node: [each.id for each in SCHEMAS[node].inputs] for node in (SAMPLER, LANE)}
    settings = [name for name in names[SAMPLER] if name not in (*OWN_INPUTS, "experts")]
    assert [each.id for each in SCHEMAS[LANE_SAMPLER].inputs] == ["experts", "lanes", *settings]
    assert names[LANE] == [*OWN_INPUTS, "lanes"]
    of_lanes, of_one = (SCHEMAS[node].outputs[1:] for node in (LANE_SAMPLER, SAMPLER))
    assert [out.io_type for out in of_lanes] == [out.io_type for out in of_one]
    (index,) = (socket for socket in SCHEMAS[LANE_LATENT].inputs if socket.id == "index")
    assert index.as_dict()["max"] == MAX_LANES - 1


def test_other_outputs_come_from_the_lane_sampler():
    bench = {"class_type": "Reads", "inputs": {"run": ["sampler", 1]}}
    made = only(*({**row(seed=n), "bench": bench} for n in (1, 2)))
    read = [made.prompt[ids["bench"]]["inputs"]["run"] for ids in ids_of(made)]
    assert read == [["sampler", 1]] * 2


def test_ids_of_a_workflow_are_never_taken_twice():
    def odd(seed: int) -> Prompt:
        prompt = row(seed=seed, sampler={"latent": ["lane2_save", 0]})
        prompt["lane2_save"] = prompt.pop("latent")
        return prompt

    made = only(odd(1), odd(2))
    assert classes(made).count(SAVER) == 2
    assert made.prompt["lane2_save"] == row()["latent"]
    named_as_ours = only(*({**row(seed=n), "inputs1_sampler": row()["save"]} for n in (1, 2)))
    assert classes(named_as_ours).count(SAVER) == 4
    assert classes(named_as_ours).count(LANE) == 2


def test_rows_are_shared_out_in_their_order():
    passes = jobs_of(seeds(*range(1, 8)), 3)
    assert [lines(made) for made in passes] == [(1, 2, 3), (4, 5, 6), (7,)]
    assert [made.reason for made in passes] == ["", "", UNSEEN]
    assert (passes[2].prompt, passes[2].saves) == (row(seed=7), {"7": None})
    two_kinds = {n: row(seed=n, sampler={"steps": 4 if n % 2 else 8}) for n in range(1, 7)}
    assert [lines(made) for made in jobs_of(two_kinds, 4)] == [(1, 3, 5), (2, 4, 6)]
    one_left = {n: row(seed=n, sampler={"steps": 4 if n > 3 else 20}) for n in range(1, 6)}
    found = [(lines(made), made.reason) for made in jobs_of(one_left, 2)]
    assert found == [((1, 2), ""), ((3,), UNSEEN), ((4, 5), "")]


def test_one_lane_leaves_every_row_as_it_is():
    found = [(lines(made), made.prompt, made.reason) for made in jobs_of(seeds(1, 2), 1)]
    assert found == [((number,), row(seed=number), "") for number in (1, 2)]


@pytest.mark.parametrize(
    ("socket", "value", "shown"),
    [
        ("latent.width", 640, "640, that of line 1 is 832"),
        ("sampler.guidance_high", 1.0, "1, that of line 1 is 4"),
        ("sampler.add_noise", 1, "1, that of line 1 is True"),
        ("experts.high_noise", "other.gguf", f"other.gguf, that of line 1 is {HIGH}"),
        ("policy.prefetch_blocks", 2, "2, that of line 1 is 1"),
    ],
)
def test_a_row_that_fits_no_other_runs_alone(socket, value, shown):
    node, name = socket.split(".")
    other = row(**{node: {name: value}})
    together, alone = jobs_of({**seeds(1, 2), 3: other}, 4)
    assert (lines(together), together.reason) == ((1, 2), "")
    assert (lines(alone), alone.reason) == ((3,), f"its {socket} is {shown}")
    assert alone.prompt == other


def test_the_same_number_written_in_two_ways_is_the_same():
    first = row(sampler={"guidance_low": 3}, policy={"prefetch_blocks": 1.0})
    second = row(sampler={"guidance_low": 3.0})
    second["sampler"]["_meta"] = {"title": "another"}
    made = only(first, second)
    assert "policy" in made.prompt
    found = classes(made)
    assert [found.count(each) for each in TWICE] == [2] * 4, "equal rows save a video each"
    assert workflow_digest(row(sampler={"guidance_low": 3})) == workflow_digest(second)


def test_a_sampler_without_a_policy_fits_none_with_one():
    bare = row()
    del bare["sampler"]["inputs"]["policy"]
    _, alone = jobs_of({1: row(), 2: bare}, 2)
    assert alone.reason == "its policy is missing, that of line 1 is WanStreamLayerwise"


def test_settings_that_come_from_another_video_cannot_be_shared():
    def chained(seed: int) -> Prompt:
        levels = {"class_type": "SigmasOf", "inputs": {"latent": ["first", 0]}}
        sampler = {"sigmas": ["levels", 0]}
        return {**row(seed=seed, sampler=sampler), "first": row()["sampler"], "levels": levels}

    reason = "the settings of sampler, common to all lanes, depend on first, which makes one video"
    assert [made.reason for made in jobs_of({1: chained(1), 2: chained(2)}, 2)] == [reason] * 2


def test_a_broken_workflow_is_left_to_those_who_judge_workflows():
    """A cycle or a link to nowhere stays in the pass as it was, and ends nothing here."""
    broken = {"text": {"positive": ["text", 0]}, "save": {"fps": ["gone", 0]}}
    made = only(row(seed=1, **broken), row(seed=2, **broken))
    assert made.prompt["text"]["inputs"]["positive"] == ["text", 0]
    assert [made.prompt[ids["save"]]["inputs"]["fps"] for ids in ids_of(made)] == [["gone", 0]] * 2


@pytest.mark.parametrize("name", ["t2v", "i2v", "flf2v", "t2v_lightning"])
def test_the_nodes_of_a_row_name_its_workflow(name):
    texts = ("sun", "rain", "sun")
    prompts = [row(name, seed=n, text={"positive": text}) for n, text in enumerate(texts)]
    made = only(*prompts)
    assert len({workflow_digest(prompt) for prompt in prompts}) == 3
    read = json.loads(json.dumps(made.prompt))
    for prompt, ids in zip(prompts, ids_of(made), strict=True):
        assert digest_of_lane(read, ids["save"]) == workflow_digest(prompt)
    for shared in ("experts", "sampler", "nobody"):
        assert digest_of_lane(made.prompt, shared) is None


@pytest.mark.parametrize("prompt", [row(), {"save": {"_meta": "a title"}}, {"save": 3}, None])
def test_a_prompt_that_is_not_of_a_pass_names_no_row(prompt):
    assert digest_of_lane(prompt, "save") is None


@pytest.fixture
def planned():
    """`planned(lanes, *values, workflow=...)` returns the jobs for rows, and the messages."""

    def make(lanes, *values, workflow=None):
        told: list[str] = []
        rows = [Row(line=n, position=n, hash=str(n), values=v) for n, v in enumerate(values, 1)]
        plan = lane_planner(workflow or row(), {}, lanes, told.append)
        jobs = plan(rows)
        # Rows that are tried again alone are not told of.
        before = [*told]
        assert [lines(made) for made in plan(rows[1:2])] == [(2,)]
        assert plan([]) == []
        assert told == before
        return jobs, told

    return make


def test_every_row_has_the_nodes_that_save_its_files(planned):
    jobs, told = planned(2, *({"sampler.seed": seed} for seed in range(5)))
    assert [lines(job) for job in jobs] == [(1, 2), (3, 4), (5,)]
    for job in jobs[:2]:
        one, other = (job.saves[row.hash] for row in job.rows)
        assert one.isdisjoint(other)
        savers = {name for name, node in job.prompt.items() if node["class_type"] == SAVER}
        assert len(one & savers) == len(other & savers) == 1
        assert one | other == job.prompt.keys()
    assert (jobs[2].saves, jobs[2].prompt) == ({"5": None}, row(seed=4))
    assert told == [f"line 5 runs alone: {UNSEEN}"]
    _, told = planned(4, {}, {"sampler.seed": 1}, {"latent.width": 640}, {"sampler.steps": 4})
    assert [each.partition(":")[0] for each in told] == ["line 3 runs alone", "line 4 runs alone"]
    jobs, told = planned(1, {"sampler.seed": 1}, {"sampler.seed": 2, "sampler.steps": 3})
    assert ([lines(job) for job in jobs], told) == ([(1,), (2,)], [])


@pytest.mark.parametrize(
    ("count", "who"),
    [(2, "line 1 and line 2"), (3, "line 1, line 2 and line 3"), (20, "line 1 and 19 more")],
)
def test_many_rows_with_one_reason_are_one_line(planned, count, who):
    foreign = {"noise": {"class_type": "RandomNoise", "inputs": {"noise_seed": 0}}}
    values = [{"noise.noise_seed": seed} for seed in range(count)]
    jobs, told = planned(4, *values, workflow=foreign)
    assert len(jobs) == count
    reason = f"its workflow has no {SAMPLER}, the node whose passes lanes share"
    assert told == [f"{who} run alone: {reason}"]
