"""Videos from clips without ComfyUI: continued, saved, loaded, joined; refused combinations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host.folders import OutsideFolderError
from wanstream.nodes.clips.continue_video import ContinuationError, WanStreamContinueVideo
from wanstream.nodes.clips.join import WanStreamJoinClips
from wanstream.nodes.clips.latent_files import (
    NoSavedLatentError,
    WanStreamLoadLatent,
    WanStreamSaveLatent,
    latent_stamp,
)
from wanstream.nodes.decode import WanStreamVAEDecode
from wanstream.nodes.latents import WanStreamEmptyLatent, WanStreamImageToVideo
from wanstream.nodes.loaders import WanStreamExperts
from wanstream.nodes.runs.clip_join import JoinError, join_clips
from wanstream.nodes.runs.file_checks import NONE
from wanstream.nodes.sampler import WanStreamSampler
from wanstream.sampling.inputs import native_latent
from wanstream.sampling.steps import InsufficientMemoryError, RequestError, errors
from wanstream.sampling.steps.errors import ConditioningError
from wanstream.schema.refs import WorkersRef
from wanstream.schema.refs.workers import IN_PROCESS
from wanstream.testing.model import VAE_FILE
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.wan.latents.file import LatentFileError, read_latent

SIZE = {"width": 64, "height": 32, "frames": 9}
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "solver": "euler",
    "schedule": "simple",
    "flow_shift": 5.0,
    "boundary_ratio": 0.9,
    "switch_step": -1,
    "guidance_high": 1.0,
    "guidance_low": 1.0,
    "start_step": 0,
}
EXPERTS = [f"wan2.2_i2v_{expert}_noise_14B_fp16.safetensors" for expert in ("high", "low")]


def sampled(given: tuple[Any, ...], seed: int, **changes: Any) -> dict[str, Any]:
    (ref,) = WanStreamExperts.execute(*EXPERTS, "fp32").args
    latent, _ = WanStreamSampler.execute(ref, *given, **{**SETTINGS, "seed": seed, **changes}).args
    return dict(latent)


def continued(text: Any, **inputs: Any) -> tuple[Any, ...]:
    given = {"positive": text, "negative": text, "frames": 9, "overlap": 1, **inputs}
    return tuple(WanStreamContinueVideo.execute(**given).args)


@pytest.fixture
def start(opened_test_model: None, text: list[list[Any]]) -> tuple[Any, ...]:
    """Both prompts with a start image, and an empty latent."""
    image = torch.rand(1, 40, 56, 3, generator=torch.Generator().manual_seed(1))
    return tuple(WanStreamImageToVideo.execute(text, text, VAE_FILE.name, image, 1, **SIZE).args)


def test_three_clips_follow_from_one_another_and_from_files(start: tuple[Any, ...]) -> None:
    first = sampled(start, 1)
    second = sampled(continued(start[0], previous=first), 2)
    third = sampled(continued(start[0], previous=second), 3)
    assert all(clip["samples"].shape == (1, 16, 3, 4, 8) for clip in (first, second, third))
    assert third["samples"].isfinite().all()
    saved = [
        WanStreamSaveLatent.execute(clip, "latents/clip").ui["latents"][0]
        for clip in (first, second)
    ]
    names = [f"{file['subfolder']}/{file['filename']}" for file in saved]
    assert torch.equal(
        sampled(continued(start[0], previous_file=names[0]), 2)["samples"], second["samples"]
    )
    branch = sampled(continued(start[0], previous_file=names[0]), 4)
    assert not torch.equal(branch["samples"], second["samples"])
    assert torch.equal(
        sampled(continued(start[0], previous_file=names[1]), 3)["samples"], third["samples"]
    )
    other = sampled(continued(start[0], previous=first), 3)
    assert (other["samples"] - third["samples"]).norm() / third["samples"].norm() > 1e-4, (
        "it depends on the clip before"
    )
    workers = WorkersRef(count=1, address=IN_PROCESS)
    shared = sampled(continued(start[0], previous=second), 3, workers=workers)
    assert torch.equal(shared["samples"], third["samples"])


def test_the_anchor_is_the_one_given_then_the_start_image_then_the_first_frame(
    start: tuple[Any, ...], text: list[list[Any]]
) -> None:
    previous = {"samples": torch.randn(1, 16, 3, 4, 8)}
    anchor = {"samples": torch.randn(1, 16, 1, 4, 8)}
    firsts = [
        continued(start[0], previous=previous, anchor=anchor)[0][0][1]["concat_latent_image"][
            :, :, :1
        ],
        continued(start[0], previous=previous)[0][0][1]["concat_latent_image"][:, :, :1],
        continued(text, previous=previous)[0][0][1]["concat_latent_image"][:, :, :1],
    ]
    image = start[0][0][1]["concat_latent_image"]
    for found, expected in zip(
        firsts, (anchor["samples"], image, previous["samples"]), strict=True
    ):
        assert torch.equal(found, expected[:, :, :1])


def test_the_prompts_that_are_connected_stay_as_they_are(start: tuple[Any, ...]) -> None:
    before = start[0][0][1]["concat_latent_image"].clone()
    positive, negative, latent = continued(
        start[0], previous={"samples": torch.randn(1, 16, 3, 4, 8)}
    )
    assert torch.equal(start[0][0][1]["concat_latent_image"], before)
    assert torch.equal(positive[0][1]["concat_latent_image"], negative[0][1]["concat_latent_image"])
    assert not latent["samples"].any()


def test_a_first_clip_needs_an_image(start: tuple[Any, ...], text: list[list[Any]]) -> None:
    positive, _, latent = continued(start[0])
    assert latent["samples"].shape == (1, 16, 3, 4, 8)
    assert torch.equal(
        positive[0][1]["concat_latent_image"][:, :, 0],
        start[0][0][1]["concat_latent_image"][:, :, 0],
    )
    with pytest.raises(ConditioningError, match="nothing to continue and no start image"):
        continued(text)


def test_a_latent_of_another_size_or_model_is_refused(
    start: tuple[Any, ...], text: list[list[Any]]
) -> None:
    (wide,) = WanStreamEmptyLatent.execute(width=96, height=32, frames=9, batch_size=1).args
    with pytest.raises(
        ConditioningError,
        match="previous clip has 96 x 32 pixels, the anchor or start image 64 x 32",
    ):
        continued(start[0], previous=wide)
    (other,) = WanStreamEmptyLatent.execute(**SIZE, batch_size=1, model="Wan2.2 5B").args
    with pytest.raises(
        ConditioningError,
        match=r"\[1, 48, 3, 2, 4\], a clip is continued with I2V experts of Wan2.1",
    ):
        continued(text, previous=other)


def test_too_few_frames_are_refused(start: tuple[Any, ...]) -> None:
    previous = {"samples": torch.randn(1, 16, 2, 4, 8)}
    with pytest.raises(
        ConditioningError, match="the overlap is 3 latent frames, and the previous clip has 2"
    ):
        continued(start[0], previous=previous, overlap=3, frames=81)
    with pytest.raises(
        ContinuationError, match="an overlap of 2 latent frames need 9 frames, and the clip has 5"
    ):
        WanStreamContinueVideo.validate_inputs(frames=5, overlap=2)
    with pytest.raises(
        ContinuationError, match="frames is 8, it must be a multiple of 4 plus 1: use 9"
    ):
        WanStreamContinueVideo.validate_inputs(frames=8, overlap=1)
    assert WanStreamContinueVideo.validate_inputs(frames=None, overlap=2)


def test_linked_numbers_are_checked_when_the_node_runs(text: list[list[Any]]) -> None:
    previous = {"samples": torch.randn(1, 16, 3, 4, 8)}
    for numbers, reason in (
        ({"frames": 8}, "frames is 8, it must be a multiple of 4 plus 1: use 9"),
        ({"frames": -3}, "frames is -3, it must be a multiple of 4 plus 1: use 1"),
        ({"overlap": -1}, "overlap is -1: use 1, or 0"),
        ({"frames": 5, "overlap": 2}, "need 9 frames, and the clip has 5"),
    ):
        with pytest.raises(ContinuationError, match=reason):
            continued(text, previous=previous, **numbers)
        with pytest.raises(ContinuationError, match=reason):
            WanStreamContinueVideo.validate_inputs(**{"frames": 9, "overlap": 1, **numbers})


@pytest.mark.usefixtures("opened_test_model")
@pytest.mark.parametrize(
    ("starts", "ends", "reason"),
    [(1, 1, r"\(1 known .* first one is 2\)"), (5, 0, r"\(1 known .* first one is 1\)")],
)
def test_images_that_a_clip_would_drop_are_refused(
    text: list[list[Any]], starts: int, ends: int, reason: str
) -> None:
    end = torch.rand(ends, 32, 64, 3) if ends else None
    images = torch.rand(starts, 32, 64, 3)
    made = WanStreamImageToVideo.execute(
        text, text, VAE_FILE.name, images, 1, **SIZE, end_image=end
    ).args
    with pytest.raises(
        ContinuationError, match=f"positive has an end image or several start images {reason}"
    ):
        continued(made[0], previous={"samples": torch.randn(1, 16, 3, 4, 8)})
    with pytest.raises(ContinuationError, match="negative has an end image"):
        continued(text, negative=made[1], previous={"samples": torch.randn(1, 16, 3, 4, 8)})


def test_a_noisy_anchor_is_refused(text: list[list[Any]]) -> None:
    noisy = native_latent(torch.randn(1, 16, 3, 4, 8), {}, sigma=0.5)
    with pytest.raises(ContinuationError, match=r"the anchor still has noise \(level 0.500\)"):
        continued(text, previous={"samples": torch.randn(1, 16, 3, 4, 8)}, anchor=noisy)


def test_noise_that_is_left_is_refused_from_a_file_too(start: tuple[Any, ...]) -> None:
    noisy = native_latent(torch.randn(1, 16, 3, 4, 8), {}, sigma=0.5)
    with pytest.raises(ContinuationError, match=r"still has noise \(level 0.500\)"):
        continued(start[0], previous=noisy)
    (saved,) = WanStreamSaveLatent.execute(noisy, "latents/noisy").ui["latents"]
    with pytest.raises(ContinuationError, match=r"still has noise \(level 0.500\)"):
        continued(start[0], previous_file=f"latents/{saved['filename']}")


def test_two_clips_before_are_one_too_many(start: tuple[Any, ...]) -> None:
    with pytest.raises(ContinuationError, match=r"both a latent and the file x\.latent are given"):
        continued(
            start[0], previous={"samples": torch.zeros(1, 16, 3, 4, 8)}, previous_file="x.latent"
        )


@pytest.mark.usefixtures("opened_test_model")
def test_a_saved_latent_has_its_graph_and_is_listed(tmp_path: Path) -> None:
    latent = {"samples": torch.randn(1, 16, 3, 4, 8)}
    WanStreamSaveLatent.execute(latent, "latents/clip")
    made = WanStreamSaveLatent.execute(latent, "latents/clip")
    assert made.args[0] is latent
    assert made.ui["latents"] == [
        {"filename": "clip_00002_.latent", "subfolder": "latents", "type": "output"}
    ]
    assert made.ui["text"] == ["Wan2.1 and Wan2.2 A14B: 64 x 32, 9 frames"]
    (choices,) = (socket.options for socket in WanStreamLoadLatent.define_schema().inputs)
    assert choices == [NONE, "latents/clip_00001_.latent", "latents/clip_00002_.latent"]
    (loaded,) = WanStreamLoadLatent.execute("latents/clip_00002_.latent").args
    assert torch.equal(loaded["samples"], latent["samples"])
    (tmp_path / "mine.latent").write_bytes(
        (tmp_path / "latents" / "clip_00001_.latent").read_bytes()
    )
    assert WanStreamLoadLatent.validate_inputs("mine.latent [input]")
    (again,) = WanStreamLoadLatent.execute("mine.latent [input]").args
    assert torch.equal(again["samples"], latent["samples"])


@pytest.mark.usefixtures("opened_test_model")
def test_a_changed_file_is_another_input(tmp_path: Path) -> None:
    WanStreamSaveLatent.execute({"samples": torch.randn(1, 16, 3, 4, 8)}, "latents/clip")
    name = "latents/clip_00001_.latent"
    before = WanStreamContinueVideo.fingerprint_inputs(previous_file=name)
    assert (
        before
        == WanStreamLoadLatent.fingerprint_inputs(name)
        == latent_stamp(embedded_host.files, name)
    )
    (tmp_path / name).write_bytes(b"x")
    assert WanStreamContinueVideo.fingerprint_inputs(previous_file=name) != before
    assert WanStreamContinueVideo.fingerprint_inputs(previous_file="../gone") == ("../gone", 0, 0)
    assert WanStreamContinueVideo.fingerprint_inputs() == (NONE, 0, 0)
    assert WanStreamLoadLatent.fingerprint_inputs(None) == (None, 0, 0), (
        "it comes from another node"
    )


@pytest.mark.usefixtures("opened_test_model")
def test_a_file_that_is_no_latent_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "video.mp4").write_bytes(b"not a latent")
    for node in (WanStreamLoadLatent, WanStreamContinueVideo):
        name = "file" if node is WanStreamLoadLatent else "previous_file"
        with pytest.raises(LatentFileError, match="is not a latent file"):
            node.validate_inputs(**{name: "video.mp4"})
        with pytest.raises(LatentFileError, match="does not exist"):
            node.validate_inputs(**{name: "latents/gone.latent"})
        with pytest.raises(OutsideFolderError, match="leaves the folder"):
            node.validate_inputs(**{name: "../x.latent"})
        assert node.validate_inputs(**{name: NONE})
    with pytest.raises(NoSavedLatentError, match="no file is chosen"):
        WanStreamLoadLatent.execute(NONE)


@pytest.mark.usefixtures("opened_test_model")
def test_only_a_latent_of_wan_is_saved() -> None:
    with pytest.raises(ValueError, match="12"):
        WanStreamSaveLatent.execute({"samples": torch.zeros(1, 12, 3, 4, 8)}, "latents/x")
    with pytest.raises(OutsideFolderError):
        WanStreamSaveLatent.validate_inputs("../x")


def test_the_graph_of_a_saved_latent_is_in_its_file(sample_models: Path, tmp_path: Path) -> None:
    prompt = {
        "latent": {"class_type": "WanStreamEmptyLatent", "inputs": {**SIZE, "batch_size": 1}},
        "keep": {
            "class_type": "WanStreamSaveLatent",
            "inputs": {"latent": ["latent", 0], "filename_prefix": "latents/x"},
        },
    }
    nodes = [WanStreamEmptyLatent, WanStreamSaveLatent]
    history = run_workflow(
        prompt, nodes=nodes, models=sample_models, output=tmp_path, input_dir=tmp_path
    )
    (file,) = history.outputs["keep"]["latents"]
    stored = read_latent(tmp_path / file["subfolder"] / file["filename"])
    assert json.loads(stored.metadata["prompt"])["latent"]["class_type"] == "WanStreamEmptyLatent"


@pytest.mark.slow  # runs whole workflows
def test_a_saved_latent_is_decoded_later(start: tuple[Any, ...]) -> None:
    clip = sampled(start, 1)
    (saved,) = WanStreamSaveLatent.execute(clip, "latents/clip").ui["latents"]
    (loaded,) = WanStreamLoadLatent.execute(f"latents/{saved['filename']}").args
    images = [
        WanStreamVAEDecode.execute(VAE_FILE.name, latent).args[0] for latent in (clip, loaded)
    ]
    assert images[0].shape == (9, 32, 64, 3)
    assert torch.equal(*images)


def frames(*values: float) -> torch.Tensor:
    return (
        torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 2, 3, 3).contiguous()
    )


def values_of(video: torch.Tensor) -> list[float]:
    return [round(float(frame.mean()), 4) for frame in video]


def test_shared_frames_are_blended_and_the_others_copied() -> None:
    clips = [frames(0, 0, 0, 0), frames(1, 1, 1, 1, 1)]
    assert values_of(join_clips(clips, 3)) == [0, 0.25, 0.5, 0.75, 1, 1]
    assert values_of(join_clips(clips, 1)) == [0, 0, 0, 0.5, 1, 1, 1, 1]
    assert values_of(join_clips(clips, 0)) == [0] * 4 + [1] * 5
    assert values_of(clips[0]) == [0] * 4, "the clips stay as they are"


def test_clips_are_joined_in_the_order_of_their_inputs() -> None:
    clips = {f"clip_{number}": frames(*[number] * 13) for number in (1, 2, 5, 4)}
    (video,) = WanStreamJoinClips.execute(**clips, overlap=2).args
    assert len(video) == 4 * 13 - 3 * 9
    # An inner clip shares the first nine and the last nine of 13 frames, so the middle ones twice.
    assert values_of(video)[:5] == [1, 1, 1, 1, 1.1]
    assert values_of(video)[-5:] == [4.9, 5, 5, 5, 5]
    (plain,) = WanStreamJoinClips.execute(**clips, overlap=2, shared_frames=0).args
    assert values_of(plain) == [1] * 13 + [2] * 13 + [4] * 13 + [5] * 13


@pytest.mark.parametrize("overlap", [1, 2])
def test_clips_of_one_scene_join_without_a_stutter(overlap: int) -> None:
    """Frame values are times.

    Latent frame 0 holds frame 0, latent frame k holds frames 4k-3 to 4k.
    """
    latent_frames, length = 6, 4 * 5 + 1
    times = (
        torch.arange(latent_frames, dtype=torch.float32)
        .view(1, 1, -1, 1, 1)
        .expand(1, 16, -1, 4, 8)
    )
    condition = continued([[None, {}]], previous={"samples": times}, overlap=overlap, frames=length)
    repeated = condition[0][0][1]["concat_latent_image"][0, 0, 1 : 1 + overlap, 0, 0].tolist()
    # Frame 1 of the new clip shows the same as the first frame repeated from the clip before.
    begin = 4 * int(repeated[0]) - 3 - 1
    second = frames(*range(begin, begin + length))
    (video,) = WanStreamJoinClips.execute(
        clip_1=frames(*range(length)), clip_2=second, overlap=overlap
    ).args
    assert values_of(video) == [float(time) for time in range(begin + length)]


@pytest.mark.parametrize(
    ("clips", "overlap", "reason"),
    [
        (
            [frames(0, 0), torch.zeros(2, 4, 3, 3)],
            1,
            r"clip 2 is \[2, 4, 3, 3\] .*, clip 1 \[2, 2, 3, 3\]",
        ),
        ([frames(0, 0), frames(0, 0).half()], 1, "torch.float16"),
        (
            [frames(0, 0, 0), frames(0, 0)],
            2,
            "clip 2 has 2 frames, and the clips share 2: lower the overlap to 1",
        ),
        ([frames(0, 0, 0), torch.zeros(0, 2, 3, 3)], 1, "clip 2 is .*: give images"),
    ],
)
def test_clips_that_do_not_fit_are_refused_with_numbers(
    clips: list[torch.Tensor], overlap: int, reason: str
) -> None:
    with pytest.raises(JoinError, match=reason):
        join_clips(clips, overlap)


def test_a_video_that_does_not_fit_into_ram_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        errors, "insufficient_ram", lambda nbytes: asked.append(nbytes) or 5_000_000
    )
    with pytest.raises(InsufficientMemoryError, match="the joined video takes"):
        join_clips([frames(0, 0), frames(1, 1)], 1)
    assert asked == [3 * 2 * 3 * 3 * 4]


def test_text_to_video_experts_refuse_the_condition(
    opened_test_model: None, text: list[list[Any]]
) -> None:
    names = [f"wan2.2_t2v_{expert}_noise_14B_fp16.safetensors" for expert in ("high", "low")]
    (ref,) = WanStreamExperts.execute(*names, "fp32").args
    given = continued(text, previous={"samples": torch.randn(1, 16, 3, 4, 8)})
    with pytest.raises(RequestError, match="these are text-to-video experts"):
        WanStreamSampler.execute(ref, *given, **SETTINGS, seed=1)
