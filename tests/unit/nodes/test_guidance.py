"""Guidance and context windows nodes in the embedded host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.context_windows import WanStreamContextWindows, windows_of
from wanstream.nodes.guidance import WanStreamGuidance
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.guidance import Guidance
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.wan import Nag

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())

Run = Callable[..., History]

GUIDANCE = {"guidance_steps": "", "nag_scale": 1.0, "nag_tau": 2.5, "nag_alpha": 0.25}
WINDOWS = {"frames": 9, "overlap": 4, "stride": 1, "blend": "linear", "repeat_image": True}


def workflow(frames: int = 5, *, name: str = "t2v", **more: Any) -> dict[str, dict[str, Any]]:
    """The shipped workflow, small, in 2 steps, with `sampler` settings and nodes linked to it."""
    nodes: dict[str, dict[str, Any]] = json.loads(
        (WORKFLOWS / f"{name}.json").read_text(encoding="utf-8")
    )
    size = {"width": 32, "height": 32, "frames": frames, "steps": 2, "switch_step": 1}
    for node in nodes.values():
        node["inputs"] |= {key: value for key, value in size.items() if key in node["inputs"]}
    nodes["sampler"]["inputs"] |= more.pop("sampler", {})
    for socket, (class_type, inputs) in more.items():
        nodes[socket] = {"class_type": class_type, "inputs": inputs}
        nodes["sampler"]["inputs"][socket] = [socket, 0]
    return nodes


def guided(**settings: Any) -> tuple[str, dict[str, Any]]:
    return "WanStreamGuidance", GUIDANCE | settings


def windowed(**settings: Any) -> tuple[str, dict[str, Any]]:
    return "WanStreamContextWindows", WINDOWS | settings


@pytest.fixture
def run(tmp_path: Path, sample_models: Path) -> Iterator[Run]:
    def run(nodes: dict[str, Any]) -> History:
        folders = {
            "models": sample_models,
            "output": tmp_path / "output",
            "input_dir": tmp_path / "input",
        }
        return run_workflow(nodes, nodes=NODES, only=["sampler"], **folders)

    yield run
    embedded_host.free_experts()


def latent(history: History) -> torch.Tensor:
    samples: torch.Tensor = history.results["sampler"][0]["samples"]
    return samples


def moved(history: History) -> list[int]:
    return [
        step["bytes_moved"] for step in history.outputs["sampler"]["wanstream_timeline"][0]["steps"]
    ]


def test_steps_have_the_guidance_that_is_written(run: Run) -> None:
    plain = run(workflow(sampler={"guidance_high": 4.0, "guidance_low": 2.5}))
    ones = {"guidance_high": 1.0, "guidance_low": 1.0}
    written = run(workflow(guidance=guided(guidance_steps="4, 2.5"), sampler=ones))
    assert torch.equal(latent(written), latent(plain))


@pytest.mark.slow  # runs whole workflows
def test_nag_reads_the_negative_where_guidance_does_not(run: Run) -> None:
    ones = {"guidance_high": 1.0, "guidance_low": 1.0}
    each = [workflow(sampler=ones, guidance=guided(nag_scale=scale)) for scale in (1.0, 11.0, 11.0)]
    each[2]["text"]["inputs"]["negative"] = "something else"
    off, on, changed = (latent(run(nodes)) for nodes in each)
    assert not torch.allclose(on, off, rtol=1e-3)
    assert not torch.allclose(changed, on, rtol=1e-4)


def test_windows_move_the_bytes_of_a_short_video(run: Run) -> None:
    long = run(workflow(17, windows=windowed()))
    assert latent(long).shape[2] == 5
    assert moved(long) == moved(run(workflow(9)))
    assert sum(moved(long)) > 0


def test_windows_longer_than_the_video_are_refused(run: Run) -> None:
    with pytest.raises(
        NodeFailedError, match=r"windows of 9 frames \(3 latent\) are longer than the video of 5"
    ):
        run(workflow(5, windows=windowed()))


def test_nag_without_a_step_to_act_in_is_refused(run: Run) -> None:
    with pytest.raises(
        NodeFailedError, match="NAG acts in steps of guidance 1, and this run has none"
    ):
        run(workflow(guidance=guided(nag_scale=11.0)))


def test_a_scale_of_a_context_that_is_not_there_is_refused(run: Run) -> None:
    with pytest.raises(
        NodeFailedError,
        match=r"context_guidance is 1.5, and the negative has no context .* Bernini",
    ):
        run(workflow(guidance=guided(context_guidance=1.5)))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            {"guidance": guided(guidance_steps="4, much")},
            "guidance_steps has 'much': give numbers with commas between",
        ),
        (
            {"windows": windowed(frames=10)},
            "frames is 10, it must be a multiple of 4 plus 1: use 9",
        ),
        ({"windows": windowed(overlap=6)}, "overlap is 6, it must be a multiple of 4: use 8"),
        ({"windows": windowed(overlap=12)}, "windows of 3 latent frames cannot overlap by 3"),
        ({"windows": windowed(stride=3)}, "a stride of 3 latent frames"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    run: Run, nodes: Any, message: str
) -> None:
    with pytest.raises(InvalidWorkflowError, match=message):
        run(workflow(17, **nodes))


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("", None),
        (" , ", None),
        ("4", (4.0,)),
        ("6, 5 4.5;1\n1", (6.0, 5.0, 4.5, 1.0, 1.0)),
        ("1e1", (10.0,)),
    ],
)
def test_a_list_of_scales_is_read(text: str, scales: tuple[float, ...] | None) -> None:
    assert Guidance.parse_steps(text) == scales


@pytest.mark.parametrize("text", ["4,x", "nan", "inf, 1", "4:3"])
def test_what_is_no_list_of_scales_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="guidance_steps has"):
        Guidance.parse_steps(text)


def test_the_nodes_give_values() -> None:
    """Equal settings make equal values, as ComfyUI's cache needs."""
    made = WanStreamGuidance.execute(
        **{**GUIDANCE, "guidance_steps": "4, 1", "nag_scale": 9.0}
    ).args[0]
    assert made == Guidance(steps=(4.0, 1.0), nag=Nag(scale=9.0, tau=2.5, alpha=0.25))
    windows = WanStreamContextWindows.execute(**WINDOWS).args[0]
    assert windows == ContextWindows(
        frames=3, overlap=1, stride=1, blend="linear", repeat_image=True
    )
    assert windows_of(frames=81, overlap=16, stride=1) == ContextWindows()


def test_what_is_linked_is_judged_at_the_run() -> None:
    assert WanStreamContextWindows.validate_inputs(frames=None, overlap=8) is True
    assert WanStreamGuidance.validate_inputs(None) is True
