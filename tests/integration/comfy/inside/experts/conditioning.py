"""Runs in ComfyUI's own Python: every native Wan node's conditioning, through our sampler.

It is read, refused by name, or harmless.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any, ClassVar

import torch
from comfy_api.latest import io

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, RequestOptions, native_inputs
from wanstream.sampling.inputs.conditioning_keys import IGNORED, READ, REFUSED
from wanstream.sampling.steps import Guidance, RequestError, StepSettings
from wanstream.schema import OffloadPolicy
from wanstream.wan.experts.open import open_experts

from ..checks import for_each, refused
from ..families import _clip
from .variants import Vae

EXPECTED = {
    **{name: {} for name in ("WanImageToVideo", "WanFirstLastFrameToVideo",
        "WanFunInpaintToVideo", "WanTrackToVideo", "WanMoveTrackToVideo")},
    # The audio is a patch on the MODEL, and our nodes take none.
    "WanInfiniteTalkToVideo": {},
    # Without a camera it is an ordinary start image.
    "WanCameraImageToVideo": dict.fromkeys(("camera_conditions", "all"), "camera_conditions"),
    # Without a face or a pose it is an ordinary start image. Animate weights are refused on
    # opening.
    "WanAnimateToVideo": {"face_video": "face_video_pixels", "pose_video": "pose_video_latent",
        "all": "pose_video_latent"},
    # The reference image alone is reference_latents, ignored by plain weights in native sampling
    # too.
    "WanSCAILToVideo": {"pose_video": "pose_video_latent", "pose_video_mask": "driving_mask_28ch",
        "all": "pose_video_latent"},
    "WanFunControlToVideo": {"*": "concat_latent_image"},
    "Wan22FunControlToVideo": {"*": "concat_mask_index"},
    "WanVaceToVideo": {"*": "vace_frames"},
    "WanPhantomSubjectToVideo": {"*": "time_dim_concat"},
    "WanSoundImageToVideo": {"*": "control_video", "audio_encoder_output": "audio_embed",
        "ref_motion": "reference_motion", "all": "audio_embed"},
    "WanSoundImageToVideoExtend": {"*": "reference_motion"},
    "WanHuMoImageToVideo": {"*": "audio_embed"},
    "WanAnimate2ToVideo": {"*": "cross_attn_pose", "pose_video": "pose_video_latent",
        "all": "pose_video_latent", "clip_vision_output": "clip_vision_output_pose",
        "clip_vision_output_pose": "clip_vision_output_pose"},
    # Without music it is an ordinary start image.
    "WanDancerVideo": {"audio_encoder_output": "audio_embed", "all": "clip_vision_output_ref"},
}  # fmt: skip
"""The refused key by node and way to connect it, "*" for all others. Without one it runs."""

# The node itself fails in ComfyUI when it is connected so.
FAILURES = (TypeError, UnboundLocalError, AttributeError)
NODE_FAILS = {
    "WanPhantomSubjectToVideo: nothing",
    "WanInfiniteTalkToVideo: nothing",
    "WanInfiniteTalkToVideo: clip_vision_output",
}

SIZE = 64
FRAMES = 9
FILES = ("nodes_wan", "nodes_wanmove", "nodes_scail", "nodes_wandancer")
MODULES = [name for name in FILES if importlib.util.find_spec(f"comfy_extras.{name}")]
"""Native Wan node files. Older ComfyUI versions lack some."""


class Model:
    """The methods InfiniteTalk calls on a model."""

    model_options: ClassVar[Any] = {"transformer_options": {}}
    model_dtype = add_wrapper_with_key = set_model_patch = lambda *_: torch.float32

    def clone(self):
        return self


class AudioProjection:
    """InfiniteTalk's audio projection."""

    seq_len = 5
    blocks = 12
    channels = 768
    intermediate_dim = 512
    context_tokens = 32
    output_dim = 768

    def __call__(self, first, later):
        return torch.zeros(1, 3, 32, 8)


def _audio(width, layers):
    encoded = [torch.ones(1, 60, width)] * layers
    features = {"encoded_audio_all_layers": encoded, "audio_feature": encoded[0]}
    return {**features, "audio_samples": 16000, "fps": 30.0}


