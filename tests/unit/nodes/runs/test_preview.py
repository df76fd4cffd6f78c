"""Moving previews: when they are due, what they show and cost, and no change to a run."""

import base64
import io as bytes_io
import json
import logging
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image, ImageSequence

from wanstream.batch.rows.lanes import merge_lanes
from wanstream.host.embedded.events import EmbeddedEvents
from wanstream.host.run_events import PREVIEW, STEP
from wanstream.nodes import WanStreamPreview
from wanstream.nodes.runs import preview as previews_module
from wanstream.nodes.runs import run_experts as run_experts_module
from wanstream.sampling import denoise
from wanstream.schema import Cancelled
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.shipped import WORKFLOWS, shipped
from wanstream.wan.checkpoint.components import ComponentFile
from wanstream.wan.latents import WAN21, denormalise
from wanstream.wan.vae import WanVae, open_tiny_vae
from wanstream.wan.vae.tiny import TinyVaeWeights
from wanstream.wan.vae.vae import VaeInputError

CPU = torch.device("cpu")
DENOISED = torch.randn(2, 16, 4, 4, 6, generator=torch.Generator().manual_seed(0))


class Watched(EmbeddedEvents):
    """Events with a page open."""

    def has_viewers(self) -> bool:
        return True


class Previews(previews_module.MovingPreviews):
    """Previews whose seconds are set by the test alone."""

    now = 100.0

    def __init__(self, tiny, latents=DENOISED, events=None, **settings):
        found = previews_module.PreviewSettings(vae=tiny, **settings)
        super().__init__(found, latents, CPU, events or Watched(), clock=lambda: self.now)

    def after(self, seconds: float, latents: torch.Tensor = DENOISED) -> bytes:
        self.now += seconds
        webp = self.update(latents)
        assert webp is not None
        return webp


@pytest.fixture
def tiny(sample_models: Path) -> Path:
    return sample_models / "vae_approx" / "lighttaew2_1.safetensors"


def pictures_of(webp: bytes) -> list[Image.Image]:
    with Image.open(bytes_io.BytesIO(webp)) as picture:
        assert picture.format == "WEBP"
        return [each.convert("RGB") for each in ImageSequence.Iterator(picture)]


def test_pause_before_a_preview_grows_with_its_cost():
    due = [(0.0, 0.0, 0.0), (5.0, 0.2, 5.0), (5.8, 0.3, 5.0), (19.0, 1.0, 0.0)]
    early = [(4.9, 0.0, 5.0), (5.0, 0.3, 5.0), (18.0, 1.0, 0.0)]
    for waited_s, cost_s, every_s in (*due, *early):
        assert previews_module.is_due(waited_s, cost_s, every_s) == (
            (waited_s, cost_s, every_s) in due
        )


@pytest.mark.parametrize(
    ("steps", "step_s", "latent_s"),
    [(3000, 0.01, 0.05), (60, 2.0, 0.03), (500, 0.5, 0.3), (20, 30.0, 0.01)],
)
def test_previews_after_the_first_take_a_twentieth_of_a_run(
    tiny, monkeypatch, steps, step_s, latent_s
):
    load_s = 0.2
    decoded = list[int]()
    latents = torch.zeros(1, 16, 12, 4, 6)

    def stream(self, latents, **_):
        decoded.append(latents.shape[2])
        shown.now += 0.0 if len(decoded) > 1 else load_s
        for at in range(latents.shape[2]):
            shown.now += latent_s
            yield torch.zeros(4 if at else 1, 8, 8, 3, dtype=torch.uint8)

    monkeypatch.setattr(WanVae, "stream", stream)
    shown = Previews(tiny, latents, every_s=0.0)
    with shown:
        for _ in range(steps):
            shown.now += step_s
            shown.update(latents)
            if shown.count:
                share = previews_module.MAX_SHARE * (shown.now - Previews.now)
                assert shown.spent_s <= share + load_s + 2 * latent_s + 1e-9
    assert decoded == [2] + [9] * (len(decoded) - 1), "the first shows 5 of 33 frames"
    assert len(decoded) > 2


