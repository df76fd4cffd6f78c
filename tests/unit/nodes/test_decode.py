"""Decoding under a host: a copy of the latent, tiles by memory, retries when memory runs out."""

import logging
import shutil

import av
import pytest
import torch
from safetensors.torch import load_file

from wanstream.host import io
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.decode import WanStreamVAEDecode
from wanstream.nodes.runs import decode as decode_run
from wanstream.nodes.runs.decode import DecodeSettings, decode_images, decode_to_file
from wanstream.nodes.runs.latent_backup import VideoRefusedError
from wanstream.nodes.runs.video_file import VideoEncoding, write_video
from wanstream.nodes.workers import workers_inputs
from wanstream.schema import Cancelled
from wanstream.schema.refs import IN_PROCESS, WorkersRef
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import VAE, constant
from wanstream.tests.support.host.shipped import node
from wanstream.wan.vae import HEAP_BYTES, Tiling, TilingError, VaeMemoryError
from wanstream.wan.vae.vae import DecodeOutOfMemoryError, VaeInputError, open_vae

LATENT = torch.randn(1, 16, 2, 8, 10, generator=torch.Generator().manual_seed(0))
IMAGES = "WanStreamVAEDecode"
VIDEO = "WanStreamDecodeVideo"
BOTH = pytest.mark.parametrize("kind", [IMAGES, VIDEO])
ONE_WORKER = {socket.id: socket.as_dict()["default"] for socket in workers_inputs()}
WORKERS = {"workers": ["workers", 0]}

NOISE = constant("Noise", io.Latent.Output(), {"samples": LATENT})


@pytest.fixture
def decode(run):
    """`decode(kind, **inputs)` runs the node on `LATENT`, with progress and models as options."""

    def decode(kind, **inputs):
        options = {name: inputs.pop(name) for name in ("on_progress", "models") if name in inputs}
        saving = {} if kind == IMAGES else {"fps": 16.0, "filename_prefix": "video", "crf": 1}
        inputs = {"vae": VAE, "latent": ["noise", 0], **saving, **inputs}
        prompt = {"noise": node("Noise"), "decode": node(kind, **inputs)}
        if "workers" in inputs:
            workers = {**ONE_WORKER, "count": 1, "cluster": IN_PROCESS}
            prompt["workers"] = node("WanStreamWorkers", **workers)
        if kind == IMAGES:
            prompt["shown"] = node("Shown", value=["decode", 0])
        device = torch.device("cpu")
        return run(prompt, more_nodes=[NOISE], device=device, keep=["decode"], **options)

    return decode


def frames_of(file, tile, **options):
    tiling = Tiling.of(tile) if tile else None
    with open_vae(file, **options) as vae:
        return vae.decode(LATENT, device="cpu", tiling=tiling).flatten(0, 1)


@pytest.fixture(scope="module")
def frames(sample_models):
    """Return frames by tile size, with 0 for whole frames."""
    return {tile: frames_of(sample_models / "vae" / VAE, tile) for tile in (0, 64)}


def budget_for(vae, latent, tiling, *, to_file=False):
    """Return a budget in GB with just enough room for such tiles."""
    needs = vae.decode_needs(latent, to_file=to_file)
    return (needs.device_bytes(tiling) + needs.host_bytes(tiling) + HEAP_BYTES + 1000) / 1e9


def pictures(path):
    with av.open(str(path)) as container:
        decoded = (frame.to_ndarray(format="rgb24") for frame in container.decode(video=0))
        return torch.stack([torch.from_numpy(picture) for picture in decoded])


def check_made(history, output, expected):
    """Compare images or the only file with these frames. Nothing else may be left."""
    if history.results.get("decode"):
        assert torch.equal(history.results["decode"][0], expected)
        assert [*output.rglob("*")] == []
        return
    (made,) = output.iterdir()
    assert made.name == "video_00001_.mp4"
    write_video(output / "expected.mp4", expected, fps=16, crf=1, metadata={})
    assert torch.equal(pictures(made), pictures(output / "expected.mp4"))


