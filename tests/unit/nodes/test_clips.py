"""Videos from clips without ComfyUI: continued, saved, loaded, joined; refused combinations."""

import json

import pytest
import torch

from wanstream.host.folders import OutsideFolderError
from wanstream.nodes.clips import latent_files
from wanstream.nodes.clips.continue_video import ContinuationError, WanStreamContinueVideo
from wanstream.nodes.clips.join import WanStreamJoinClips
from wanstream.nodes.latents import WanStreamImageToVideo
from wanstream.nodes.loaders import WanStreamExperts
from wanstream.nodes.runs.clip_join import JoinError, join_clips
from wanstream.nodes.runs.file_checks import NONE
from wanstream.sampling.inputs import native_latent
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.sampling.steps.errors import ConditioningError
from wanstream.schema.refs import IN_PROCESS, WorkersRef
from wanstream.tests.support.host.given_nodes import VAE, sampled
from wanstream.tests.support.host.shipped import node
from wanstream.wan.latents.file import LatentFileError, read_latent

SIZE = {"width": 64, "height": 32, "frames": 9}
NOISE = {"samples": torch.randn(1, 16, 3, 4, 8, generator=torch.Generator().manual_seed(0))}
NOISY = native_latent(NOISE["samples"], {}, sigma=0.5)


def made(given, seed, **changes):
    """Return the latent of two euler steps on both prompts and a latent."""
    names = (f"wan2.2_i2v_{expert}_noise_14B_fp16.safetensors" for expert in ("high", "low"))
    (ref,) = WanStreamExperts.execute(*names, "fp32").args
    settings = {"steps": 2, "solver": "euler", "schedule": "simple", "boundary_ratio": 0.9}
    guidance = {"guidance_high": 1.0, "guidance_low": 1.0}
    return {"samples": sampled(ref, given, seed=seed, **settings, **guidance, **changes)}


def continued(text, **inputs):
    given = {"positive": text, "negative": text, "frames": 9, "overlap": 1, **inputs}
    return tuple(WanStreamContinueVideo.execute(**given).args)


def saved(latent):
    (file,) = latent_files.WanStreamSaveLatent.execute(latent, "latents/clip").ui["latents"]
    return f"{file['subfolder']}/{file['filename']}"


@pytest.fixture
def start(opened_test_model, text):
    """A prompt with a start image."""
    image = torch.rand(1, 40, 56, 3, generator=torch.Generator().manual_seed(1))
    return WanStreamImageToVideo.execute(text, text, VAE, image, 1, **SIZE).args[0]