def test_preview_shows_the_first_frames_of_the_first_video(tiny):
    with Previews(tiny, frames=9) as shown:
        assert len(pictures_of(shown.after(5))) == 5, "of two latent frames"
        webp = shown.after(5)
        assert shown.update(DENOISED) is None, "the pause begins again"
    with Image.open(bytes_io.BytesIO(webp)) as picture:
        assert (picture.n_frames, picture.size, picture.info["loop"]) == (9, (48, 32), 0)
        picture.load()
        assert picture.info["duration"] == 62  # milliseconds, for 16 frames per second
    with open_tiny_vae(tiny) as vae:
        frames = torch.cat([*vae.stream(denormalise(DENOISED[:1]), device="cpu")])
    for at, picture in enumerate(pictures_of(webp)):
        got = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        distances = [(got.view(frame.shape).float() - frame).abs().mean() for frame in frames]
        assert distances.index(min(distances)) == at, "nearest to its own frame, despite losses"


def test_still_and_wide_pictures(tiny):
    with Previews(tiny, frames=1) as shown:
        assert [len(pictures_of(shown.after(5))) for _ in range(2)] == [1, 1]
    with Previews(tiny) as shown:
        (picture,) = pictures_of(shown.after(5, torch.zeros(1, 16, 1, 2, 100)))
    assert picture.size == (
        previews_module.PREVIEW_PIXELS,
        round(16 * previews_module.PREVIEW_PIXELS / 800),
    )


def test_preview_of_too_many_bytes_has_fewer_frames(tiny, monkeypatch):
    noise = torch.randint(
        256, (previews_module.PREVIEW_PIXELS, previews_module.PREVIEW_PIXELS, 3), dtype=torch.uint8
    )
    one = previews_module._animation([Image.fromarray(noise.numpy())], 16)
    assert len(one) < previews_module.MAX_BYTES, "one picture of noise fits"

    def update(limit: int) -> bytes:
        monkeypatch.setattr(previews_module, "MAX_BYTES", limit)
        return shown.after(5)

    with Previews(tiny, frames=13) as shown:
        update(1_000_000)
        whole = update(1_000_000)
        smaller, least, later = (update(limit) for limit in (len(whole) - 1, 1, 1_000_000))
    # The number of frames is not raised again.
    assert [len(pictures_of(each)) for each in (whole, smaller, least, later)] == [13, 9, 1, 1]
    assert len(smaller) < len(whole)


def test_nothing_is_decoded_while_nobody_is_connected(tiny, monkeypatch):
    connected = [False, True]
    events = Watched()
    monkeypatch.setattr(events, "has_viewers", lambda: connected.pop(0))
    with Previews(tiny, events=events) as shown:
        shown.now += 5
        assert shown.update(DENOISED) is None
        assert shown.update(DENOISED) is not None, "somebody has connected"


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (MemoryError("no room"), True),
        (OSError("lost"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False),
        (KeyError("WEBP"), False),
    ],
)
def test_run_goes_on_without_previews_that_fail(tiny, monkeypatch, caplog, error, is_known):
    fail = mock.Mock(side_effect=error)
    monkeypatch.setattr(previews_module.MovingPreviews, "_image", fail)
    with caplog.at_level(logging.WARNING, "wanstream.nodes"), Previews(tiny) as shown:
        for _ in range(3):
            shown.now += 100
            assert shown.update(DENOISED) is None
    fail.assert_called_once()
    (record,) = caplog.records
    words = f"no more previews in this run, which goes on: {type(error).__name__}: {error}"
    assert record.getMessage() == words
    assert (record.exc_info is None) == is_known, "a possible mistake in the code has its traceback"


class HostInterrupt(Exception):
    """Stand-in for ComfyUI's own class."""


@pytest.mark.parametrize("interrupt", [Cancelled, HostInterrupt])
def test_cancel_ends_a_preview(tiny, interrupt):
    checks = iter([None, interrupt("stopped")])

    class Interrupting(Watched):
        def raise_if_stopped(self) -> None:
            if (error := next(checks)) is not None:
                raise error

        def is_stop(self, error: BaseException) -> bool:
            return isinstance(error, interrupt)

    with Previews(tiny, events=Interrupting()) as shown, pytest.raises(interrupt):
        shown.after(5)
    assert next(checks, "used") == "used", "before the second latent frame"


def test_impossible_previews_are_refused_before_the_run(tiny, monkeypatch):
    for frames, nearest in ((0, 1), (2, 1), (4, 5), (6, 5), (-3, 1), (1024, 1025)):
        refused = f"frames is {frames}, it must be a multiple of 4 plus 1: use {nearest}$"
        with pytest.raises(ValueError, match=refused):
            WanStreamPreview.validate_inputs(frames=frames)
        with pytest.raises(ValueError, match=refused):
            previews_module.PreviewSettings(vae=tiny, frames=frames)
    assert all(WanStreamPreview.validate_inputs(frames=frames) for frames in (1, 5, 1025, None))
    message = r"\[2, 16, 4, 4, 6\], .* 48 channels: take lighttaew2_1"
    with pytest.raises(VaeInputError, match=message):
        Previews(tiny.with_name("taew2_2.safetensors"))
    monkeypatch.setattr("PIL.features.check", lambda feature: feature != "webp")
    with pytest.raises(RuntimeError, match="built without WebP: install another one"):
        Previews(tiny)