def _values(node):
    """Something for every input on these nodes without a suitable default, by name."""
    picture = torch.full((1, SIZE, SIZE, 3), 0.25)
    video = torch.full((FRAMES, SIZE, SIZE, 3), 0.75)
    audio = {"WanHuMoImageToVideo": (1280, 33), "WanInfiniteTalkToVideo": (768, 13)}
    text = {"pooled_output": None}
    seen = _clip(tokens=257, width=1280)
    by_value = [
        ([[torch.full((1, 6, 4096), 0.01), text]], "positive"),
        ([[torch.full((1, 5, 4096), 0.02), text]], "negative"),
        ([[torch.full((1, 4, 4096), 0.03), text]], "positive_pose"),
        (Vae(16, 8), "vae"),
        (Model(), "model"),
        (Namespace(model=Namespace(audio_proj=AudioProjection())), "model_patch"),
        (SIZE, "width height"),
        (FRAMES, "length"),
        (picture, "start_image end_image ref_image reference_image images continue_motion"),
        (picture, "pose_video_mask reference_image_mask"),
        (video, "control_video pose_video face_video background_video ref_motion previous_frames"),
        (torch.ones(FRAMES, SIZE, SIZE), "control_masks character_mask mask"),
        (seen, "clip_vision_output clip_vision_start_image clip_vision_end_image"),
        (seen, "clip_vision_output_pose clip_vision_output_ref"),
        (_audio(*audio.get(node, (1024, 25))), "audio_encoder_output audio_encoder_output_1"),
        (torch.ones(1, 24, (FRAMES - 1) // 4 + 1, SIZE, SIZE), "camera_conditions"),
        ({"samples": torch.ones(1, 16, 25, SIZE // 8, SIZE // 8)}, "video_latent"),
        (json.dumps([[{"x": 8 * point, "y": 8} for point in range(4)]]), "tracks"),
        ({"mode": "single_speaker"}, "mode"),
    ]
    return {name: value for value, names in by_value for name in names.split()}


def wan_nodes():
    """Every node in ComfyUI's Wan modules with a conditioning output."""
    found = {}
    for module in (importlib.import_module(f"comfy_extras.{name}") for name in MODULES):
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, io.ComfyNode) and value.__module__ == module.__name__:
                schema = value.define_schema()
                if any(isinstance(output, io.Conditioning.Output) for output in schema.outputs):
                    found[schema.node_id] = (value, schema)
    return found


def _given(node, schema, optional):
    defaults = {each.id: getattr(each, "default", None) for each in schema.inputs}
    values = {name: value for name, value in defaults.items() if value is not None} | _values(node)
    if node == "WanMoveTrackToVideo":
        values["tracks"] = {"track_path": torch.full((FRAMES, 1, 2), 8.0)}
    names = [each.id for each in schema.inputs if not each.optional or each.id in optional]
    return {name: values[name] for name in names}


def _run(folder, results, keys):
    """Run our sampler with a node's first conditioning, last conditioning and latent."""
    sides = [value for value in results if isinstance(value, list)]
    latent = next(value for value in results if isinstance(value, dict) and "samples" in value)
    kind = "i2v" if "concat_latent_image" in keys else "t2v"
    files = (folder / f"{kind}_{name}.safetensors" for name in ("high", "low"))
    inputs = native_inputs(sides[0], sides[1], latent, seed=1)
    settings = StepSettings(steps=2, switch_step=1)
    guidance = Guidance(scales=(3.0, 3.0))
    request = DenoiseRequest.of(inputs, settings, guidance, RequestOptions())
    with open_experts(*files, compute_dtype=torch.float32) as pair:
        made = denoise(pair, request, policy=OffloadPolicy.resident(), device="cpu")
    assert made.latents.isfinite().all()


def _check(folder, node, way, results):
    """It runs, or is refused by the name of its key, and all keys are known."""
    options = [each for side in results if isinstance(side, list) for _, each in side]
    # Numbers and flags cannot be pictures.
    other = int | float | str
    keys = {key for each in options for key, value in each.items() if not isinstance(value, other)}
    assert keys <= {*READ, *IGNORED, *REFUSED, "pooled_output"}
    expected = EXPECTED[node].get(way, EXPECTED[node].get("*"))
    if expected is None:
        _run(folder, results, keys)
        return
    refused(lambda: _run(folder, results, keys), expected, "remove", kind=RequestError)


NODES = wan_nodes()


@for_each(*NODES)
def check_node(folder, name):
    """It has no optional input, each optional input alone, and all."""
    node, schema = NODES[name]
    optional = [each.id for each in schema.inputs if each.optional]
    ways = {"nothing": [], **{each: [each] for each in optional}, "all": optional}
    for way, connected in ways.items():
        given = _given(name, schema, connected)
        if f"{name}: {way}" in NODE_FAILS:
            refused(partial(node.execute, **given), kind=FAILURES)
            continue
        _check(folder, name, way, node.execute(**given).args)


def check_known_nodes(_):
    has_all = importlib.util.find_spec("comfy_extras.nodes_wandancer") is not None
    assert NODES.keys() == EXPECTED.keys() if has_all else NODES.keys() < EXPECTED.keys()
