"""Workflows without computing: save nodes write short videos, with frames drawn from the seeds."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import History, Workflow
from wanstream.host.embedded.workflow.graph import as_link
from wanstream.host.files import SAVING_NODE
from wanstream.nodes.runs.video_file import write_video
from wanstream.testing.model import write_tiny_model
from wanstream.wan.latents.file import read_latent, write_latent

SAVE = "WanStreamSaveVideo"
KEEP = "WanStreamSaveLatent"
CONTINUE = "WanStreamContinueVideo"
FRAMES = 3
SIZE = 16


def seed_behind(prompt: Mapping[str, Any], node_id: str) -> int:
    """Return the sampler seed behind a node's result, from the right lane for a lane latent."""
    lane = None
    while True:
        node = prompt[node_id]
        inputs = node["inputs"]
        if node["class_type"] == "WanStreamLaneLatent":
            lane = inputs["index"]
            node_id = as_link(inputs["latents"]).node_id
        elif node["class_type"] == "WanStreamLaneSampler":
            # The last lane is linked to the sampler, each lane to the one before it.
            chain = [as_link(inputs["lanes"]).node_id]
            while (before := as_link(prompt[chain[0]]["inputs"].get("lanes"))) is not None:
                chain.insert(0, before.node_id)
            return int(prompt[chain[lane or 0]]["inputs"]["seed"])
        elif "seed" in inputs:
            return int(inputs["seed"])
        else:
            node_id = next(link.node_id for value in inputs.values() if (link := as_link(value)))


def continued_seed(prompt: Mapping[str, Any], node_id: str, output: Path) -> int:
    """Return the seed behind a node, changed by each latent that the workflow continues."""
    seed = seed_behind(prompt, node_id)
    nodes = (node["inputs"] for node in prompt.values() if node["class_type"] == CONTINUE)
    for file in {inputs["previous_file"] for inputs in nodes} - {"none"}:
        seed = zlib.crc32(read_latent(output / file).samples.numpy().tobytes(), seed)
    return seed


def _saving(prompt: Mapping[str, Any], class_type: str) -> list[str]:
    return [node_id for node_id, node in prompt.items() if node["class_type"] == class_type]


def _shown(kind: str, folder: str, name: str) -> dict[str, Any]:
    return {kind: [{"filename": name, "subfolder": folder, "type": "output"}]}


def latent_of(seed: int) -> torch.Tensor:
    """Return the latent used for a seed."""
    return torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(seed))


def _kept_latents(prompt: Mapping[str, Any], output: Path) -> dict[str, dict[str, Any]]:
    """Write latents in place of the saving nodes, and return what the nodes show."""
    shown = {}
    for node_id in _saving(prompt, KEEP):
        path = output / "latents" / f"{node_id}_00001_.latent"
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = continued_seed(prompt, node_id, output)
        write_latent(path, latent_of(seed), metadata={"prompt": prompt, SAVING_NODE: node_id})
        shown[node_id] = _shown("latents", "latents", path.name)
    return shown


def frames_of(seed: int) -> torch.Tensor:
    """Return the frames used for a seed."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (FRAMES, SIZE, SIZE, 3), generator=random, dtype=torch.uint8)


def run_replaced(workflow: Workflow, *, on_progress: Any = None, **_: Any) -> History:
    """Replace `Workflow.run`: the latent is on disk while the video is made, as with real nodes."""
    prompt = workflow.verdict.prompt
    output = workflow.folders.output
    shown = _kept_latents(prompt, output)
    for node_id in _saving(prompt, SAVE):
        workflow.host.events.raise_if_stopped()
        if on_progress is not None:
            on_progress(NodeProgress(node_id=node_id, class_type=SAVE, done=0, total=1))
        seed = continued_seed(prompt, node_id, output)
        video = output / "video" / f"{node_id}_00001_.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        latent = video.with_suffix(".latent")
        write_latent(latent, torch.full((1,), float(seed)))
        metadata = {"prompt": prompt, SAVING_NODE: node_id}
        write_video(video, frames_of(seed), fps=16, crf=30, metadata=metadata)
        latent.unlink()
        shown[node_id] = _shown("images", "video", video.name)
    return History(outputs=shown, results={}, node_errors={})


@contextmanager
def computing_replaced() -> Iterator[None]:
    """Replace only computing in this process's `wanstream batch`."""
    with mock.patch.object(Workflow, "run", run_replaced):
        yield


def named_models(folder: Path, workflow: Mapping[str, Any]) -> Path:
    """Create a models folder with small files, valid by header, under a workflow's names."""
    kinds = {"WanStreamExperts": "diffusion_models", "WanStreamTextEncode": "text_encoders"}
    kinds |= {"WanStreamLora": "loras", "WanStreamImageToVideo": "vae", "WanStreamVAEDecode": "vae"}
    for node in workflow.values():
        for name in node["inputs"].values():
            if str(name).endswith(".safetensors"):
                kind = kinds[node["class_type"]]
                path = folder / kind / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_small_file(kind, name))
    return folder


@cache
def _small_file(kind: str, name: str) -> bytes:
    """Return the content of a test model file."""
    with tempfile.TemporaryDirectory() as folder:
        made = write_tiny_model(Path(folder) / "models", layers=1, names={name})
        return (made.folder / kind / name).read_bytes()