@pytest.mark.parametrize(
    ("size", "height", "width"), [("480p it takes about 0.4", 60, 104), ("720p 1.0", 90, 160)]
)
def test_help_page_has_the_memory_of_a_preview(size, height, width):
    file = ComponentFile(path=Path("taew2_1.safetensors"), weights={})
    parts = {"path": file.path, "space": WAN21, "widths": (256, 128, 64, 64), "file": file}
    opened = TinyVaeWeights(**parts, scale="normalised")
    used = height * width * opened.decode_pixel_bytes(9, torch.bfloat16)
    page = (WORKFLOWS.parents[1] / "web" / "docs" / "WanStreamPreview.md").read_text("utf-8")
    assert f"{size} GB" in page.replace(" of that device", "")
    assert float(size.split()[-1]) == round(used / 1e9, 1)
    twice = height * width * opened.decode_pixel_bytes(9, torch.float32)
    assert 2 * used == twice, "twice that in fp32"


class TestInARun:
    @pytest.fixture
    def previewed(self, run, monkeypatch):
        """`previewed(preview)` returns latents and events, with a preview due at every step."""
        monkeypatch.setattr(previews_module, "is_due", lambda *_: True)

        def previewed(preview, *, viewers=True, seeds=(42,)):
            monkeypatch.setattr(embedded_host.events, "has_viewers", lambda: viewers)
            given = {"preview": preview or {}}
            rows = [
                shipped("draft", **given, sampler={"seed": n}, save={"filename_prefix": f"{n}"})
                for n in seeds
            ]
            nodes = rows[0] if len(rows) == 1 else merge_lanes(rows)[0]
            if preview is None:
                del nodes["preview"], nodes["sampler"]["inputs"]["preview"]
            events = []

            def record(event, payload):
                events.append((event, json.loads(json.dumps(payload))))

            found = run(nodes, device=CPU, on_event=record, only=["sampler"]).results["sampler"][0]
            return (found if len(rows) == 1 else found[0])["samples"], events

        return previewed

    @pytest.mark.slow  # runs whole workflows
    def test_result_is_bit_equal_and_each_step_is_shown(self, previewed):
        """A batch shows its first video."""
        latents, plain = previewed(None)
        watched, events = previewed({"frames": 5})
        unwatched, unseen = previewed({"frames": 5}, viewers=False)
        first, both = previewed({"frames": 5}, seeds=(42, 43))
        assert all(torch.equal(each, latents) for each in (watched, unwatched, first))
        assert not [event for event, _ in (*plain, *unseen) if event == PREVIEW]
        assert [event for event, _ in events if event in (STEP, PREVIEW)] == [STEP, PREVIEW] * 4
        shown = [payload for event, payload in events if event == PREVIEW]
        assert [payload["done"] for payload in shown] == [1, 2, 3, 4]
        [number] = {payload["run"] for event, payload in events if event == STEP}
        assert {(payload["node"], payload["run"]) for payload in shown} == {("sampler", number)}
        images = [payload["image"] for payload in shown]
        assert [payload["image"] for event, payload in both if event == PREVIEW] == images
        for image in images:
            kind, _, data = image.partition(",")
            assert kind == "data:image/webp;base64"
            assert len(pictures_of(base64.b64decode(data))) == 5

    def test_step_of_another_part_of_a_batch_shows_nothing(self, previewed, monkeypatch):
        """Workers in parts report every video's steps: here each step comes twice."""

        def in_two_parts(*args, on_step, **more):
            def report(step):
                on_step(replace(step, part=1, done=2 * step.done - 1, total=2 * step.total))
                on_step(replace(step, done=2 * step.done, total=2 * step.total))

            return denoise(*args, on_step=report, **more)

        monkeypatch.setattr(run_experts_module, "denoise", in_two_parts)
        _, events = previewed({"frames": 5})
        kinds = [event for event, _ in events if event in (STEP, PREVIEW)]
        assert kinds == [STEP, STEP, PREVIEW] * 4
        done = [payload["done"] for event, payload in events if event == PREVIEW]
        assert done == [1, 2, 3, 4], "steps of the shown video"
