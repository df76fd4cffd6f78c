"""Runs in ComfyUI's own Python: every native Wan node's conditioning, through our sampler.

`answers(folder)` returns one value per node and way to connect it. `test_conditioning.py` checks
the values.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import comfy.clip_vision
import torch
from comfy_api.latest import io
from installed_pack import load_pack

load_pack()
from wanstream.sampling import denoise  # noqa: E402
from wanstream.sampling.inputs import DenoiseRequest, RequestOptions, native_inputs  # noqa: E402
from wanstream.sampling.steps import Guidance, RequestError, StepSettings  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402
from wanstream.wan.experts.open import open_experts  # noqa: E402

SIZE, FRAMES = 64, 9
FILES = ("nodes_wan", "nodes_wanmove", "nodes_scail", "nodes_wandancer")
MODULES = [name for name in FILES if importlib.util.find_spec(f"comfy_extras.{name}")]
"""Native Wan node files. Older ComfyUI versions lack some."""


class Vae:
    """A Wan2.1 VAE that encodes to noise."""

    latent_channels = 16

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width, _ = pixels.shape
        seeded = torch.Generator().manual_seed(frames)
        return torch.randn(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8, generator=seeded)

    def spacial_compression_encode(self) -> int:
        return 8


class Model:
    """The methods InfiniteTalk calls on a model."""

    def __init__(self) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> Model:
        return Model()

    def model_dtype(self) -> torch.dtype:
        return torch.float32

    def add_wrapper_with_key(self, *_: Any) -> None:
        pass

    def set_model_patch(self, *_: Any) -> None:
        pass


class AudioProjection:
    """InfiniteTalk's audio projection."""

    seq_len, blocks, channels, intermediate_dim, context_tokens, output_dim = (
        5,
        12,
        768,
        512,
        32,
        768,
    )

    def __call__(self, first: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 3, 32, 8)


def _seen() -> comfy.clip_vision.Output:
    output = comfy.clip_vision.Output()
    output.penultimate_hidden_states = torch.ones(1, 257, 1280)
    return output


def _audio(width: int, layers: int) -> dict[str, Any]:
    encoded = [torch.ones(1, 60, width)] * layers
    return {
        "encoded_audio_all_layers": encoded,
        "audio_samples": 16000,
        "audio_feature": encoded[0],
        "fps": 30.0,
    }


