"""Rows as lanes in one pass: shared nodes, each row's nodes, and why rows run alone."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

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
    merge_lanes,
)
from wanstream.batch.rows.rows import BatchJob, Row, workflow_digest
from wanstream.host.embedded.workflow.graph import as_link
from wanstream.nodes import WanStreamExtension

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
SCHEMAS = {
    node.__name__: node.define_schema()
    for node in asyncio.run(WanStreamExtension().get_node_list())
}
HIGH = "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"
UNSEEN = "no other row is left to share a pass with"

Prompt = dict[str, dict[str, Any]]


def row(name: str = "t2v", **changes: Any) -> Prompt:
    """The shipped workflow `name` with changes, each as `node__input=value`."""
    prompt: Prompt = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    for change, value in changes.items():
        node_id, socket = change.split("__")
        prompt[node_id]["inputs"][socket] = value
    return prompt


def seeds(*numbers: int, **changes: Any) -> dict[int, Prompt]:
    return {number: row(sampler__seed=number, **changes) for number in numbers}


def jobs_of(prompts: dict[int, Prompt], lanes: int) -> list[BatchJob]:
    """Return the jobs for rows with these workflows, by line."""
    return lane_jobs(
        {Row(line=n, position=n, hash=str(n)): prompt for n, prompt in prompts.items()}, lanes
    )


def lines(made: BatchJob) -> tuple[int, ...]:
    return tuple(row.line for row in made.rows)


def only(prompts: dict[int, Prompt], lanes: int = 4) -> BatchJob:
    (made,) = jobs_of(prompts, lanes)
    return made


def ids_of(made: BatchJob) -> list[dict[str, str]]:
    """Return each row's own nodes in the merged workflow, by their ids in the row's workflow."""
    return [
        {each.removeprefix(f"lane{number}_"): each for each in own or ()}
        for number, own in enumerate(made.saves.values(), 1)
    ]


def classes(made: BatchJob) -> list[str]:
    return sorted(node["class_type"] for node in made.prompt.values())


def test_rows_that_differ_in_their_seeds_share_everything_up_to_the_latent() -> None:
    made = only(seeds(7, 8))
    assert lines(made) == (7, 8)
    assert made.reason == ""
    own = [LANE, LANE_LATENT, "WanStreamVAEDecode", "WanStreamSaveVideo"] * 2
    shared = [
        "WanStreamExperts",
        "WanStreamLayerwise",
        "WanStreamTextEncode",
        "WanStreamEmptyLatent",
        LANE_SAMPLER,
    ]
    assert classes(made) == sorted(own + shared)
    plain = row()
    for node_id in ("experts", "policy", "text", "latent"):
        assert made.prompt[node_id] == plain[node_id]
    settings = {
        name: value for name, value in plain["sampler"]["inputs"].items() if name not in OWN_INPUTS
    }
    assert made.prompt["sampler"]["inputs"] == {**settings, "lanes": ["lane_inputs2_sampler", 0]}


def test_every_row_keeps_what_is_its_own() -> None:
    texts = {number: f"a boat at {number} o'clock" for number in (1, 2, 3)}
    made = only(
        {number: row(text__positive=text, sampler__seed=number) for number, text in texts.items()}
    )
    lanes = made.prompt["sampler"]["inputs"]["lanes"]
    for index, number in reversed([*enumerate(texts)]):
        lane = made.prompt[lanes[0]]
        assert lane["class_type"] == LANE
        assert lane["inputs"].keys() <= {*OWN_INPUTS, "lanes"}
        assert lane["inputs"]["seed"] == number
        text, output = lane["inputs"]["positive"]
        assert (made.prompt[text]["inputs"]["positive"], output) == (texts[number], 0)
        assert lane["inputs"]["negative"] == [text, 1]
        assert lane["inputs"]["latent"] == ["latent", 0]
        lanes = lane["inputs"].get("lanes")
        save = made.prompt[ids_of(made)[index]["save"]]["inputs"]
        frames = made.prompt[save["images"][0]]["inputs"]
        assert frames["latent"] == save["latent"]
        latent = made.prompt[save["latent"][0]]
        assert latent["class_type"] == LANE_LATENT
        assert latent["inputs"] == {"latents": ["sampler", 0], "index": index}
    assert lanes is None, "the first lane has none before it"


def test_two_rows_with_one_text_encode_it_once() -> None:
    made = only(
        {
            n: row(sampler__seed=n, text__positive=text)
            for n, text in enumerate(["sun", "rain", "sun"])
        }
    )
    assert classes(made).count("WanStreamTextEncode") == 2
    first, second, third = (
        made.prompt[f"lane_inputs{n}_sampler"]["inputs"]["positive"] for n in (1, 2, 3)
    )
    assert first == third != second


def test_rows_that_are_equal_save_a_video_each() -> None:
    made = only({1: row(), 2: row()})
    for each in (LANE, LANE_LATENT, "WanStreamVAEDecode", "WanStreamSaveVideo"):
        assert classes(made).count(each) == 2


def test_a_picture_that_nobody_reads_is_saved_for_every_row() -> None:
    def with_preview(seed: int) -> Prompt:
        preview = {"class_type": "PreviewImage", "inputs": {"images": ["image", 0]}}
        return {**row("i2v", sampler__seed=seed), "preview": preview}

    made = only({1: with_preview(1), 2: with_preview(2)})
    assert classes(made).count("PreviewImage") == 2
    assert classes(made).count("LoadImage") == 1
    assert classes(made).count("WanStreamImageToVideo") == 1


def test_images_are_each_rows_own() -> None:
    made = only({n: row("i2v", image__image=f"{n}.png") for n in (1, 2)})
    assert classes(made).count("WanStreamImageToVideo") == 2
    assert classes(made).count("WanStreamTextEncode") == 1
    for ids, name in zip(ids_of(made), ("1.png", "2.png"), strict=True):
        start = made.prompt[ids["start"]]["inputs"]
        assert made.prompt[start["image"][0]]["inputs"]["image"] == name


def test_two_samplers_in_a_row_are_shared_both() -> None:
    def in_two(seed: int) -> Prompt:
        prompt = row(sampler__latent=["first", 0], sampler__start_step=10, sampler__add_noise=False)
        first = copy.deepcopy(row(sampler__seed=seed, sampler__end_step=10)["sampler"])
        return {**prompt, "first": first}

    made = only({1: in_two(1), 2: in_two(2)})
    assert classes(made).count(LANE_SAMPLER) == 2
    for index in range(2):
        lane = next(
            node["inputs"]
            for node_id, node in made.prompt.items()
            if node["class_type"] == LANE and node_id == f"lane_inputs{index + 1}_sampler"
        )
        source = made.prompt[lane["latent"][0]]
        assert source["inputs"] == {"latents": ["first", 0], "index": index}


def test_every_link_leads_to_a_node_of_the_pass() -> None:
    made = only(
        {n: row("t2v_lightning", sampler__seed=n, text__positive=str(n % 3)) for n in range(8)},
        lanes=8,
    )
    for node in made.prompt.values():
        for link in filter(None, map(as_link, node["inputs"].values())):
            assert link.node_id in made.prompt
            assert link.output < len(SCHEMAS[made.prompt[link.node_id]["class_type"]].outputs)
    own = [each for ids in made.saves.values() for each in ids or ()]
    assert sorted(own) == sorted(made.prompt), "every node belongs to one row"


def test_the_lane_sampler_takes_what_the_sampler_takes_but_for_what_lanes_bring() -> None:
    """Otherwise a row's setting would be lost on the way."""

    def names(node: str) -> list[str]:
        return [socket.id for socket in SCHEMAS[node].inputs]

    settings = [name for name in names(SAMPLER) if name not in (*OWN_INPUTS, "experts")]
    assert names(LANE_SAMPLER) == ["experts", "lanes", *settings]
    assert names(LANE) == [*OWN_INPUTS, "lanes"]
    assert [output.io_type for output in SCHEMAS[LANE_SAMPLER].outputs[1:]] == [
        output.io_type for output in SCHEMAS[SAMPLER].outputs[1:]
    ]


