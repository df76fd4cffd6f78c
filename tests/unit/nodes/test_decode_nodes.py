"""Decoding under a host: a copy of the latent, tiles by memory, retries when memory runs out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from safetensors.torch import load_file

from wanstream.host import io
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.latents import WanStreamEmptyLatent, WanStreamImageToVideo
from wanstream.nodes.runs import decode as decode_run
from wanstream.nodes.runs.decode import encode_here
from wanstream.nodes.runs.latent_backup import VideoNotSavedError
from wanstream.nodes.runs.video_file import write_video
from wanstream.nodes.workers import workers_inputs
from wanstream.sampling.steps import InsufficientMemoryError, errors
from wanstream.schema import Cancelled
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.wan.vae.memory import HEAP_BYTES, VaeMemoryError, too_little
from wanstream.wan.vae.tiles import Tiling, as_pixels
from wanstream.wan.vae.vae import DecodeOutOfMemoryError, open_vae, retry_with_smaller_tiles

NODES = asyncio.run(WanStreamExtension().get_node_list())
VAE = "wan_2.1_vae.safetensors"
LATENT = torch.randn(1, 16, 2, 8, 10, generator=torch.Generator().manual_seed(0))

ONE_WORKER = {socket.id: socket.as_dict()["default"] for socket in workers_inputs()}
ONE_WORKER |= {"count": 1, "cluster": "in-process"}

Decode = Callable[..., History]


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
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def decode(sample_models: Path, tmp_path: Path, output: Path) -> Iterator[Decode]:
    """`decode(class_type, on_progress=None, **inputs)` runs the node on `LATENT`."""

    def run(
        class_type: str, *, on_progress: Callable[[NodeProgress], None] | None = None, **inputs: Any
    ) -> History:
        prompt = {
            "given": {"class_type": "Given", "inputs": {}},
            "decode": {
                "class_type": class_type,
                "inputs": {"vae": VAE, "latent": ["given", 0], **inputs},
            },
        }
        if "workers" in inputs:
            prompt["workers"] = {"class_type": "WanStreamWorkers", "inputs": ONE_WORKER}
        if class_type == "WanStreamVAEDecode":
            prompt["kept"] = {"class_type": "Kept", "inputs": {"images": ["decode", 0]}}
        else:
            saving = {"fps": 16.0, "filename_prefix": "video", "crf": 1}
            prompt["decode"]["inputs"] = {**saving, **prompt["decode"]["inputs"]}
        return run_workflow(
            prompt,
            nodes=[*NODES, Given, Kept],
            models=sample_models,
            output=output,
            input_dir=tmp_path,
            device=torch.device("cpu"),
            on_progress=on_progress,
            keep=["decode"],
        )

    yield run
    embedded_host.free_experts()
    embedded_host.memory.worker_registry.close()


@pytest.fixture(scope="module")
def frames(sample_models: Path) -> dict[int, torch.Tensor]:
    """Return frames by tile size, with 0 for whole frames.

    One tile of 80 pixels covers a frame too, with other bits.
    """
    with open_vae(sample_models / "vae" / VAE) as vae:
        whole = vae.decode(LATENT, device="cpu").flatten(0, 1)
        tiled = vae.decode(LATENT, device="cpu", tiling=Tiling.of(64)).flatten(0, 1)
        return {0: whole, 64: tiled, 80: as_pixels(vae.decode_tile(LATENT, device="cpu"))}


def budget_for(sample_models: Path, tile: int, *, to_file: bool) -> float:
    """Return a budget in GB with just enough room for such tiles."""
    with open_vae(sample_models / "vae" / VAE) as vae:
        needs = vae.decode_needs(LATENT, to_file=to_file)
    tiling = Tiling.of(tile)
    return (needs.device_bytes(tiling) + needs.host_bytes(tiling) + HEAP_BYTES + 1000) / 1e9


def pictures(path: Path) -> torch.Tensor:
    with av.open(str(path)) as container:
        return torch.stack(
            [
                torch.from_numpy(frame.to_ndarray(format="rgb24"))
                for frame in container.decode(video=0)
            ]
        )


def short_once(node: str = "decode", at: int = 3) -> Callable[[NodeProgress], None]:
    """Raise out of memory once, at the third latent frame."""
    seen: list[int] = []

    def on_progress(progress: NodeProgress) -> None:
        if progress.node_id == node:
            seen.append(progress.done)
            if len(seen) == at:
                raise torch.OutOfMemoryError("no room for a frame")

    return on_progress


def test_whole_frames_where_they_fit(
    decode: Decode, frames: dict[int, torch.Tensor], output: Path
) -> None:
    history = decode("WanStreamVAEDecode")
    assert torch.equal(history.results["decode"][0], frames[0])
    assert "decode" not in history.outputs, "nothing to tell"
    assert [*output.rglob("*")] == []


@pytest.mark.parametrize(
    "class_type",
    ["WanStreamVAEDecode", pytest.param("WanStreamDecodeVideo", marks=pytest.mark.slow)],
)
def test_the_vae_computes_in_the_dtype_that_is_asked_for(
    decode: Decode,
    frames: dict[int, torch.Tensor],
    output: Path,
    tmp_path: Path,
    sample_models: Path,
    class_type: str,
) -> None:
    history = decode(class_type, compute_dtype="bf16")
    with open_vae(sample_models / "vae" / VAE, torch.bfloat16) as vae:
        expected = vae.decode(LATENT, device="cpu").flatten(0, 1)
    assert not torch.equal(expected, frames[0])
    if class_type == "WanStreamVAEDecode":
        assert torch.equal(history.results["decode"][0], expected)
    else:
        write_video(tmp_path / "expected.mp4", expected, fps=16, crf=1, metadata={})
        assert torch.equal(
            pictures(output / "video_00001_.mp4"), pictures(tmp_path / "expected.mp4")
        )


def test_the_largest_tiles_that_the_given_memory_allows(
    decode: Decode, frames: dict[int, torch.Tensor], sample_models: Path
) -> None:
    history = decode("WanStreamVAEDecode", memory_gb=budget_for(sample_models, 64, to_file=False))
    assert torch.equal(history.results["decode"][0], frames[64])
    assert not torch.equal(frames[64], frames[0])
    (said,) = history.outputs["decode"]["text"]
    assert said.startswith("decoded in tiles of 64 pixels: whole frames take ")


@pytest.mark.parametrize("class_type", ["WanStreamVAEDecode", "WanStreamDecodeVideo"])
def test_a_budget_below_one_tile_is_refused_and_the_latent_is_there(
    decode: Decode, output: Path, class_type: str
) -> None:
    with pytest.raises(
        NodeFailedError, match=r"in tiles of 64 pixels, .*; 0\.10 GB given.* The latent is kept in"
    ) as no:
        decode(class_type, memory_gb=0.1)
    assert isinstance(no.value.__cause__, VaeMemoryError)
    (kept,) = output.rglob("*.latent")
    assert str(kept) in str(no.value)
    assert torch.equal(load_file(kept)["latent_tensor"], LATENT)
    assert not [*output.rglob("*.mp4*")]


def test_a_video_is_that_of_the_images(
    decode: Decode,
    frames: dict[int, torch.Tensor],
    output: Path,
    tmp_path: Path,
    sample_models: Path,
) -> None:
    for tile, memory in ((0, 0.0), (64, budget_for(sample_models, 64, to_file=True))):
        decode("WanStreamDecodeVideo", memory_gb=memory)
        write_video(tmp_path / "expected.mp4", frames[tile], fps=16, crf=1, metadata={})
        made = sorted(output.glob("video_*.mp4"))[-1]
        assert torch.equal(pictures(made), pictures(tmp_path / "expected.mp4"))
    assert [path.name for path in sorted(output.iterdir())] == [
        "video_00001_.mp4",
        "video_00002_.mp4",
    ]


@pytest.mark.parametrize(
    ("class_type", "inputs", "ways"),
    [
        (
            "WanStreamVAEDecode",
            {"tile_size": 64},
            "set tile_size to 0, .*, or decode straight into a file .*, or make",
        ),
        ("WanStreamVAEDecode", {}, "decode straight into a file .*, or make the video shorter"),
        ("WanStreamDecodeVideo", {}, "process: make the video shorter or smaller"),
    ],
)
def test_frames_for_which_there_is_too_little_ram_are_refused_and_the_latent_is_there(
    class_type: str,
    inputs: dict[str, Any],
    ways: str,
    decode: Decode,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        decode_run, "insufficient_ram", lambda nbytes: 1_000_000_000 if nbytes else None
    )
    with pytest.raises(
        NodeFailedError, match=rf"decoding 5 frames takes about .* 1\.00 GB are free .*{ways}"
    ) as failed:
        decode(class_type, **inputs)
    assert isinstance(failed.value.__cause__, VaeMemoryError)
    (kept,) = output.rglob("*.latent")
    assert torch.equal(load_file(kept)["latent_tensor"], LATENT)


@pytest.mark.parametrize("class_type", ["WanStreamVAEDecode", "WanStreamDecodeVideo"])
def test_memory_that_runs_out_leads_to_smaller_tiles(
    decode: Decode, frames: dict[int, torch.Tensor], output: Path, tmp_path: Path, class_type: str
) -> None:
    history = decode(class_type, on_progress=short_once())
    if class_type == "WanStreamVAEDecode":
        assert torch.equal(history.results["decode"][0], frames[64])
        assert history.outputs["decode"]["text"] == [
            "no memory for decoding whole frames: retrying with tiles of 64 pixels"
        ]
    else:
        write_video(tmp_path / "expected.mp4", frames[64], fps=16, crf=1, metadata={})
        assert torch.equal(
            pictures(output / "video_00001_.mp4"), pictures(tmp_path / "expected.mp4")
        )
    assert not [*output.rglob("*.latent"), *output.rglob("*.part")]


@pytest.mark.parametrize(("tile_size", "made_in"), [(64, 64), (0, 80)])
def test_a_worker_takes_the_tiles_that_are_given_or_those_that_its_memory_allows(
    decode: Decode, frames: dict[int, torch.Tensor], output: Path, tile_size: int, made_in: int
) -> None:
    history = decode("WanStreamVAEDecode", workers=["workers", 0], tile_size=tile_size)
    told = [] if tile_size else ["decoded in tiles of 80 pixels, by the memory of the workers (1)"]
    assert history.outputs.get("decode", {}).get("text", []) == told
    assert torch.equal(history.results["decode"][0], frames[made_in])
    assert [*output.rglob("*")] == []


def test_memory_that_runs_out_on_a_worker_leads_to_smaller_tiles(
    decode: Decode, frames: dict[int, torch.Tensor], output: Path
) -> None:
    history = decode("WanStreamVAEDecode", on_progress=short_once(at=2), workers=["workers", 0])
    assert torch.equal(history.results["decode"][0], frames[64])
    (said,) = history.outputs["decode"]["text"]
    assert said.splitlines() == [
        "decoded in tiles of 80 pixels, by the memory of the workers (1)",
        "no memory for decoding tiles of 80 pixels: retrying with tiles of 64 pixels",
    ]
    assert [*output.rglob("*")] == []


def test_a_budget_below_one_tile_is_refused_for_workers_too(decode: Decode, output: Path) -> None:
    with pytest.raises(NodeFailedError, match=r"0\.10 GB given.* The latent is kept in"):
        decode("WanStreamVAEDecode", memory_gb=0.1, workers=["workers", 0])
    assert len([*output.rglob("*.latent")]) == 1


def test_no_memory_at_all_costs_the_decode_but_not_the_latent(decode: Decode, output: Path) -> None:
    def always_short(progress: NodeProgress) -> None:
        if progress.node_id == "decode" and progress.total > 1:
            raise torch.OutOfMemoryError("none")

    with pytest.raises(
        NodeFailedError, match=r"tiles of 64 pixels, the smallest size: none\. The latent is kept"
    ) as no:
        decode("WanStreamVAEDecode", on_progress=always_short)
    assert isinstance(no.value.__cause__, DecodeOutOfMemoryError)
    (kept,) = output.rglob("*.latent")
    assert kept.parent == output / "latents"


def test_the_latent_is_there_while_it_is_decoded_and_after_a_cancel(
    decode: Decode, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Path] = []

    def stop(progress: NodeProgress) -> None:
        if progress.node_id == "decode" and progress.total > 1:
            found.extend(output.rglob("*.latent"))
            embedded_host.stop()

    with caplog.at_level(logging.WARNING, "wanstream.nodes"), pytest.raises(Cancelled):
        decode("WanStreamVAEDecode", on_progress=stop)
    (kept,) = found
    assert kept.exists()
    assert f"its latent is kept in {kept}" in caplog.text


def test_a_video_that_cannot_be_written_leaves_its_latent(decode: Decode, output: Path) -> None:
    def block(progress: NodeProgress) -> None:
        if progress.node_id == "decode" and progress.total > 1:
            (output / "video_00001_.mp4").mkdir(parents=True, exist_ok=True)

    with pytest.raises(NodeFailedError, match="could not be written") as no:
        decode(
            "WanStreamDecodeVideo",
            on_progress=lambda p: block(p) if p.node_id == "decode" and p.total > 1 else None,
        )
    assert isinstance(no.value.__cause__, VideoNotSavedError)
    (kept,) = output.rglob("*.latent")
    assert kept.parent == output / "latents"
    assert f"The latent is kept in {kept}" in str(no.value)


def test_a_latent_or_a_start_video_for_which_there_is_too_little_ram_is_not_made(
    monkeypatch: pytest.MonkeyPatch, sample_models: Path, tmp_path: Path
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        errors, "insufficient_ram", lambda nbytes: asked.append(nbytes) or 2_000_000_000
    )
    with pytest.raises(
        InsufficientMemoryError, match=r"the latent takes 4\.31 GB of RAM, and 2\.00 GB are free"
    ):
        WanStreamEmptyLatent.execute(width=4096, height=4096, frames=1025, batch_size=1)
    folders = Folders(models=sample_models, output=tmp_path, input=tmp_path)
    size = {"width": 4096, "height": 4096, "frames": 1025}
    with (
        embedded_host.opened(folders, device=torch.device("cpu")),
        pytest.raises(
            InsufficientMemoryError, match=r"the video with the start image takes 206\.36 GB of RAM"
        ),
    ):
        WanStreamImageToVideo.execute(
            [], [], vae=VAE, image=torch.zeros(1, 8, 8, 3), batch_size=1, **size
        )
    assert asked == [16 * 257 * 512 * 512 * 4, 4096 * 4096 * 1025 * 3 * 4]


@pytest.mark.slow  # runs whole workflows
def test_a_start_image_is_encoded_in_the_tiles_that_fit(
    sample_models: Path, tmp_path: Path
) -> None:
    video = torch.rand(5, 72, 96, 3, generator=torch.Generator().manual_seed(0))
    path = sample_models / "vae" / VAE
    with embedded_host.opened(
        Folders(models=sample_models, output=tmp_path, input=tmp_path), device=torch.device("cpu")
    ):
        made = encode_here(embedded_host, path, video)
    with open_vae(path) as vae:
        assert torch.equal(made, vae.encode(video, device="cpu")), "whole where it fits"
        assert "encoding 96x72 frames" in too_little(vae.encode_needs(video), 0, shared=True)

        def encode(tiling: Tiling | None) -> torch.Tensor:
            if tiling is None:
                raise torch.OutOfMemoryError
            return vae.encode(video, device="cpu", tiling=tiling)

        tiled = retry_with_smaller_tiles(encode, vae.encode_needs(video), None)
        assert torch.equal(tiled, vae.encode(video, device="cpu", tiling=Tiling.of(64)))