def short(*, times=1, at=3):
    """Raise out of memory `times` times, from the latent frame `at` on."""
    seen: list[int] = []

    def on_progress(progress):
        if progress.node_id == "decode":
            seen.append(progress.done)
            if at <= len(seen) < at + times:
                raise torch.OutOfMemoryError("no room for a frame")

    return on_progress


def kept_in(output):
    (kept,) = output.rglob("*.latent")
    assert torch.equal(load_file(kept)["latent_tensor"], LATENT)
    assert not [*output.rglob("*.mp4*")]
    return kept


@BOTH
def test_whole_frames_where_they_fit(decode, frames, output, kind):
    history = decode(kind)
    check_made(history, output, frames[0])
    assert "text" not in history.outputs.get("decode", {}), "nothing to report"


@pytest.mark.parametrize(("tile", "workers"), [(0, {}), (64, WORKERS)], ids=["here", "worker"])
def test_vae_computes_in_the_dtype_of_the_node(
    decode, frames, output, sample_models, tile, workers
):
    expected = frames_of(sample_models / "vae" / VAE, tile, dtype=torch.bfloat16)
    assert not torch.equal(expected, frames[tile])
    history = decode(IMAGES, compute_dtype="bf16", tile_size=tile, **workers)
    check_made(history, output, expected)


def test_tiles_are_the_largest_that_the_budget_allows(decode, frames, output, sample_models):
    with open_vae(sample_models / "vae" / VAE) as vae:
        budget = budget_for(vae, LATENT, Tiling.of(64), to_file=True)
    history = decode(VIDEO, memory_gb=budget)
    assert not torch.equal(frames[64], frames[0])
    check_made(history, output, frames[64])
    (said,) = history.outputs["decode"]["text"]
    assert said.startswith("decoded in tiles of 64 pixels: whole frames take ")


@pytest.mark.parametrize(("kind", "more"), [(IMAGES, {}), (VIDEO, {}), (IMAGES, WORKERS)])
def test_budget_below_one_tile_is_refused_and_keeps_the_latent(decode, output, kind, more):
    least = r"in tiles of 64 pixels, .*; 0\.10 GB given.* The latent is kept in"
    with pytest.raises(NodeFailedError, match="0.10 GB given" if more else least) as failed:
        decode(kind, memory_gb=0.1, **more)
    assert str(kept_in(output)) in str(failed.value)
    assert more or isinstance(failed.value.__cause__, VaeMemoryError)


LESS = "decode straight into a file .*, or make the video shorter"


@pytest.mark.parametrize(
    ("kind", "inputs", "ways"),
    [
        (IMAGES, {"tile_size": 64}, f"set tile_size to 0, .*, or {LESS}"),
        (IMAGES, {}, LESS),
        (VIDEO, {}, "process: make the video shorter or smaller"),
    ],
)
def test_too_little_ram_is_refused_and_keeps_the_latent(
    kind, inputs, ways, decode, output, monkeypatch
):
    monkeypatch.setattr(decode_run, "insufficient_ram", lambda nbytes: 10**9 if nbytes else None)
    message = rf"decoding 5 frames takes about .* 1\.00 GB are free .*{ways}"
    with pytest.raises(NodeFailedError, match=message) as failed:
        decode(kind, **inputs)
    assert isinstance(failed.value.__cause__, VaeMemoryError)
    kept_in(output)


@BOTH
def test_memory_that_runs_out_leads_to_smaller_tiles(decode, frames, output, kind):
    history = decode(kind, on_progress=short())
    check_made(history, output, frames[64])
    said = "no memory for decoding whole frames: retrying with tiles of 64 pixels"
    assert history.outputs["decode"]["text"] == [said]


BY_MEMORY = "decoded in tiles of 80 pixels, by the memory of the workers (1)"
RETRIED = "no memory for decoding tiles of 80 pixels: retrying with tiles of 64 pixels"