def test_another_output_of_the_sampler_comes_from_the_lane_sampler() -> None:
    def measured(seed: int) -> Prompt:
        return {
            **row(sampler__seed=seed),
            "bench": {"class_type": "Reads", "inputs": {"run": ["sampler", 1]}},
        }

    made = only({1: measured(1), 2: measured(2)})
    assert [made.prompt[ids["bench"]]["inputs"]["run"] for ids in ids_of(made)] == [
        ["sampler", 1]
    ] * 2


def test_ids_of_a_workflow_are_never_taken_twice() -> None:
    def odd(seed: int) -> Prompt:
        prompt = row(sampler__seed=seed, sampler__latent=["lane2_save", 0])
        prompt["lane2_save"] = prompt.pop("latent")
        return prompt

    made = only({1: odd(1), 2: odd(2)})
    assert classes(made).count("WanStreamSaveVideo") == 2
    assert made.prompt["lane2_save"] == row()["latent"]
    named_as_ours = {n: {**row(sampler__seed=n), "inputs1_sampler": row()["save"]} for n in (1, 2)}
    assert classes(only(named_as_ours)).count("WanStreamSaveVideo") == 4
    assert classes(only(named_as_ours)).count(LANE) == 2


def test_every_node_of_a_pass_is_there_for_one_row() -> None:
    made = only(seeds(5, 6))
    first, second = made.saves.values()
    assert first is not None
    assert {"experts", "text", "sampler", "lane1_save"} <= first
    assert second == {"lane2_frames", "lane2_save", "lane2_sampler", "lane_inputs2_sampler"}
    assert only({9: row()}).saves == {"9": None}