def _values(node: str) -> dict[str, Any]:
    """Something for every input on these nodes, by name."""
    picture, video = torch.full((1, SIZE, SIZE, 3), 0.25), torch.full((FRAMES, SIZE, SIZE, 3), 0.75)
    audio = {"WanHuMoImageToVideo": (1280, 33), "WanInfiniteTalkToVideo": (768, 13)}.get(
        node, (1024, 25)
    )
    path = [{"x": 8 * point, "y": 8} for point in range(4)]
    return {
        "positive": [[torch.full((1, 6, 4096), 0.01), {"pooled_output": None}]],
        "negative": [[torch.full((1, 5, 4096), 0.02), {"pooled_output": None}]],
        "positive_pose": [[torch.full((1, 4, 4096), 0.03), {"pooled_output": None}]],
        "vae": Vae(),
        "width": SIZE,
        "height": SIZE,
        "length": FRAMES,
        "batch_size": 1,
        **dict.fromkeys(("start_image", "end_image", "ref_image", "reference_image"), picture),
        **dict.fromkeys(("images", "continue_motion"), picture),
        **dict.fromkeys(
            ("control_video", "pose_video", "face_video", "background_video", "ref_motion"), video
        ),
        **dict.fromkeys(
            ("clip_vision_output", "clip_vision_start_image", "clip_vision_end_image"), _seen()
        ),
        **dict.fromkeys(("clip_vision_output_pose", "clip_vision_output_ref"), _seen()),
        **dict.fromkeys(("audio_encoder_output", "audio_encoder_output_1"), _audio(*audio)),
        **dict.fromkeys(
            ("control_masks", "character_mask", "mask"), torch.ones(FRAMES, SIZE, SIZE)
        ),
        **dict.fromkeys(("pose_video_mask", "reference_image_mask"), picture),
        "camera_conditions": torch.ones(1, 24, (FRAMES - 1) // 4 + 1, SIZE, SIZE),
        "video_latent": {"samples": torch.ones(1, 16, 25, SIZE // 8, SIZE // 8)},
        "tracks": json.dumps([path]),
        "strength": 1.0,
        "temperature": 220.0,
        "topk": 2,
        "continue_motion_max_frames": 5,
        "video_frame_offset": 0,
        "pose_strength": 1.0,
        **dict.fromkeys(("pose_start", "pose_start_percent"), 0.0),
        **dict.fromkeys(("pose_end", "pose_end_percent"), 1.0),
        "reference_image_strength": 1.0,
        "replacement_mode": False,
        "previous_frame_count": 5,
        "mode": {"mode": "single_speaker"},
        "model": Model(),
        "model_patch": Namespace(model=Namespace(audio_proj=AudioProjection())),
        "motion_frame_count": 9,
        "previous_frames": video,
        "audio_scale": 1.0,
    }


def wan_nodes() -> dict[str, Any]:
    """Every node in ComfyUI's Wan modules with a conditioning output."""
    found = {}
    for module in (importlib.import_module(f"comfy_extras.{name}") for name in MODULES):
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, io.ComfyNode) and value.__module__ == module.__name__:
                schema = value.define_schema()
                if any(isinstance(output, io.Conditioning.Output) for output in schema.outputs):
                    found[schema.node_id] = (value, schema)
    return found


def _given(node: str, schema: Any, optional: list[str]) -> dict[str, Any]:
    values = _values(node)
    if node == "WanMoveTrackToVideo":
        values["tracks"] = {"track_path": torch.full((FRAMES, 1, 2), 8.0)}
    names = [each.id for each in schema.inputs if not each.optional or each.id in optional]
    return {name: values[name] for name in names}


def _outcome(folder: Path, results: tuple[Any, ...]) -> dict[str, Any]:
    """Our sampler's result for a node's first conditioning, last conditioning and latent."""
    sides = [value for value in results if isinstance(value, list)]
    latent = next(value for value in results if isinstance(value, dict) and "samples" in value)
    keys = sorted(
        {key for side in sides for _, options in side for key in options} - {"pooled_output"}
    )
    kind = "i2v" if "concat_latent_image" in keys else "t2v"
    settings = StepSettings(steps=2, switch_step=1)
    with open_experts(
        folder / f"{kind}_high.safetensors",
        folder / f"{kind}_low.safetensors",
        compute_dtype=torch.float32,
    ) as pair:
        try:
            inputs = native_inputs(sides[0], sides[1], latent, seed=1)
            request = DenoiseRequest.of(
                inputs, settings, Guidance(scales=(3.0, 3.0)), RequestOptions()
            )
            made = denoise(pair, request, policy=OffloadPolicy.resident(), device="cpu")
        except RequestError as err:
            return {"keys": keys, "refused": str(err)}
    return {
        "keys": keys,
        "shape": list(made.latents.shape),
        "finite": bool(made.latents.isfinite().all()),
    }


def answers(folder: str) -> dict[str, Any]:
    """One value per node and connection: no optional input, each optional input alone, and all."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for node, (cls, schema) in wan_nodes().items():
            optional = [each.id for each in schema.inputs if each.optional]
            ways = {"nothing": [], **{name: [name] for name in optional}, "all": optional}
            for way, connected in ways.items():
                given = _given(node, schema, connected)
                try:
                    results = cls.execute(**given).args
                except (
                    TypeError,
                    UnboundLocalError,
                    AttributeError,
                ) as err:  # the node itself needs more
                    found[f"{node}: {way}"] = {"node failed": repr(err)}
                    continue
                found[f"{node}: {way}"] = _outcome(Path(folder), results)
    return found