@pytest.mark.parametrize(
    ("more", "tile", "said"),
    [({"tile_size": 64}, 64, []), ({"on_progress": short(at=2)}, 64, [BY_MEMORY, RETRIED])],
)
def test_worker_decodes_in_tiles(more, tile, said, decode, frames, output):
    history = decode(IMAGES, **WORKERS, **more)
    (text,) = history.outputs.get("decode", {}).get("text", [""])
    assert text.splitlines() == said
    check_made(history, output, frames[tile])


def test_no_memory_for_the_smallest_tile_keeps_the_latent(decode, output):
    message = r"tiles of 64 pixels, the smallest size: no room.*\. The latent is kept"
    with pytest.raises(NodeFailedError, match=message) as failed:
        decode(IMAGES, on_progress=short(times=99))
    assert isinstance(failed.value.__cause__, DecodeOutOfMemoryError)
    assert kept_in(output).parent == output / "latents"


def test_latent_is_kept_while_it_is_decoded_and_after_a_cancel(decode, output, caplog):
    found = []

    def stop(progress):
        if progress.node_id == "decode" and progress.total > 1:
            found.extend(output.rglob("*.latent"))
            embedded_host.stop()

    with caplog.at_level(logging.WARNING, "wanstream.nodes"), pytest.raises(Cancelled):
        decode(IMAGES, on_progress=stop)
    assert found == [kept_in(output)]
    assert f"its latent is kept in {found[0]}" in caplog.text


@pytest.mark.parametrize(("tile_size", "said"), [(56, "give 64 or more"), (100, "multiple of 8")])
def test_impossible_tile_size_is_refused_before_the_run(tile_size, said):
    with pytest.raises(TilingError, match=said):
        WanStreamVAEDecode.validate_inputs(tile_size)
    assert all(WanStreamVAEDecode.validate_inputs(fine) is True for fine in (None, 0, 64, 256))


@pytest.fixture
def models(sample_models, tmp_path):
    """The test model's VAEs, and a tiny VAE under another name."""
    folder = tmp_path / "models"
    for kind in ("vae", "vae_approx"):
        shutil.copytree(sample_models / kind, folder / kind)
    whole = (folder / "vae_approx" / "taew2_1.safetensors").read_bytes()
    (folder / "vae" / "mine.safetensors").write_bytes(whole)
    return folder


@pytest.mark.parametrize(("tile", "workers"), [(64, {}), (0, WORKERS)], ids=["here", "worker"])
def test_images_of_a_tiny_vae(decode, sample_models, tile, workers):
    history = decode(IMAGES, vae="taew2_1.safetensors", tile_size=tile, **workers)
    expected = frames_of(sample_models / "vae_approx" / "taew2_1.safetensors", tile)
    # Without a tile size, the only worker decodes one tile as large as the frame.
    assert (history.results["decode"][0] - expected).abs().max() <= (1e-6 if workers else 0)


def test_video_of_a_tiny_vae(decode, output):
    decode(VIDEO, vae="lighttaew2_1.safetensors", compute_dtype="bf16")
    assert pictures(output / "video_00001_.mp4").shape == (5, 64, 80, 3)


@pytest.mark.slow  # runs whole workflows
@pytest.mark.parametrize(("scale", "workers"), [("raw", {}), ("normalised", WORKERS)])
def test_latent_scale_is_used_wherever_tiles_are_decoded(decode, models, scale, workers):
    inputs = {"vae": "mine.safetensors", "latent_scale": scale, "tile_size": 64, **workers}
    found = decode(IMAGES, models=models, **inputs).results["decode"][0]
    for each in ("raw", "normalised"):
        expected = frames_of(models / "vae" / "mine.safetensors", 64, latent_scale=each)
        assert torch.equal(found, expected) == (each == scale)