def test_rows_are_shared_out_in_their_order() -> None:
    passes = jobs_of(seeds(*range(1, 8)), 3)
    assert [lines(made) for made in passes] == [(1, 2, 3), (4, 5, 6), (7,)]
    assert [made.reason for made in passes] == ["", "", UNSEEN]
    assert passes[2].prompt == row(sampler__seed=7)


def test_the_last_of_many_is_left_over_whatever_the_others_are() -> None:
    rows = {n: row(sampler__seed=n, sampler__steps=4 if n > 3 else 20) for n in range(1, 6)}
    assert [(lines(made), made.reason) for made in jobs_of(rows, 2)] == [
        ((1, 2), ""),
        ((3,), UNSEEN),
        ((4, 5), ""),
    ]


def test_the_same_rows_make_the_same_pass_again() -> None:
    rows = seeds(3, 4, 5)
    assert merge_lanes([*rows.values()]) == (only(rows).prompt, [*only(rows).saves.values()])


def test_more_lanes_than_rows_is_one_pass() -> None:
    assert lines(only(seeds(1, 2), lanes=64)) == (1, 2)


def test_one_lane_leaves_every_row_as_it_is() -> None:
    rows = seeds(1, 2)
    assert [(lines(made), made.prompt, made.reason) for made in jobs_of(rows, 1)] == [
        ((number,), prompt, "") for number, prompt in rows.items()
    ]


def test_the_last_lane_that_there_can_be_is_one_that_the_node_takes_out() -> None:
    index = next(socket for socket in SCHEMAS[LANE_LATENT].inputs if socket.id == "index")
    assert index.as_dict()["max"] == MAX_LANES - 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latent__width": 640}, "its latent.width is 640, that of line 1 is 832"),
        ({"latent__frames": 5}, "its latent.frames is 5, that of line 1 is 81"),
        ({"sampler__steps": 4}, "its sampler.steps is 4, that of line 1 is 20"),
        ({"sampler__guidance_high": 1.0}, "its sampler.guidance_high is 1, that of line 1 is 4"),
        (
            {"experts__high_noise": "other.gguf"},
            f"its experts.high_noise is other.gguf, that of line 1 is {HIGH}",
        ),
        ({"policy__prefetch_blocks": 2}, "its policy.prefetch_blocks is 2, that of line 1 is 1"),
    ],
)
def test_a_row_that_fits_no_other_runs_alone_and_says_why(
    change: dict[str, Any], reason: str
) -> None:
    passes = jobs_of({**seeds(1, 2), 3: row(**change)}, 4)
    assert [(lines(made), made.reason) for made in passes] == [((1, 2), ""), ((3,), reason)]
    assert passes[1].prompt == row(**change)


