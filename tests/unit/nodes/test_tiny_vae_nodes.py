"""Tiny VAEs in the decoding nodes: whole, in tiles, over a worker, to a file, and refusals."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from wanstream.host import io
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.workers import workers_inputs
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.wan.vae import open_vae
from wanstream.wan.vae.tiles import Tiling

NODES = asyncio.run(WanStreamExtension().get_node_list())
LATENT = torch.randn(2, 16, 2, 9, 10, generator=torch.Generator().manual_seed(0))
ONE_WORKER = {socket.id: socket.as_dict()["default"] for socket in workers_inputs()}
ONE_WORKER |= {"count": 1, "cluster": "in-process"}


class Given(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Given", outputs=[io.Latent.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput({"samples": LATENT})


class Kept(io.ComfyNode):
    """Sink for images, to make the decoder run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Kept", inputs=[io.Image.Input("images")], is_output_node=True)

    @classmethod
    def execute(cls, images: torch.Tensor) -> io.NodeOutput:
        return io.NodeOutput()


@pytest.fixture
def models(sample_models: Path, tmp_path: Path) -> Path:
    """The test model's VAEs, a tiny VAE under another name, and a truncated one."""
    folder = tmp_path / "models"
    shutil.copytree(sample_models / "vae", folder / "vae")
    shutil.copytree(sample_models / "vae_approx", folder / "vae_approx")
    whole = (folder / "vae_approx" / "taew2_1.safetensors").read_bytes()
    (folder / "vae" / "mine.safetensors").write_bytes(whole)
    (folder / "vae_approx" / "taew_cut.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture
def decode(models: Path, tmp_path: Path) -> Iterator[Callable[..., History]]:
    """`decode(class_type, **inputs)` runs the node on `LATENT`."""

    def run(class_type: str, **inputs: Any) -> History:
        prompt: dict[str, Any] = {
            "given": {"class_type": "Given", "inputs": {}},
            "decode": {"class_type": class_type, "inputs": {"latent": ["given", 0], **inputs}},
        }
        if "workers" in inputs:
            prompt["workers"] = {"class_type": "WanStreamWorkers", "inputs": ONE_WORKER}
        if class_type == "WanStreamVAEDecode":
            prompt["kept"] = {"class_type": "Kept", "inputs": {"images": ["decode", 0]}}
        else:
            prompt["decode"]["inputs"] |= {"fps": 16.0, "filename_prefix": "video", "crf": 1}
        return run_workflow(
            prompt,
            nodes=[*NODES, Given, Kept],
            models=models,
            output=tmp_path / "output",
            input_dir=tmp_path,
            device=torch.device("cpu"),
            keep=["decode"],
        )

    yield run
    embedded_host.memory.worker_registry.close()


def frames_of(
    models: Path, name: str, tiling: Tiling | None = None, scale: str = "by file name"
) -> torch.Tensor:
    with open_vae(models / name, latent_scale=scale) as vae:
        return vae.decode(LATENT, device="cpu", tiling=tiling).flatten(0, 1)


@pytest.mark.parametrize("tile", [0, 64])
@pytest.mark.parametrize("workers", [False, True])
def test_images_are_those_of_the_vae(
    decode: Callable[..., History], models: Path, tile: int, workers: bool
) -> None:
    link = {"workers": ["workers", 0]} if workers else {}
    history = decode("WanStreamVAEDecode", vae="taew2_1.safetensors", tile_size=tile, **link)
    expected = frames_of(
        models, "vae_approx/taew2_1.safetensors", Tiling.of(tile) if tile else None
    )
    images = history.results["decode"][0]
    assert images.shape == (10, 72, 80, 3)
    # Without a tile size, the only worker decodes one tile as large as the frame.
    assert (images - expected).abs().max() <= (1e-6 if workers else 0)


def test_a_video_is_written(decode: Callable[..., History], tmp_path: Path) -> None:
    decode("WanStreamDecodeVideo", vae="lighttaew2_1.safetensors", compute_dtype="bf16")
    with av.open(str(tmp_path / "output" / "video_00001_.mp4")) as container:
        assert (container.streams.video[0].frames, container.streams.video[0].width) == (10, 80)


@pytest.mark.slow  # runs whole workflows
@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("scale", ["raw", "normalised"])
def test_the_setting_is_used_wherever_tiles_are_decoded(
    decode: Callable[..., History], models: Path, scale: str, workers: bool
) -> None:
    link = {"workers": ["workers", 0]} if workers else {}
    history = decode(
        "WanStreamVAEDecode", vae="mine.safetensors", latent_scale=scale, tile_size=64, **link
    )
    name = "vae/mine.safetensors"
    found = history.results["decode"][0]
    assert torch.equal(found, frames_of(models, name, Tiling.of(64), scale))
    other = {"raw": "normalised", "normalised": "raw"}[scale]
    assert not torch.equal(found, frames_of(models, name, Tiling.of(64), other))


@pytest.mark.parametrize("kind", ["WanStreamVAEDecode", "WanStreamDecodeVideo"])
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (
            {"vae": "taew2_2.safetensors"},
            r"\[2, 16, 2, 9, 10\], .* 48 channels: take lighttaew2_1.safetensors",
        ),
        (
            {"vae": "taew2_1.safetensors", "memory_gb": 1e-6},
            r"decoding 80x72 frames in tiles of 64 pixels",
        ),
    ],
    ids=["other space", "memory"],
)
def test_what_is_refused(
    decode: Callable[..., History], kind: str, inputs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NodeFailedError, match=reason):
        decode(kind, **inputs)


@pytest.mark.parametrize("kind", ["WanStreamVAEDecode", "WanStreamDecodeVideo"])
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"vae": "mine.safetensors"}, "set latent_scale to raw or normalised"),
        ({"vae": "taew_cut.safetensors"}, "taew_cut.safetensors.*truncated"),
        (
            {"vae": "wan_2.1_vae.safetensors", "compute_dtype": "fp16"},
            "set compute_dtype to fp32 or bf16",
        ),
    ],
    ids=["other name", "cut off", "fp16"],
)
def test_what_is_refused_before_anything_runs(
    decode: Callable[..., History], kind: str, inputs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidWorkflowError, match=reason):
        decode(kind, **inputs)


def test_a_node_that_encodes_lists_no_tiny_vae(models: Path, tmp_path: Path) -> None:
    prompt = {
        "text": {
            "class_type": "WanStreamTextEncode",
            "inputs": {"text_encoder": "none", "positive": "a", "negative": "b"},
        },
        "start": {
            "class_type": "WanStreamImageToVideo",
            "inputs": {
                "vae": "taew2_1.safetensors",
                "width": 32,
                "height": 32,
                "frames": 5,
                "batch_size": 1,
            },
        },
        "decode": {
            "class_type": "WanStreamVAEDecode",
            "inputs": {"vae": "taew2_1.safetensors", "latent": ["start", 2]},
        },
        "kept": {"class_type": "Kept", "inputs": {"images": ["decode", 0]}},
    }
    with pytest.raises(InvalidWorkflowError, match=r"taew2_1\.safetensors"):
        run_workflow(
            prompt, nodes=[*NODES, Kept], models=models, output=tmp_path, input_dir=tmp_path
        )
