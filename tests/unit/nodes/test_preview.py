"""Moving previews: when they are due, what they show and cost, and no change to a run."""

from __future__ import annotations

import asyncio
import base64
import io as bytes_io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wanstream.batch.rows.lanes import merge_lanes
from wanstream.host.embedded.events import EmbeddedEvents
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.host.run_events import PREVIEW, STEP
from wanstream.nodes import WanStreamExtension, WanStreamPreview
from wanstream.nodes.runs import preview as previews_module
from wanstream.nodes.runs import run_experts as run_experts_module
from wanstream.nodes.runs.preview import (
    MAX_SHARE,
    PREVIEW_PIXELS,
    MovingPreviews,
    PreviewSettings,
    is_due,
)
from wanstream.sampling import denoise
from wanstream.sampling.steps import DenoiseResult, StepProgress
from wanstream.schema import Cancelled
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.wan.checkpoint.components import ComponentFile
from wanstream.wan.latents import WAN21, denormalise
from wanstream.wan.vae import WanVae, open_tiny_vae
from wanstream.wan.vae.tiny import TinyVaeWeights
from wanstream.wan.vae.vae import VaeInputError

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
NODES = asyncio.run(WanStreamExtension().get_node_list())
CPU = torch.device("cpu")
DENOISED = torch.randn(2, 16, 4, 4, 6, generator=torch.Generator().manual_seed(0))