def test_rows_of_two_kinds_make_passes_of_both() -> None:
    rows = {n: row(sampler__seed=n, sampler__steps=4 if n % 2 else 8) for n in range(1, 7)}
    assert [lines(made) for made in jobs_of(rows, 4)] == [(1, 3, 5), (2, 4, 6)]


def test_the_same_number_written_in_two_ways_is_the_same() -> None:
    made = only(
        {
            1: row(sampler__guidance_low=3, policy__prefetch_blocks=1.0),
            2: row(sampler__guidance_low=3.0),
        }
    )
    assert lines(made) == (1, 2)
    assert "policy" in made.prompt


def test_yes_and_one_are_not_the_same() -> None:
    _, alone = jobs_of({1: row(), 2: row(sampler__add_noise=1)}, 2)
    assert alone.reason == "its sampler.add_noise is 1, that of line 1 is True"


def test_a_sampler_without_a_policy_fits_none_with_one() -> None:
    bare = row()
    del bare["sampler"]["inputs"]["policy"]
    _, alone = jobs_of({1: row(), 2: bare}, 2)
    assert alone.reason == "its policy is missing, that of line 1 is WanStreamLayerwise"


def test_workflows_without_our_sampler_run_as_they_are() -> None:
    rows = {n: row("guider", noise__noise_seed=n) for n in (1, 2)}
    for made, prompt in zip(jobs_of(rows, 2), rows.values(), strict=True):
        assert made.prompt == prompt
        assert (
            made.reason == "its workflow has no WanStreamSampler, the node whose passes lanes share"
        )


def test_settings_that_come_from_another_video_cannot_be_shared() -> None:
    def chained(seed: int) -> Prompt:
        prompt = row(sampler__seed=seed, sampler__sigmas=["levels", 0])
        prompt["first"] = copy.deepcopy(row()["sampler"])
        prompt["levels"] = {"class_type": "SigmasOf", "inputs": {"latent": ["first", 0]}}
        return prompt

    for made in jobs_of({1: chained(1), 2: chained(2)}, 2):
        assert made.reason == (
            "the settings of sampler, common to all lanes, depend on first, which makes one video"
        )


def test_a_broken_workflow_is_left_to_those_who_judge_workflows() -> None:
    """A cycle or a link to nowhere stays in the pass as it was, and ends nothing here."""
    cycle = {
        n: row(sampler__seed=n, text__positive=["text", 0], save__fps=["gone", 0]) for n in (1, 2)
    }
    made = only(cycle)
    assert made.prompt["text"]["inputs"]["positive"] == ["text", 0]
    assert [made.prompt[ids["save"]]["inputs"]["fps"] for ids in ids_of(made)] == [["gone", 0]] * 2


@pytest.mark.parametrize("name", ["t2v", "i2v", "flf2v", "t2v_lightning"])
def test_the_nodes_of_a_row_name_its_workflow(name: str) -> None:
    prompts = {
        n: row(name, sampler__seed=n, text__positive=("sun", "rain")[n % 2]) for n in range(3)
    }
    made = only(prompts)
    assert len({workflow_digest(prompt) for prompt in prompts.values()}) == 3
    for prompt, ids in zip(prompts.values(), ids_of(made), strict=True):
        assert digest_of_lane(json.loads(json.dumps(made.prompt)), ids["save"]) == workflow_digest(
            prompt
        )
    for shared in ("experts", "sampler", "nobody"):
        assert digest_of_lane(made.prompt, shared) is None


def test_a_row_is_named_alike_whatever_its_titles_and_the_notation_of_its_numbers() -> None:
    other = row(sampler__guidance_low=3.0)
    other["sampler"]["_meta"] = {"title": "another"}
    assert workflow_digest(row(sampler__guidance_low=3)) == workflow_digest(other)


@pytest.mark.parametrize("prompt", [row(), {"save": {"_meta": "a title"}}, {"save": 3}, None])
def test_a_prompt_that_is_not_of_a_pass_names_no_row(prompt: object) -> None:
    assert digest_of_lane(prompt, "save") is None