class TestContinued:
    def test_clips_follow_from_latents_and_files(self, start):
        first = made((start, start, {"samples": torch.zeros(1, 16, 3, 4, 8)}), 1)
        second = made(continued(start, previous=first), 2)
        third = made(continued(start, previous=second), 3)
        assert all(clip["samples"].shape == (1, 16, 3, 4, 8) for clip in (first, second, third))
        workers = WorkersRef(count=1, address=IN_PROCESS)
        files = [saved(clip) for clip in (first, second)]
        same = made(continued(start, previous_file=files[0]), 2)
        assert torch.equal(same["samples"], second["samples"])
        for given, more in (
            ({"previous_file": files[1]}, {}),
            ({"previous": second}, {"workers": workers}),
        ):
            same = made(continued(start, **given), 3, **more)
            assert torch.equal(same["samples"], third["samples"])
        other = made(continued(start, previous=first), 3)["samples"]
        difference = (other - third["samples"]).norm() / third["samples"].norm()
        assert difference > 1e-4, "it depends on the clip before"

    def test_anchor_is_given_or_an_image_or_the_first_frame(self, start, text):
        anchor = {"samples": torch.randn(1, 16, 1, 4, 8)}
        image = start[0][1]["concat_latent_image"]
        before = image.clone()
        for found, expected in (
            (continued(start, previous=NOISE, anchor=anchor), anchor["samples"]),
            (continued(start, previous=NOISE), image),
            (continued(text, previous=NOISE), NOISE["samples"]),
            (continued(start), image),
        ):
            positive, negative, latent = found
            condition = positive[0][1]["concat_latent_image"]
            assert torch.equal(condition[:, :, :1], expected[:, :, :1])
            assert torch.equal(condition, negative[0][1]["concat_latent_image"])
            assert torch.equal(latent["samples"], torch.zeros(1, 16, 3, 4, 8))
        assert torch.equal(image, before), "connected prompts stay as they are"
        with pytest.raises(ConditioningError, match="nothing to continue and no start image"):
            continued(text)

    def test_unsuitable_clips_are_refused(self, start, text):
        noisy = r"still has noise \(level 0.500\)"
        file = saved(NOISY)
        both = r"a latent and the file x\.latent"
        for message, prompt, given in (
            (f"the anchor {noisy}", text, {"previous": NOISE, "anchor": NOISY}),
            (noisy, start, {"previous": NOISY}),
            (noisy, start, {"previous_file": file}),
            (both, start, {"previous": NOISE, "previous_file": "x.latent"}),
        ):
            with pytest.raises((ConditioningError, ContinuationError), match=message):
                continued(prompt, **given)

    def test_numbers_are_checked_before_and_in_the_run(self, text):
        for numbers, reason in (
            ({"frames": 8}, "frames is 8, it must be a multiple of 4 plus 1: use 9"),
            ({"overlap": -1}, "overlap is -1: use 1, or 0"),
            ({"frames": 5, "overlap": 2}, "2 latent frames need 9 frames, and the clip has 5"),
        ):
            with pytest.raises(ContinuationError, match=reason):
                continued(text, previous=NOISE, **numbers)
            with pytest.raises(ContinuationError, match=reason):
                WanStreamContinueVideo.validate_inputs(**{"frames": 9, "overlap": 1, **numbers})
        assert WanStreamContinueVideo.validate_inputs(frames=None, overlap=2)

    @pytest.mark.usefixtures("opened_test_model")
    @pytest.mark.parametrize(
        ("starts", "ends", "reason"),
        [(1, 1, r"\(1 known .* first one is 2\)"), (5, 0, r"\(1 known .* first one is 1\)")],
    )
    def test_images_that_a_clip_would_drop_are_refused(self, text, starts, ends, reason):
        end = torch.rand(ends, 32, 64, 3) if ends else None
        given = (text, text, VAE, torch.rand(starts, 32, 64, 3), 1)
        positive, negative, _ = WanStreamImageToVideo.execute(*given, **SIZE, end_image=end).args
        message = f"positive has an end image or several start images {reason}"
        with pytest.raises(ContinuationError, match=message):
            continued(positive, previous=NOISE)
        with pytest.raises(ContinuationError, match="negative has an end image"):
            continued(text, negative=negative, previous=NOISE)


@pytest.mark.usefixtures("opened_test_model")
class TestSaved:
    def test_saved_latent_is_listed_and_loaded(self, tmp_path):
        latent_files.WanStreamSaveLatent.execute(NOISE, "latents/clip")
        made = latent_files.WanStreamSaveLatent.execute(NOISE, "latents/clip")
        assert made.args[0] is NOISE
        place = {"filename": "clip_00002_.latent", "subfolder": "latents", "type": "output"}
        assert made.ui["latents"] == [place]
        assert made.ui["text"] == ["Wan2.1 and Wan2.2 A14B: 64 x 32, 9 frames"]
        (choices,) = (
            socket.options for socket in latent_files.WanStreamLoadLatent.define_schema().inputs
        )
        files = [f"latents/clip_0000{number}_.latent" for number in (1, 2)]
        assert choices == [NONE, *files]
        (tmp_path / "mine.latent").write_bytes((tmp_path / files[0]).read_bytes())
        assert latent_files.WanStreamLoadLatent.validate_inputs("mine.latent [input]")
        for name in (files[1], "mine.latent [input]"):
            (loaded,) = latent_files.WanStreamLoadLatent.execute(name).args
            assert torch.equal(loaded["samples"], NOISE["samples"])

    def test_input_without_a_file_has_a_fingerprint(self):
        fingerprint = WanStreamContinueVideo.fingerprint_inputs
        assert fingerprint(previous_file="../gone") == ("../gone", 0, 0)
        assert fingerprint() == (NONE, 0, 0)
        assert latent_files.WanStreamLoadLatent.fingerprint_inputs(None) == (None, 0, 0), "linked"

    def test_other_files_and_latents_are_refused(self, tmp_path):
        (tmp_path / "video.mp4").write_bytes(b"not a latent")
        for loader, socket in (
            (latent_files.WanStreamLoadLatent, "file"),
            (WanStreamContinueVideo, "previous_file"),
        ):
            for name, error, message in (
                ("video.mp4", LatentFileError, "is not a latent file"),
                ("latents/gone.latent", LatentFileError, "does not exist"),
                ("../x.latent", OutsideFolderError, "leaves the folder"),
            ):
                with pytest.raises(error, match=message):
                    loader.validate_inputs(**{socket: name})
            assert loader.validate_inputs(**{socket: NONE})
        with pytest.raises(latent_files.NoSavedLatentError, match="no file is chosen"):
            latent_files.WanStreamLoadLatent.execute(NONE)
        with pytest.raises(ValueError, match="12"):
            latent_files.WanStreamSaveLatent.execute(
                {"samples": torch.zeros(1, 12, 3, 4, 8)}, "latents/x"
            )
        with pytest.raises(OutsideFolderError):
            latent_files.WanStreamSaveLatent.validate_inputs("../x")