class Clock:
    """Seconds set by the test alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(EmbeddedEvents):
    """Events with a page open."""

    def has_viewers(self) -> bool:
        return True


@pytest.fixture
def settings(sample_models: Path) -> PreviewSettings:
    return PreviewSettings(vae=sample_models / "vae_approx" / "lighttaew2_1.safetensors", frames=9)


def previews(settings: PreviewSettings, clock: Callable[[], float]) -> MovingPreviews:
    return MovingPreviews(settings, DENOISED, CPU, Watched(), clock=clock)


@pytest.mark.parametrize(
    ("waited_s", "cost_s", "every_s", "due"),
    [
        (0.0, 0.0, 0.0, True),
        (4.9, 0.0, 5.0, False),
        (5.0, 0.0, 5.0, True),
        (5.0, 0.2, 5.0, True),
        (5.0, 0.3, 5.0, False),
        (5.8, 0.3, 5.0, True),
        (18.0, 1.0, 0.0, False),
        (19.0, 1.0, 0.0, True),
    ],
)
def test_a_preview_is_due_after_a_pause_that_grows_with_its_cost(
    waited_s: float, cost_s: float, every_s: float, due: bool
) -> None:
    assert is_due(waited_s, cost_s, every_s) is due


@pytest.mark.parametrize(
    ("steps", "step_s", "latent_s"),
    [(3000, 0.01, 0.05), (60, 2.0, 0.03), (500, 0.5, 0.3), (20, 30.0, 0.01)],
)
def test_previews_after_the_first_take_at_most_a_twentieth_of_a_run(
    settings: PreviewSettings,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    step_s: float,
    latent_s: float,
) -> None:
    clock, load_s, decoded = Clock(), 0.2, list[int]()

    def stream(self: WanVae, latents: torch.Tensor, **_: Any) -> Iterator[torch.Tensor]:
        decoded.append(latents.shape[2])
        clock.now += 0.0 if len(decoded) > 1 else load_s
        for at in range(latents.shape[2]):
            clock.now += latent_s
            yield torch.zeros(4 if at else 1, 8, 8, 3, dtype=torch.uint8)

    monkeypatch.setattr(WanVae, "stream", stream)
    latents = torch.zeros(1, 16, 12, 4, 6)
    every = PreviewSettings(vae=settings.vae, every_s=0.0)
    shown = MovingPreviews(every, latents, CPU, Watched(), clock=clock)
    with shown:
        for _ in range(steps):
            clock.now += step_s
            shown.update(latents)
            if shown.count:
                assert (
                    shown.spent_s <= MAX_SHARE * (clock.now - 100.0) + load_s + 2 * latent_s + 1e-9
                )
    assert decoded == [2] + [9] * (len(decoded) - 1), "the first shows 5 of 33 frames"
    assert len(decoded) > 2


def test_a_still_picture_is_decoded_from_one_latent_frame(settings: PreviewSettings) -> None:
    clock = Clock()
    with previews(PreviewSettings(vae=settings.vae, frames=1), clock) as shown:
        for _ in range(2):
            clock.now += 5
            webp = shown.update(DENOISED)
            assert webp is not None
            assert len(pictures_of(webp)) == 1


def pictures_of(webp: bytes) -> list[Image.Image]:
    with Image.open(bytes_io.BytesIO(webp)) as picture:
        assert picture.format == "WEBP"
        return [
            picture.copy().convert("RGB")
            for at in range(picture.n_frames)
            if picture.seek(at) is None
        ]


def test_a_preview_shows_the_first_frames_of_the_first_video(settings: PreviewSettings) -> None:
    clock = Clock()
    with previews(settings, clock) as shown:
        clock.now += 5
        first = shown.update(DENOISED)
        assert first is not None
        assert len(pictures_of(first)) == 5, "of two latent frames"
        clock.now += 5
        webp = shown.update(DENOISED)
        assert webp is not None
        assert shown.update(DENOISED) is None, "the pause begins again"
    with Image.open(bytes_io.BytesIO(webp)) as picture:
        assert (picture.n_frames, picture.size, picture.info["loop"]) == (9, (48, 32), 0)
        picture.load()
        assert picture.info["duration"] == 62  # milliseconds, for 16 frames per second
    with open_tiny_vae(settings.vae) as vae:
        frames = torch.cat([*vae.stream(denormalise(DENOISED[:1]), device="cpu")])
    shown_frames = [
        torch.frombuffer(bytearray(got.tobytes()), dtype=torch.uint8) for got in pictures_of(webp)
    ]
    for at, got in enumerate(shown_frames):
        distances = [(got.view(frame.shape).float() - frame).abs().mean() for frame in frames]
        assert distances.index(min(distances)) == at, (
            "nearest to its own frame, whatever WebP loses"
        )


def test_a_long_side_is_reduced(settings: PreviewSettings) -> None:
    clock = Clock()
    with previews(settings, clock) as shown:
        clock.now += 5
        webp = shown.update(torch.zeros(1, 16, 1, 2, 100))
        assert webp is not None
    assert pictures_of(webp)[0].size == (PREVIEW_PIXELS, round(16 * PREVIEW_PIXELS / 800))


def test_a_preview_of_too_many_bytes_has_fewer_frames(
    settings: PreviewSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def update(limit: int) -> bytes:
        monkeypatch.setattr(previews_module, "MAX_BYTES", limit)
        clock.now += 5
        webp = shown.update(DENOISED)
        assert webp is not None
        return webp

    with previews(PreviewSettings(vae=settings.vae, frames=13), clock) as shown:
        update(1_000_000)
        whole = update(1_000_000)
        smaller = update(len(whole) - 1)
        least = update(1)
        later = update(1_000_000)
    assert [len(pictures_of(webp)) for webp in (whole, smaller, least)] == [13, 9, 1]
    assert len(smaller) < len(whole)
    assert len(pictures_of(later)) == 1, "the number of frames is not raised again"


def test_one_picture_of_noise_fits() -> None:
    noise = torch.randint(256, (PREVIEW_PIXELS, PREVIEW_PIXELS, 3), dtype=torch.uint8)
    assert (
        len(previews_module._animation([Image.fromarray(noise.numpy())], 16))
        < previews_module.MAX_BYTES
    )


def test_nothing_is_decoded_while_nobody_is_connected(
    settings: PreviewSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, connected = Clock(), [False, True]
    events = Watched()
    monkeypatch.setattr(events, "has_viewers", lambda: connected.pop(0))
    shown = MovingPreviews(settings, DENOISED, CPU, events, clock=clock)
    with shown:
        clock.now += 5
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
    ids=lambda value: type(value).__name__,
)
def test_a_run_goes_on_without_previews_that_fail(
    settings: PreviewSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    is_known: bool,
) -> None:
    def fail(*_: Any) -> bytes:
        calls.append(1)
        raise error

    calls: list[int] = []
    monkeypatch.setattr(MovingPreviews, "_image", fail)
    clock = Clock()
    with caplog.at_level(logging.WARNING, "wanstream.nodes"), previews(settings, clock) as shown:
        for _ in range(3):
            clock.now += 100
            assert shown.update(DENOISED) is None
    assert len(calls) == 1
    (record,) = caplog.records
    name = type(error).__name__
    assert record.getMessage() == f"no more previews in this run, which goes on: {name}: {error}"
    assert (record.exc_info is None) == is_known, "a possible mistake in the code has its traceback"


class HostInterrupt(Exception):
    """Stand-in for ComfyUI's own class."""