OTHER_SPACE = r"\[1, 16, 2, 8, 10\], .* 48 channels: take lighttaew2_1.safetensors"
REFUSED = [
    (NodeFailedError, "taew2_2", {}, OTHER_SPACE),
    (NodeFailedError, "taew2_1", {"memory_gb": 1e-6}, "decoding 80x64 frames in tiles of 64"),
    (InvalidWorkflowError, "mine", {}, "set latent_scale to raw or normalised"),
    (InvalidWorkflowError, "wan_2.1_vae", {"compute_dtype": "fp16"}, "compute_dtype to fp32 or"),
]


@pytest.mark.parametrize(("error", "vae", "inputs", "reason"), REFUSED)
def test_unsuitable_vae_is_refused(decode, models, error, vae, inputs, reason):
    with pytest.raises(error, match=reason):
        decode(IMAGES, models=models, vae=f"{vae}.safetensors", **inputs)


@pytest.mark.usefixtures("opened_test_model")
class TestOf5B:
    """Wan2.2 5B's VAE, with 48 channels and pictures 16 times as large."""

    LATENT = torch.randn(1, 48, 1, 5, 9, generator=torch.Generator().manual_seed(0))
    VAE = "wan2.2_vae.safetensors"
    WORKER = WorkersRef(count=1, address=IN_PROCESS)

    @pytest.fixture
    def opened(self, sample_models):
        with open_vae(sample_models / "vae" / self.VAE) as vae:
            yield vae

    def decoded(self, latents, vae=VAE, workers=None, **settings):
        found = DecodeSettings.of(embedded_host, vae, latents, **settings)
        return decode_images(embedded_host, found, latents, workers, node_id=None)

    def test_tiles_by_memory_and_on_a_worker(self, opened):
        tiling = Tiling.of(128, 16)
        expected = opened.decode(self.LATENT, device="cpu", tiling=tiling)
        budget = budget_for(opened, self.LATENT, tiling)
        videos, (note,) = self.decoded(self.LATENT, memory_gb=budget)
        assert note.text.startswith("decoded in tiles of 128 pixels: whole frames take ")
        shared, _ = self.decoded(self.LATENT, tile_size=128, workers=self.WORKER)
        assert torch.equal(videos, expected)
        assert torch.equal(shared, expected)

    def test_video_file_has_the_size_of_the_frames(self):
        settings = DecodeSettings.of(embedded_host, self.VAE, self.LATENT)
        encoding = VideoEncoding(fps=24, crf=18, metadata={})
        given = (settings, self.LATENT, "video/%width%x%height%")
        file, _ = decode_to_file(embedded_host, *given, node_id=None, video=encoding)
        assert pictures(file.path).shape == (1, 80, 144, 3)
        assert file.path.name.startswith("144x80")

    def test_tile_size_is_a_multiple_of_16(self):
        for tile, said in ((72, "give 128 or more"), (136, "give a multiple of 16")):
            with pytest.raises(TilingError, match=said):
                DecodeSettings.of(embedded_host, self.VAE, self.LATENT, tile_size=tile)

    def test_vae_of_the_other_model_is_refused_and_keeps_the_latent(self, tmp_path):
        for more in ({}, {"tile_size": 128, "workers": self.WORKER}):
            message = r"\[1, 48, 1, 5, 9\], of Wan2\.2 5B, .* take wan2\.2_vae\.safetensors"
            with pytest.raises(VideoRefusedError, match=message):
                self.decoded(self.LATENT, vae=VAE, **more)
        kept, _ = tmp_path.rglob("*.latent")
        assert torch.equal(load_file(kept)["latent_tensor"], self.LATENT), "all its channels"
        message = r"for 48 channels: take wan_2\.1_vae\.safetensors for"
        with pytest.raises(VideoRefusedError, match=message):
            self.decoded(self.LATENT[:, :16])
        with pytest.raises(VaeInputError, match=r"give \[B, 16 or 48, T, h, w\]"):
            DecodeSettings.of(embedded_host, self.VAE, torch.zeros(1, 4, 8, 8))