def test_graph_of_a_saved_latent_is_in_its_file(run, output):
    empty = node("WanStreamEmptyLatent", **SIZE, batch_size=1)
    keep = node("WanStreamSaveLatent", latent=["latent", 0], filename_prefix="latents/x")
    (file,) = run({"latent": empty, "keep": keep}).outputs["keep"]["latents"]
    stored = read_latent(output / file["subfolder"] / file["filename"])
    assert json.loads(stored.metadata["prompt"])["latent"]["class_type"] == "WanStreamEmptyLatent"


def frames(*values: float) -> torch.Tensor:
    given = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)
    return given.expand(-1, 2, 3, 3).contiguous()


def values_of(video: torch.Tensor) -> list[float]:
    return [round(float(frame.mean()), 4) for frame in video]


class TestJoined:
    def test_shared_frames_are_blended_and_the_others_copied(self):
        clips = [frames(0, 0, 0, 0), frames(1, 1, 1, 1, 1)]
        assert values_of(join_clips(clips, 3)) == [0, 0.25, 0.5, 0.75, 1, 1]
        assert values_of(join_clips(clips, 1)) == [0, 0, 0, 0.5, 1, 1, 1, 1]
        assert values_of(join_clips(clips, 0)) == [0] * 4 + [1] * 5
        assert values_of(clips[0]) == [0] * 4, "the clips stay as they are"

    def test_clips_are_joined_in_the_order_of_their_inputs(self):
        clips = {f"clip_{number}": frames(*[number] * 13) for number in (1, 2, 5, 4)}
        (video,) = WanStreamJoinClips.execute(**clips, overlap=2).args
        assert len(video) == 4 * 13 - 3 * 9
        # An inner clip shares the first nine and the last nine of 13 frames, so the middle ones
        # twice.
        assert values_of(video)[:5] == [1, 1, 1, 1, 1.1]
        assert values_of(video)[-5:] == [4.9, 5, 5, 5, 5]
        (plain,) = WanStreamJoinClips.execute(**clips, overlap=2, shared_frames=0).args
        assert values_of(plain) == [1] * 13 + [2] * 13 + [4] * 13 + [5] * 13

    @pytest.mark.parametrize("overlap", [1, 2])
    def test_clips_of_one_scene_join_without_a_stutter(self, overlap):
        """Frame values are times.

        Latent frame 0 holds frame 0, latent frame k holds frames 4k-3 to 4k.
        """
        length = 4 * 5 + 1
        times = torch.arange(6.0).view(1, 1, -1, 1, 1).expand(1, 16, -1, 4, 8)
        given = {"previous": {"samples": times}, "overlap": overlap, "frames": length}
        condition = continued([[None, {}]], **given)[0][0][1]["concat_latent_image"]
        # Frame 1 of the new clip shows the same as the first frame repeated from the clip before.
        begin = 4 * int(condition[0, 0, 1, 0, 0]) - 3 - 1
        clips = {"clip_1": frames(*range(length)), "clip_2": frames(*range(begin, begin + length))}
        (video,) = WanStreamJoinClips.execute(**clips, overlap=overlap).args
        assert values_of(video) == [float(time) for time in range(begin + length)]

    def test_clips_that_do_not_fit_are_refused(self, asked_ram):
        first = frames(0, 0, 0)
        second = frames(0, 0)
        for other, overlap, reason in (
            (torch.zeros(2, 4, 3, 3), 1, r"clip 2 is \[2, 4, 3, 3\] .*, clip 1 \[3, 2, 3, 3\]"),
            (second.half(), 1, "torch.float16"),
            (second, 2, "clip 2 has 2 frames, and the clips share 2: lower the overlap to 1"),
            (torch.zeros(0, 2, 3, 3), 1, "clip 2 is .*: give images"),
        ):
            with pytest.raises(JoinError, match=reason):
                join_clips([first, other], overlap)
        with pytest.raises(InsufficientMemoryError, match="the joined video takes"):
            join_clips([first, second], 1)
        assert asked_ram == [4 * 2 * 3 * 3 * 4]