@pytest.mark.parametrize("interrupt", [Cancelled, HostInterrupt])
def test_a_cancel_ends_a_preview(settings: PreviewSettings, interrupt: type[Exception]) -> None:
    clock, checks = Clock(), iter([None, interrupt("stopped")])

    class Interrupting(Watched):
        def raise_if_stopped(self) -> None:
            if (error := next(checks)) is not None:
                raise error

        def is_stop(self, error: BaseException) -> bool:
            return isinstance(error, interrupt)

    shown = MovingPreviews(settings, DENOISED, CPU, Interrupting(), clock=clock)
    with shown:
        clock.now += 5
        with pytest.raises(interrupt):
            shown.update(DENOISED)
    assert next(checks, "used") == "used", "before the second latent frame"


def test_a_pillow_without_webp_is_refused_before_the_run(
    settings: PreviewSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.features.check", lambda feature: feature != "webp")
    with pytest.raises(RuntimeError, match="built without WebP: install another one"):
        previews(settings, Clock())


@pytest.mark.parametrize(
    ("frames", "nearest"), [(0, 1), (2, 1), (4, 5), (6, 5), (-3, 1), (1024, 1025)]
)
def test_a_number_of_frames_that_no_latent_has_is_refused_before_the_run(
    frames: int, nearest: int
) -> None:
    refused = f"frames is {frames}, it must be a multiple of 4 plus 1: use {nearest}$"
    with pytest.raises(ValueError, match=refused):
        WanStreamPreview.validate_inputs(frames=frames)
    with pytest.raises(ValueError, match=refused):
        PreviewSettings(vae=Path("tiny.safetensors"), frames=frames)


def test_frames_of_a_latent_and_linked_frames_are_accepted() -> None:
    assert all(WanStreamPreview.validate_inputs(frames=frames) for frames in (1, 5, 33, 1025, None))


def test_a_tiny_vae_of_the_other_space_is_refused_before_the_run(sample_models: Path) -> None:
    other = PreviewSettings(vae=sample_models / "vae_approx" / "taew2_2.safetensors")
    with pytest.raises(
        VaeInputError, match=r"\[2, 16, 4, 4, 6\], .* 48 channels: take lighttaew2_1"
    ):
        previews(other, Clock())


@pytest.mark.parametrize(
    ("size", "height", "width"), [("480p it takes about 0.4", 60, 104), ("720p 1.0", 90, 160)]
)
def test_the_help_page_has_the_memory_of_a_preview(size: str, height: int, width: int) -> None:
    file = ComponentFile(path=Path("taew2_1.safetensors"), weights={})
    opened = TinyVaeWeights(
        path=file.path, space=WAN21, widths=(256, 128, 64, 64), file=file, scale="normalised"
    )
    used = height * width * opened.decode_pixel_bytes(9, torch.bfloat16)
    page = (WORKFLOWS.parents[1] / "web" / "docs" / "WanStreamPreview.md").read_text(
        encoding="utf-8"
    )
    assert f"{size} GB" in page.replace(" of that device", "")
    assert float(size.split()[-1]) == round(used / 1e9, 1)
    assert 2 * used == height * width * opened.decode_pixel_bytes(9, torch.float32), (
        "twice that in fp32"
    )


def changed(node: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    return {**node, "inputs": {**node["inputs"], **inputs}}


class TestInARun:
    @pytest.fixture
    def run(
        self, sample_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., Any]]:
        """`run(preview, viewers)` returns latents and events. A preview is due at every step."""
        monkeypatch.setattr(previews_module, "is_due", lambda *_: True)

        def run(
            preview: dict[str, Any] | None, *, viewers: bool = True, seeds: tuple[int, ...] = ()
        ) -> tuple[torch.Tensor, list[tuple[str, Any]]]:
            monkeypatch.setattr(embedded_host.events, "has_viewers", lambda: viewers)
            nodes = json.loads((WORKFLOWS / "draft.json").read_text(encoding="utf-8"))
            nodes["latent"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
            nodes["sampler"]["inputs"] |= {"steps": 4}
            nodes["save"]["inputs"] |= {"filename_prefix": "draft"}
            if preview is None:
                del nodes["preview"], nodes["sampler"]["inputs"]["preview"]
            else:
                nodes["preview"]["inputs"] |= preview
            if seeds:
                nodes, _ = merge_lanes(
                    [
                        {
                            **nodes,
                            "sampler": changed(nodes["sampler"], seed=seed),
                            "save": changed(nodes["save"], filename_prefix=f"v{seed}"),
                        }
                        for seed in seeds
                    ]
                )
            events: list[tuple[str, Any]] = []
            history: History = run_workflow(
                nodes,
                nodes=NODES,
                models=sample_models,
                output=tmp_path / "output",
                input_dir=tmp_path,
                device=CPU,
                on_event=lambda event, payload: events.append(
                    (event, json.loads(json.dumps(payload)))
                ),
                only=["sampler"],
            )
            found = history.results["sampler"][0]
            return (found[0] if seeds else found)["samples"], events

        yield run
        embedded_host.free_experts()

    @pytest.mark.slow  # runs whole workflows
    def test_the_result_is_bit_equal_and_each_step_is_shown(self, run: Callable[..., Any]) -> None:
        latents, plain = run(None)
        watched, events = run({"frames": 5})
        unwatched, unseen = run({"frames": 5}, viewers=False)
        assert torch.equal(watched, latents)
        assert torch.equal(unwatched, latents)
        assert not [event for event, _ in (*plain, *unseen) if event == PREVIEW]
        assert [event for event, _ in events if event in (STEP, PREVIEW)] == [STEP, PREVIEW] * 4
        shown = [payload for event, payload in events if event == PREVIEW]
        assert [payload["done"] for payload in shown] == [1, 2, 3, 4]
        [number] = {payload["run"] for event, payload in events if event == STEP}
        assert {(payload["node"], payload["run"]) for payload in shown} == {("sampler", number)}
        for payload in shown:
            kind, _, data = payload["image"].partition(",")
            assert kind == "data:image/webp;base64"
            assert len(pictures_of(base64.b64decode(data))) == 5

    @pytest.mark.slow  # runs whole workflows
    def test_a_batch_shows_its_first_video(self, run: Callable[..., Any]) -> None:
        """The shipped workflow has seed 42."""
        alone, one = run({"frames": 5})
        first, both = run({"frames": 5}, seeds=(42, 43))
        assert torch.equal(first, alone)
        shown = [
            [payload["image"] for event, payload in events if event == PREVIEW]
            for events in (one, both)
        ]
        assert shown[0] == shown[1]
        assert len(shown[1]) == 4

    def test_a_step_of_another_part_of_a_batch_shows_nothing(
        self, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Workers in parts report every video's steps: here each step comes twice."""

        def in_two_parts(
            *args: Any, on_step: Callable[[StepProgress], None], **more: Any
        ) -> DenoiseResult:
            def report(step: StepProgress) -> None:
                on_step(replace(step, part=1, done=2 * step.done - 1, total=2 * step.total))
                on_step(replace(step, done=2 * step.done, total=2 * step.total))

            return denoise(*args, on_step=report, **more)

        monkeypatch.setattr(run_experts_module, "denoise", in_two_parts)
        _, events = run({"frames": 5})
        assert [event for event, _ in events if event in (STEP, PREVIEW)] == [
            STEP,
            STEP,
            PREVIEW,
        ] * 4
        assert [payload["done"] for event, payload in events if event == PREVIEW] == [1, 2, 3, 4], (
            "of its own steps"
        )

    @pytest.mark.parametrize(
        ("vae", "error", "reason"),
        [
            ("taew2_2.safetensors", NodeFailedError, r"48 channels: take lighttaew2_1"),
            ("wan_2.1_vae.safetensors", InvalidWorkflowError, r"is not a tiny VAE of Wan"),
        ],
    )
    def test_a_file_of_another_kind_is_refused(
        self, run: Callable[..., Any], vae: str, error: type[Exception], reason: str
    ) -> None:
        with pytest.raises(error, match=reason):
            run({"vae": vae})
