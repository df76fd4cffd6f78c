"""`wanstream batch --share-weights` on a real ComfyUI server.

The latents equal the latents from single runs to the bit, with fewer bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from wanstream.cli import main
from wanstream.cli.arguments import DONE
from wanstream.schema.records import Timeline
from wanstream.tools.comfyui import Server

pytestmark = pytest.mark.comfy

ROOT = Path(__file__).parents[3]
SMALL = {"width": 64, "height": 48, "frames": 9, "length": 9, "steps": 4}

Prompt = dict[str, dict[str, Any]]
Batch = Callable[..., list[Timeline]]


@pytest.fixture
def batch(stocked_server: Server, tmp_path: Path) -> Batch:
    """`batch(prompt, rows, lanes, folder)` runs rows and returns each sampler run's timeline."""

    def batch(
        prompt: Prompt, rows: list[dict[str, Any]], lanes: int, folder: str
    ) -> list[Timeline]:
        before = set(stocked_server.get("/history"))
        workflow, jobs = tmp_path / "workflow.json", tmp_path / "jobs.jsonl"
        workflow.write_text(json.dumps(prompt))
        jobs.write_text("\n".join(map(json.dumps, rows)))
        places = [
            "--workflow",
            str(workflow),
            "--out",
            str(tmp_path / folder),
            "--server",
            stocked_server.url,
        ]
        assert main(["batch", str(jobs), *places, "--share-weights", str(lanes)]) == DONE
        after = {
            key: entry for key, entry in stocked_server.get("/history").items() if key not in before
        }
        (name,) = (
            node_id for node_id, node in prompt.items() if node["class_type"] == "WanStreamSampler"
        )
        return [
            Timeline.from_dict(entry["outputs"][name]["wanstream_timeline"][0])
            for entry in after.values()
        ]

    return batch


def small(name: str) -> Prompt:
    """A small shipped workflow that saves the latent."""
    prompt: Prompt = json.loads(
        (ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8")
    )
    for node in prompt.values():
        node["inputs"] |= {key: value for key, value in SMALL.items() if key in node["inputs"]}
    prompt["tap"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": ["sampler", 0], "filename_prefix": "tap"},
    }
    return prompt


def native_texts() -> Prompt:
    """ComfyUI's own text and latent nodes before our sampler.

    Texts with more than 512 tokens keep their length.
    """
    prompt = small("native_mixed")
    prompt["clip"]["class_type"] = "TestClip"
    for node_id in ("vae", "frames", "video", "save"):
        del prompt[node_id]
    return prompt


def latents(folder: Path) -> dict[str, torch.Tensor]:
    """Every row's latent by file name."""
    return {path.name: load_file(path)["latent_tensor"] for path in sorted(folder.glob("*.latent"))}


@pytest.mark.parametrize(
    ("prompt", "text", "files"),
    [(small("t2v"), "text.positive", 2), (native_texts(), "positive.text", 1)],
    ids=["our nodes", "native texts"],
)
def test_four_lanes_are_four_single_runs_and_move_a_quarter(
    batch: Batch, tmp_path: Path, prompt: Prompt, text: str, files: int
) -> None:
    rows = [
        {"name": f"row {number}", text: "a boat " * (1 + 200 * number), "sampler.seed": number}
        for number in range(4)
    ]
    (together,) = batch(prompt, rows, 4, "together")
    alone = batch(prompt, rows, 1, "alone")
    assert len(alone) == 4
    assert [step.bytes_moved for step in together.steps] == [
        step.bytes_moved for step in alone[0].steps
    ]
    assert 4 * together.bytes_moved == sum(timeline.bytes_moved for timeline in alone) > 0
    shared, single = latents(tmp_path / "together"), latents(tmp_path / "alone")
    assert shared.keys() == single.keys()
    assert len(shared) == 4
    for name, latent in shared.items():
        assert torch.isfinite(latent).all()
        assert torch.equal(latent, single[name]), name
    assert len({latent.numpy().tobytes() for latent in shared.values()}) == 4
    made = [path.name for path in (tmp_path / "together").iterdir() if path.name.startswith("row ")]
    assert len(made) == 4 * files


def test_rows_that_do_not_fit_are_told_and_run_in_passes_of_their_own(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"sampler.seed": 1},
        {"sampler.seed": 2, "latent.width": 48},
        {"sampler.seed": 3},
        {"sampler.seed": 4, "sampler.steps": 3},
    ]
    timelines = batch(small("t2v"), rows, 4, "out")
    assert sorted(len(timeline.steps) for timeline in timelines) == [3, 4, 4]
    output = capsys.readouterr().err
    assert "line 2 runs alone: its latent.width is 48, that of line 1 is 64" in output
    assert "line 4 runs alone: its sampler.steps is 3, that of line 1 is 4" in output
    assert len(latents(tmp_path / "out")) == 4
