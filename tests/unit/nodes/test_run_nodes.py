"""Nodes in the embedded host, in the shipped workflows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image

from wanstream.host import io
from wanstream.host.auto_policy import AutoPlanner
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.host.models import LoadedExperts
from wanstream.host.run_events import END, NOTICES_EVENT, VISITS
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.runs import run_experts
from wanstream.sampling import denoise
from wanstream.schema import Cancelled, OffloadPolicy
from wanstream.schema.records import Timeline
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.steps import changed_step
from wanstream.wan.vae.vae import open_vae

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())

SMALL = {"width": 32, "height": 32, "frames": 5}
FEW_STEPS = {"sampler": {"steps": 4}}

Workflow = dict[str, dict[str, Any]]
CACHE = {"kind": "first_block_cache", "preset": "usual", "threshold": 0.05}
CACHED = {"cache": {"class_type": "WanStreamCache", "inputs": CACHE}}
Run = Callable[..., History]


def workflow(name: str, changes: Mapping[str, Mapping[str, Any]] = {}) -> Workflow:
    """The shipped workflow `name`, small enough for a test, with changes by node and input."""
    nodes: Workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    sized = {"latent": SMALL} if "latent" in nodes else {"start": SMALL}
    for layer in (FEW_STEPS, sized, changes):
        for node_id, inputs in layer.items():
            nodes[node_id]["inputs"].update(inputs)
    return nodes


@pytest.fixture
def folders(tmp_path: Path, sample_models: Path) -> dict[str, Path]:
    (tmp_path / "input").mkdir()
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "input" / "example.png")
    return {"models": sample_models, "output": tmp_path / "output", "input_dir": tmp_path / "input"}


@pytest.fixture
def run(folders: dict[str, Path]) -> Iterator[Run]:
    """`run(workflow, **options)` runs it on the test model and closes the experts at the end."""

    def run(
        nodes: Workflow, *, more_nodes: Sequence[type[io.ComfyNode]] = (), **options: Any
    ) -> History:
        return run_workflow(nodes, nodes=[*NODES, *more_nodes], **folders, **options)

    yield run
    embedded_host.free_experts()


def timeline(history: History) -> Timeline:
    return Timeline.from_dict(history.outputs["sampler"]["wanstream_timeline"][0])


@pytest.mark.parametrize(("name", "high_steps"), [("t2v", 3), ("i2v", 2)])
def test_a_shipped_workflow_ends_with_its_video(
    run: Run, folders: dict[str, Path], name: str, high_steps: int
) -> None:
    history = run(workflow(name))

    assert history.outputs["save"]["images"] == [
        {"filename": f"wan2.2_{name}_00001_.mp4", "subfolder": "video", "type": "output"}
    ]
    with av.open(str(folders["output"] / "video" / f"wan2.2_{name}_00001_.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.width, stream.height, stream.average_rate) == (5, 32, 32, 16)
        assert json.loads(container.metadata["prompt"]) == workflow(name)
    assert [step.expert for step in timeline(history).steps] == ["high"] * high_steps + ["low"] * (
        4 - high_steps
    )
    assert len({step.bytes_moved for step in timeline(history).steps}) == 1


def test_the_history_tells_which_expert_ran_which_step(run: Run) -> None:
    history = run(
        workflow("t2v", {"sampler": {"switch_step": 1, "start_step": 1, "schedule": "simple"}})
    )
    steps = timeline(history).steps
    assert [(step.index, step.expert) for step in steps] == [(1, "low"), (2, "low"), (3, "low")]
    assert all(step.sigma is not None and step.bytes_moved > 0 for step in steps)


@pytest.mark.slow  # runs whole workflows
def test_the_same_seed_makes_the_same_latent_and_another_seed_another(run: Run) -> None:
    def latent(seed: int) -> torch.Tensor:
        return run(workflow("t2v", {"sampler": {"seed": seed}}), only=["sampler"]).results[
            "sampler"
        ][0]["samples"]

    first = latent(1)
    assert first.shape == (1, 16, 2, 4, 4)
    assert torch.equal(latent(1), first)
    assert not torch.equal(latent(2), first)


@pytest.mark.slow  # runs whole workflows
def test_a_workflow_from_before_there_was_storage_runs_and_fp8_moves_half_the_bytes(
    run: Run,
) -> None:
    def ran(**storage: str) -> History:
        files = {
            f"{expert}_noise": f"wan2.2_t2v_{expert}_noise_14B_fp16.safetensors"
            for expert in ("high", "low")
        }
        nodes = workflow("t2v", {"experts": files})
        del nodes["experts"]["inputs"]["storage"]
        nodes["experts"]["inputs"].update(storage)
        return run(nodes, only=["sampler"])

    old, plain, kept = ran(), ran(storage="as stored"), ran(storage="fp8")
    samples = [history.results["sampler"][0]["samples"] for history in (old, plain, kept)]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[1], samples[2])
    for before, after in zip(timeline(plain).steps, timeline(kept).steps, strict=True):
        assert 1 <= after.bytes_moved * 2 / before.bytes_moved < 1.02  # the rows' scales
        assert after.decode_s > 0


def test_each_guidance_belongs_to_its_expert(run: Run) -> None:
    def latent(**guidance: float) -> torch.Tensor:
        high_only = workflow("t2v", {"sampler": {"switch_step": 4, **guidance}})
        return run(high_only, only=["sampler"]).results["sampler"][0]["samples"]

    first = latent(guidance_high=4.0, guidance_low=3.0)
    assert torch.equal(latent(guidance_high=4.0, guidance_low=7.0), first)
    assert not torch.equal(latent(guidance_high=7.0, guidance_low=3.0), first)


def in_two(first: Mapping[str, Any] = {}, second: Mapping[str, Any] = {}) -> Workflow:
    """Text to video with euler in 4 steps: two samplers, each with changes, joined at step 2."""
    nodes = workflow("t2v", {"sampler": {"solver": "euler"}})
    inputs = nodes["sampler"]["inputs"]
    rest = {**inputs, "latent": ["first", 0], "start_step": 2, "add_noise": False, **second}
    nodes["first"] = {
        **nodes["sampler"],
        "inputs": {**inputs, "end_step": 2, "leftover_noise": True, **first},
    }
    nodes["sampler"]["inputs"] = rest
    return nodes


def test_two_samplers_are_one_run_in_two_parts(run: Run) -> None:
    whole = run(workflow("t2v", {"sampler": {"solver": "euler"}}), only=["sampler"]).results[
        "sampler"
    ][0]["samples"]
    history = run(in_two(), only=["sampler"])
    parts = history.results["sampler"][0]["samples"]
    assert (parts - whole).norm() <= 1e-2 * whole.norm(), "bf16, and one rounding more"
    assert [step.index for step in timeline(history).steps] == [2, 3]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            {},
            {"flow_shift": 5.0},
            r"left at sigma 0.9\d+, and step 2 starts at sigma 0.8\d+: give both samplers the same",
        ),
        ({}, {"steps": 5}, "left at sigma"),
        ({}, {"schedule": "simple"}, "left at sigma 0.92322, and step 2 starts at sigma 0.92308"),
        ({}, {"start_step": 3}, "and step 3 starts at sigma"),
        (
            {"leftover_noise": False},
            {},
            "left at sigma 0.00000, .* turn leftover_noise on in the sampler before",
        ),
        ({}, {"add_noise": True}, "still carries noise .* turn add_noise off here"),
    ],
)
def test_samplers_that_do_not_fit_together(
    run: Run, first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NodeFailedError, match=reason):
        run(in_two(first, second))


def test_connected_sigmas_win_over_the_steps(run: Run) -> None:
    def latent(nodes: Workflow) -> torch.Tensor:
        return run(nodes, only=["sampler"]).results["sampler"][0]["samples"]

    nodes = workflow("t2v", {"sampler": {"schedule": "simple", "start_step": 1}})
    expected = latent(nodes)
    settings = {"schedule": "simple", "steps": 4, "flow_shift": 12.0, "denoise": 1.0}
    nodes["sigmas"] = {"class_type": "WanStreamSigmas", "inputs": settings}
    nodes["sampler"]["inputs"] |= {
        "sigmas": ["sigmas", 0],
        "steps": 1,
        "flow_shift": 1.0,
        "schedule": "wan",
    }
    assert torch.equal(latent(nodes), expected)


@pytest.mark.parametrize(
    "policy",
    [
        {
            "class_type": "WanStreamLayerwise",
            "inputs": {"prefetch_blocks": 2, "weights_source": "RAM"},
        },
        {
            "class_type": "WanStreamBlockSwap",
            "inputs": {"blocks_to_swap": 2, "prefetch_blocks": 1, "weights_source": "disk"},
        },
    ],
)
def test_the_policy_changes_nothing_but_the_transfers(run: Run, policy: dict[str, Any]) -> None:
    def latent(nodes: Workflow) -> torch.Tensor:
        return run(nodes, only=["sampler"]).results["sampler"][0]["samples"]

    without = workflow("t2v")
    del without["sampler"]["inputs"]["policy"]
    assert torch.equal(latent({**workflow("t2v"), "policy": policy}), latent(without))


@pytest.mark.slow
def test_the_planner_chooses_for_the_machine_that_it_has_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run measures this machine and saves the profile below the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    auto = {
        "class_type": "WanStreamAutoOffload",
        "inputs": {"vram_budget_gb": 0.0, "ram_budget_gb": 0.0},
    }
    history = run({**workflow("t2v"), "policy": auto}, only=["sampler"])
    told, *_ = timeline(history).changes
    assert told.startswith("chosen: ")
    assert "stall predicted" in told
    assert history.outputs["sampler"]["text"] == list(timeline(history).changes)
    embedded_host.free_experts()
    plain = run(workflow("t2v"), only=["sampler"])
    assert timeline(plain).changes == ()
    one, other = (found.results["sampler"][0]["samples"] for found in (history, plain))
    assert torch.equal(one, other)

    too_little = {**auto, "inputs": {"vram_budget_gb": 0.0, "ram_budget_gb": 0.001}}
    with pytest.raises(
        NodeFailedError, match=r"needs 2 buffers of .* to compute in .*; 0\.00 GB given"
    ):
        run({**workflow("t2v"), "policy": too_little})


@pytest.mark.slow  # runs whole workflows
def test_the_planner_serves_a_run_of_three_stages_whose_first_step_corrects_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded_host.free_experts()  # the plan is corrected only if the experts start empty
    monkeypatch.setattr(embedded_host.memory, "planner", AutoPlanner(lambda *_: CPU_MACHINE))
    auto = {
        "class_type": "WanStreamAutoOffload",
        "inputs": {"vram_budget_gb": 0.0, "ram_budget_gb": 0.0},
    }
    six = workflow("three_stages", {"sampler": {"steps": 6}})
    history = run({**six, "policy": auto}, only=["sampler"])
    (corrected,) = embedded_host.memory.planner._corrected.values()
    assert corrected.origin == "a test, corrected by a first step"
    assert [step.expert for step in timeline(history).steps] == ["high"] * 4 + ["low"] * 2
    plain = run(six, only=["sampler"])
    one, other = (found.results["sampler"][0]["samples"] for found in (history, plain))
    assert torch.equal(one, other)


def test_the_start_image_reaches_the_sampler_in_native_form(run: Run, sample_models: Path) -> None:
    positive, negative, latent = run(workflow("i2v"), only=["start"]).results["start"]

    (text, belongings), (other_text, other_belongings) = positive[0], negative[0]
    assert text.shape == other_text.shape == (1, 512, 4096)
    assert not torch.equal(text, other_text)
    assert torch.equal(belongings["concat_mask"][0, 0, :, 0, 0], torch.tensor([0.0, 1.0]))
    assert belongings["concat_mask"].shape == (1, 1, 2, 4, 4)
    assert torch.equal(latent["samples"], torch.zeros(1, 16, 2, 4, 4))

    with open_vae(sample_models / "diffusers" / "Wan2.2-I2V-A14B-Diffusers") as vae:
        grey = vae.encode(torch.full((5, 32, 32, 3), 0.5), device="cpu")
    encoded = belongings["concat_latent_image"]
    assert encoded.shape == grey.shape
    assert not torch.equal(encoded, grey)
    assert torch.equal(other_belongings["concat_latent_image"], encoded)


def test_a_batch_becomes_one_video_after_the_other(run: Run, folders: dict[str, Path]) -> None:
    history = run(workflow("t2v", {"latent": {"batch_size": 2}}), keep=["frames"])
    assert history.results["frames"][0].shape == (10, 32, 32, 3)


def test_guidance_1_does_not_look_at_the_negative(run: Run) -> None:
    plain = {"guidance_high": 1.0, "guidance_low": 1.0}
    same, other = ({"text": {"negative": text}, "sampler": plain} for text in ("rain", "sun"))
    (one, _), (two, _) = (
        run(workflow("t2v", change), only=["sampler"]).results["sampler"]
        for change in (same, other)
    )
    assert torch.equal(one["samples"], two["samples"])


def test_blocks_to_swap_above_the_block_count_is_refused(run: Run) -> None:
    swap = {"blocks_to_swap": 20, "prefetch_blocks": 1, "weights_source": "disk"}
    with pytest.raises(NodeFailedError, match="only 4 blocks"):
        run({**workflow("t2v"), "policy": {"class_type": "WanStreamBlockSwap", "inputs": swap}})


def delete(node_id: str) -> Callable[[Workflow], None]:
    return lambda nodes: nodes.pop(node_id)


INNER = "exception_during_inner_validation"


def put(node_id: str, **inputs: Any) -> Callable[[Workflow], None]:
    return lambda nodes: nodes[node_id]["inputs"].update(inputs)


@pytest.mark.parametrize(
    ("spoil", "node_id", "error_type"),
    [
        (put("sampler", latent=["text", 0]), "sampler", "return_type_mismatch"),
        (put("sampler", experts=["nowhere", 0]), "sampler", INNER),
        (delete("text"), "sampler", INNER),
        (put("sampler", steps=0), "sampler", INNER),
        (put("sampler", steps=1001), "sampler", INNER),
        (put("sampler", switch_step=5), "sampler", INNER),
        (put("sampler", switch_step=-2), "sampler", INNER),
        (put("sampler", start_step=4), "sampler", INNER),
        (put("sampler", start_step=-1), "sampler", INNER),
        (put("sampler", start_step=2, end_step=2), "sampler", INNER),
        (put("sampler", end_step=0), "sampler", INNER),
        (put("sampler", flow_shift=0), "sampler", "value_smaller_than_min"),
        (put("sampler", boundary_ratio=1.5), "sampler", "value_bigger_than_max"),
        (put("sampler", steps="many"), "sampler", "invalid_input_type"),
        (put("sampler", solver="dpm"), "sampler", "value_not_in_list"),
        (put("policy", prefetch_blocks=9), "policy", "value_bigger_than_max"),
        (put("latent", width=1080), "latent", INNER),
        (put("latent", frames=80), "latent", INNER),
        (put("latent", height=100_000), "latent", INNER),
        (put("latent", height="tall"), "latent", "invalid_input_type"),
        (put("experts", high_noise="../../etc/passwd"), "experts", "value_not_in_list"),
        (put("experts", high_noise="absent.safetensors"), "experts", "value_not_in_list"),
        (put("frames", vae="../models"), "frames", "value_not_in_list"),
        (put("save", filename_prefix="../outside"), "save", "exception_during_validation"),
        (put("save", filename_prefix="/outside"), "save", "exception_during_validation"),
        (put("save", crf=52), "save", "value_bigger_than_max"),
    ],
)
def test_a_broken_workflow_is_refused_before_anything_runs(
    run: Run,
    folders: dict[str, Path],
    spoil: Callable[[Workflow], None],
    node_id: str,
    error_type: str,
) -> None:
    nodes = workflow("t2v")
    spoil(nodes)
    with pytest.raises(InvalidWorkflowError) as refused:
        run(nodes)
    (fault,) = refused.value.verdict.node_errors[node_id]["errors"]
    assert fault["type"] == error_type
    assert not folders["output"].exists()


@pytest.mark.parametrize(
    ("node_id", "socket", "value", "reason"),
    [
        ("latent", "width", 1080, "width is 1080, it must be a multiple of 16"),
        ("sampler", "steps", 0, "0 steps: give 1 to 1000"),
        ("sampler", "switch_step", 5, "switch step 5 of 4 steps: give 0 to 4"),
        ("sampler", "start_step", 4, "start step 4 of 4 steps: give 0 to 3"),
    ],
)
def test_a_number_that_comes_from_another_node_is_judged_when_it_is_known(
    run: Run, node_id: str, socket: str, value: int, reason: str
) -> None:
    class Number(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(node_id="Number", outputs=[io.Int.Output()])

        @classmethod
        def execute(cls) -> io.NodeOutput:
            return io.NodeOutput(value)

    nodes = workflow("t2v", {node_id: {socket: ["number", 0]}})
    nodes["number"] = {"class_type": "Number", "inputs": {}}
    with pytest.raises(NodeFailedError, match=reason):
        run(nodes, more_nodes=[Number])


@pytest.mark.slow  # runs whole workflows
def test_a_negative_that_nothing_reads_may_be_any(run: Run) -> None:
    """A negative from before the image-to-video node is refused with guidance, else ignored."""
    negative = {"negative": ["text", 1]}
    with pytest.raises(NodeFailedError, match="different start images"):
        run(workflow("i2v", {"sampler": {**negative, "guidance_high": 1.0, "guidance_low": 2.0}}))
    assert timeline(
        run(workflow("i2v", {"sampler": {**negative, "guidance_high": 1.0, "guidance_low": 1.0}}))
    ).steps


def test_an_unknown_node_is_named(run: Run) -> None:
    nodes = workflow("t2v")
    nodes["sampler"]["class_type"] = "WanStreamSampler9000"
    with pytest.raises(InvalidWorkflowError, match=r"Wan Sampler \(streamed\)") as refused:
        run(nodes)
    assert refused.value.verdict.error["type"] == "missing_node_type"


def test_a_stop_ends_the_run_at_the_next_block_and_the_next_run_is_whole(run: Run) -> None:
    steps_done: list[int] = []

    def stop_after_the_first_step(progress: NodeProgress) -> None:
        if progress.node_id == "sampler" and progress.total == 4:
            steps_done.append(progress.done)
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(workflow("t2v"), on_progress=stop_after_the_first_step)
    assert steps_done == [1]
    assert len(timeline(run(workflow("t2v"))).steps) == 4


def test_the_host_loads_the_experts_and_says_how_much_of_the_policy_it_has_room_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[OffloadPolicy, int]] = []

    def load_experts(
        ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int
    ) -> LoadedExperts:
        asked.append((policy, working_bytes))
        return LoadedExperts(
            pair=embedded_host.models.experts(ref),
            policy=OffloadPolicy.resident(),
            device=torch.device("cpu"),
        )

    monkeypatch.setattr(embedded_host.models, "load_experts", load_experts)
    steps = timeline(run(workflow("t2v"))).steps
    ((policy, working_bytes),) = asked
    assert policy.kind != "resident"
    assert working_bytes > 0
    assert [step.bytes_moved > 0 for step in steps] == [True, False, False, True], (
        "each expert is fetched once"
    )


def test_progress_is_told_step_by_step(run: Run) -> None:
    told: list[tuple[int, int]] = []
    run(
        workflow("t2v"),
        on_progress=lambda p: told.append((p.done, p.total)) if p.node_id == "sampler" else None,
    )
    assert [step for step in told if step[1] == 4] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("stall_share", "cache", "advised"), [(0.5, {}, True), (0.01, {}, False), (0.5, CACHED, False)]
)
def test_a_run_that_waited_gets_advice(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    stall_share: float,
    cache: Workflow,
    advised: bool,
) -> None:
    """The first step, which reads all weights, does not count."""

    def waiting(*given: Any, **options: Any) -> Any:
        result = denoise(*given, **options)
        first, *later = result.timeline.steps
        steps = [changed_step(first, stall_s=first.wall_s)]
        steps += [changed_step(step, stall_s=step.wall_s * stall_share) for step in later]
        return replace(result, timeline=replace(result.timeline, steps=tuple(steps)))

    monkeypatch.setattr(run_experts, "denoise", waiting)
    machine = replace(CPU_MACHINE, disk_bytes_per_s=1e6)
    monkeypatch.setattr(embedded_host.memory, "planner", AutoPlanner(stored=lambda *_: machine))
    ends: list[Mapping[str, Any]] = []
    nodes = workflow("t2v") | cache
    if cache:
        nodes["sampler"]["inputs"]["cache"] = ["cache", 0]
    run(
        nodes,
        only=["sampler"],
        on_event=lambda event, payload: ends.append(payload) if event == END else None,
    )
    (end,) = ends
    assert (end["advice"] is not None) == advised
    if advised:
        assert end["advice"]["gain"] > 1.1


def test_a_run_is_announced_with_the_numbers_that_the_history_keeps(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_experts, "thread_notes", lambda device: ["cores are busy"])
    told: list[tuple[str, Mapping[str, Any]]] = []
    history = run(workflow("t2v"), on_event=lambda event, payload: told.append((event, payload)))
    told = [(event, payload) for event, payload in told if event not in {NOTICES_EVENT, VISITS}]
    assert [event.removeprefix("wanstream.") for event, _ in told] == [
        "begin",
        "step",
        "step",
        "step",
        "step",
        "end",
    ]
    begin, *steps, end = (payload for _, payload in told)
    assert (begin["node"], begin["experts"], begin["switch_step"]) == (
        "sampler",
        ["high"] * 3 + ["low"],
        3,
    )
    assert begin["settings"]["size"] == "32x32x5"
    assert begin["settings"]["dtype"] in {"bf16", "fp32"}, "what auto gave on this CPU"
    (kept,) = history.outputs["sampler"]["wanstream_timeline"]
    assert end["timeline"] == kept
    assert kept["changes"] == begin["changes"] == ["cores are busy"]
    assert [payload["record"] for payload in steps] == kept["steps"]


def test_a_run_that_is_stopped_is_announced_as_stopped(run: Run) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []

    def stop_at_the_first_step(event: str, payload: Mapping[str, Any]) -> None:
        told.append((event, payload))
        if event == "wanstream.step":
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(workflow("t2v"), on_event=stop_at_the_first_step)
    last_event, end = told[-1]
    assert (last_event, end["timeline"]) == ("wanstream.end", None)
    assert end["error"]
