"""Runs in ComfyUI's own Python: tiny checkpoints for native models, their inputs, and native runs.

`FAMILIES` has the families whose classes this ComfyUI has. Models come from ComfyUI's own classes
and have random weights. Files have the keys and the metadata of distributed files. Models load and
run in inference mode, as ComfyUI's nodes do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import comfy.sample
import torch
from comfy import clip_vision, model_base, model_detection, ops, sd, utils
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams
from safetensors.torch import save_file

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""File number formats. In "fp8" files the matrices are fp8 and all other tensors bf16."""

WEIGHT_DTYPES = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
}
"""`load_diffusion_model` options for each `weight_dtype` in Load Diffusion Model."""

Conditions = Callable[[bool], dict[str, Any]]
"""Conditioning values next to the text, for the positive (True) or the negative one."""


def _normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _nothing(_positive):
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A native model, an input for it and the marks of its files."""

    name: str
    base: str
    """The class in `comfy.model_base`."""
    network: str
    """The diffusion model's module and class."""
    settings: Mapping[str, Any]
    """Arguments for the diffusion model's class."""
    lists: tuple[str, ...]
    """Names of the block lists."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of the latent parts."""
    text: tuple[int, int, int]
    """Text embedding width, positive tokens, negative tokens."""
    conditions: Conditions = _nothing
    given_frames: int = 0
    """Latent frames kept by the noise mask."""
    unet_config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration that ComfyUI does not read from a file."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Configuration in the metadata of distributed files."""
    renames: tuple[tuple[str, str], ...] = ()
    """Replacements from the class's keys to the keys in distributed files."""
    prefix: str = ""
    patches: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Replacements in ComfyUI, by full name, for parts with a fixed size too large for a test."""
    seed: int = 1
    """Seed for the weights."""

    @property
    def have(self):
        """True if this ComfyUI has the classes."""
        module, _, name = self.network.rpartition(".")
        try:
            found = hasattr(import_module(module), name)
        except ModuleNotFoundError:
            return False
        return found and hasattr(model_base, self.base)

    @property
    def metadata(self):
        config = {"config": json.dumps({"transformer": dict(self.transformer)})}
        return config if self.transformer else {}

    def key(self, name):
        """Return a parameter's key in a distributed file."""
        for old, new in self.renames:
            name = name.replace(old, new)
        return self.prefix + name

    def weights(self):
        """Return random fp32 weights under the class's names."""
        module, _, name = self.network.rpartition(".")
        settings = {**self.settings, **self.transformer}
        operations = ops.disable_weight_init
        given = {"dtype": torch.float32, "device": "cpu", "operations": operations}
        with given_configuration(self), _marked_memory():
            model = getattr(import_module(module), name)(**settings, **given).float()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, generator)
            for name, buffer in model.state_dict().items():
                if buffer.isnan().any():
                    _fill(name, buffer, generator)
        return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}

    def is_in_block(self, name):
        """Return True for a parameter in a block."""
        return name.startswith(tuple(f"{blocks}." for blocks in self.lists))

    def write(self, path, dtype):
        """Write a checkpoint in a number format from `DTYPES`."""
        stored = {}
        for name, tensor in self.weights().items():
            small = dtype == "fp8" and not _is_matrix(name, tensor)
            stored[self.key(name)] = tensor.to(torch.bfloat16 if small else DTYPES[dtype])
        save_file(stored, path, metadata=self.metadata)

    def latent(self):
        """Return the samples for a LATENT, nested if it has several parts."""
        parts = [_normal(*size, seed=10 + i) for i, size in enumerate(self.sizes)]
        if len(parts) == 1:
            return parts[0]
        from comfy.nested_tensor import NestedTensor

        return NestedTensor(parts)

    def mask(self):
        """Return the noise mask for a LATENT."""
        if not self.given_frames:
            return None
        mask = torch.ones(1, 1, *self.sizes[0][2:])
        mask[:, :, : self.given_frames] = 0
        return mask

    def conditioning(self):
        """Return the positive and the negative CONDITIONING."""
        width, *tokens = self.text
        texts = [_normal(1, count, width, seed=20 + i) for i, count in enumerate(tokens)]
        return tuple(
            [[text, {"pooled_output": None, **self.conditions(i == 0)}]]
            for i, text in enumerate(texts)
        )


@contextmanager
def _marked_memory():
    """Fill new memory with NaN to find buffers that are filled only from a file."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _is_matrix(name, tensor):
    return name.endswith(".weight") and tensor.ndim >= 2


def _fill(name, parameter, generator):
    """Fill with normals that keep activations near one, to make each block matter."""
    parameter.normal_(generator=generator)
    if name.startswith("motion_encoder."):
        # These layers themselves divide by the root of their width.
        return
    if parameter.ndim >= 2 and not name.endswith("audio_encoder.weights"):
        parameter.mul_((parameter.numel() / parameter.shape[0]) ** -0.5)
        return
    # Norm weights, and weights divided by their sum.
    parameter.mul_(0.1).add_(float(not name.endswith("bias")))


def _clip(*, tokens, width, seed=30):
    """Return a CLIP or SigLIP image encoder's output."""
    output = clip_vision.Output()
    states = _normal(1, tokens, width, seed=seed)
    output.penultimate_hidden_states = output.last_hidden_state = states
    return output


TIME = 2
HEIGHT = 8
WIDTH = 6
WAN_TEXT = 4096, 12, 12
CLIP_VISION = {"tokens": 5, "width": 1280}


def _wan(channels=16, height=HEIGHT, width=WIDTH, time=TIME):
    return 1, channels, time, height, width


def _wan_family(
    name, base, network, *, channels=16, latent_channels=16, lists=(),
    height=HEIGHT, width=WIDTH, layers=5, dim=128, unet_config=None, **more,
):  # fmt: skip
    """Return a Wan model. `more` are other fields of `Family`, and settings."""
    names = ("conditions", "given_frames", "patches")
    fields = {key: more.pop(key) for key in names if key in more}
    sizes = {"in_dim": channels, "dim": dim, "num_heads": dim // 128, "ffn_dim": 4 * dim}
    sizes |= {"num_layers": layers, "out_dim": latent_channels}
    return Family(
        name=name, base=base, network=f"comfy.ldm.wan.{network}",
        settings={**sizes, **more, **(unet_config or {})}, lists=("blocks", *lists),
        sizes=(_wan(latent_channels, height, width),), text=WAN_TEXT,
        unet_config=unet_config or {}, **fields,
    )  # fmt: skip


def _first_frame(_positive):
    mask = torch.ones(1, 1, TIME, HEIGHT, WIDTH)
    mask[:, :, :1] = 0
    return {"concat_latent_image": _normal(*_wan(), seed=31), "concat_mask": mask}


def _image_to_video(positive):
    return {**_first_frame(positive), "clip_vision_output": _clip(**CLIP_VISION)}


def _vace(contexts):
    strengths = [0.8, 0.6][:contexts]

    def conditions(_positive):
        return {
            "vace_frames": [_normal(*_wan(32), seed=32 + i) for i in range(contexts)],
            "vace_mask": [_normal(*_wan(64), seed=34 + i).sigmoid() for i in range(contexts)],
            "vace_strength": strengths,
        }

    return conditions


FACE_PIXELS = 64
"""Face picture height and width for Wan Animate's motion encoder with three halvings fewer."""


def _short_face_encoder():
    from comfy.ldm.wan.model_animate import EncoderApp

    class ShortEncoder(EncoderApp):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            del self.convs[5:8]

    return ShortEncoder


def _narrow_audio_projection():
    from comfy.ldm.wan.model import AudioProjModel

    return lambda **options: AudioProjModel(**{**options, "intermediate_dim": 16})


def _animate(positive):
    face = _normal(1, 3, 1, FACE_PIXELS, FACE_PIXELS, seed=36).tanh()
    return {
        **_image_to_video(positive),
        "face_video_pixels": face if positive else face * 0.0 - 1.0,
        "pose_video_latent": _normal(*_wan(time=1), seed=37),
    }


def _sound(positive):
    audio = _normal(1, 25, 1024, 4 * TIME, seed=38)
    return {
        "audio_embed": audio if positive else audio * 0.0,
        "reference_latents": [_normal(*_wan(time=1, height=8, width=8), seed=39)],
        "reference_motion": _normal(*_wan(time=3, height=8, width=8), seed=40),
        "control_video": _normal(*_wan(height=8, width=8), seed=41),
    }


def _humo(positive):
    audio = _normal(1, TIME, 8, 5, 1280, seed=42)
    return {
        "audio_embed": audio if positive else torch.zeros_like(audio),
        "reference_latents": [_normal(*_wan(time=1), seed=43)],
    }


def _camera(positive):
    return {
        **_image_to_video(positive),
        "camera_conditions": _normal(1, 24, TIME, 8 * HEIGHT, 8 * WIDTH, seed=44),
    }


def _camera_of_a_frame(positive):
    return {**_first_frame(positive), "camera_conditions": _camera(positive)["camera_conditions"]}


def _scail(_positive):
    return {
        "clip_vision_output": _clip(**CLIP_VISION),
        "reference_latents": [_normal(*_wan(time=1), seed=45)],
        "pose_video_latent": _normal(*_wan(height=HEIGHT // 2, width=WIDTH), seed=46),
    }


def _flux(positive):
    return {"pooled_output": _normal(1, 768, seed=47 + positive), "guidance": 3.5}


def _references(*shape):
    return lambda _positive: {"reference_latents": [_normal(*shape, seed=48)]}


def _kontext(positive):
    return {**_flux(positive), **_references(1, 16, HEIGHT, WIDTH)(positive)}


def _hunyuan_text(positive):
    return {"pooled_output": _normal(1, 768, seed=50 + positive), "guidance": 6.0}


def _hunyuan(positive):
    return {
        "conditioning_byt5small": _normal(1, 5, 1472, seed=50 + positive),
        "clip_vision_output": _clip(tokens=6, width=1152),
        "concat_latent_image": _normal(1, 32, TIME, 4, 4, seed=52),
        "concat_mask": _first_frame(positive)["concat_mask"][..., :4, :4],
    }


def _ltx(_positive):
    return {"frame_rate": 25.0, "unprocessed_ltxav_embeds": True}


WAN = "WAN21", "model.WanModel"
VACE = "WAN21_Vace", "model.VaceWanModel"
VACE_SETTINGS = {"lists": ("vace_blocks",), "layers": 6, "vace_layers": 3, "vace_in_dim": 96}
WAN_FAMILIES = (
    _wan_family("wan_t2v", *WAN, model_type="t2v", dim=256, layers=4),
    _wan_family("wan_i2v", *WAN, channels=36, model_type="i2v", conditions=_image_to_video),
    _wan_family("wan22_i2v", *WAN, channels=36, model_type="t2v", conditions=_first_frame),
    _wan_family("wan22_ti2v", "WAN22", "model.WanModel", channels=48, latent_channels=48,
        model_type="t2v", given_frames=1),
    _wan_family("wan_vace", *VACE, **VACE_SETTINGS, conditions=_vace(1)),
    _wan_family("wan_vace_twice", *VACE, **VACE_SETTINGS, conditions=_vace(2)),
    # One face block for every five blocks.
    _wan_family("wan22_animate", "WAN22_Animate", "model_animate.AnimateWanModel", channels=36,
        lists=("face_adapter.fuser_blocks",), layers=10, conditions=_animate,
        patches={"comfy.ldm.wan.model_animate.EncoderApp": _short_face_encoder}),
    # The motion frames need a height and a width divisible by 8.
    _wan_family("wan22_s2v", "WAN22_S2V", "model.WanModel_S2V",
        lists=("audio_injector.injector", "audio_injector.injector_adain_layers"), height=8,
        width=8, layers=6, conditions=_sound, unet_config={"audio_inject_layers": [0, 2, 5]}),
    _wan_family("wan_humo", "WAN21_HuMo", "model.HumoWanModel", channels=36, layers=4,
        conditions=_humo, patches={"comfy.ldm.wan.model.AudioProjModel": _narrow_audio_projection}),
    _wan_family("wan_camera", "WAN21_Camera", "model.CameraWanModel", channels=32,
        model_type="camera", conditions=_camera),
    _wan_family("wan22_camera", "WAN21_Camera", "model.CameraWanModel", channels=36,
        model_type="camera_2.2", conditions=_camera_of_a_frame),
    _wan_family("wan_scail", "WAN21_SCAIL", "model.SCAILWanModel", channels=20, conditions=_scail),
)  # fmt: skip

# ComfyUI 0.3.64 does not read Flux's width from the file.
FLUX_WIDTH = {"hidden_size": 128, "num_heads": 1}
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
    "mlp_ratio": 4.0, "depth": 3, "depth_single_blocks": 5, "axes_dim": [16, 56, 56],
    "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True, **FLUX_WIDTH,
}  # fmt: skip
if "txt_ids_dims" in FluxParams.__dataclass_fields__:
    FLUX["txt_ids_dims"] = []
HUNYUAN = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
    "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 4,
    "axes_dim": [16, 56, 56], "theta": 256, "patch_size": [1, 2, 2], "qkv_bias": True,
    "guidance_embed": True,
}  # fmt: skip
HUNYUAN_NEWER = {
    "byt5": False, "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None,
    "meanflow_sum": False,
}  # fmt: skip
HUNYUAN_15 = {
    **HUNYUAN, "in_channels": 65, "out_channels": 32, "vec_in_dim": None, "context_in_dim": 3584,
    "depth": 4, "depth_single_blocks": 0, "patch_size": [1, 1, 1], "guidance_embed": False,
    "byt5": True, "meanflow": False, "use_cond_type_embedding": True, "vision_in_dim": 1152,
    "meanflow_sum": True,
}  # fmt: skip
HUNYUAN |= {
    name: value
    for name, value in HUNYUAN_NEWER.items()
    if name in HunyuanVideoParams.__annotations__
}
QWEN = {"num_attention_heads": 1, "joint_attention_dim": 256}
LTX = {
    "num_attention_heads": 2, "attention_head_dim": 64, "cross_attention_dim": 128,
    "audio_num_attention_heads": 2, "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64, "caption_channels": 128, "connector_num_attention_heads": 2,
    "connector_attention_head_dim": 64, "connector_num_layers": 2,
    "positional_embedding_max_pos": [20, 2048, 2048], "use_middle_indices_grid": True,
    "causal_temporal_positioning": True, "av_ca_timestep_scale_multiplier": 1000.0,
    "rope_type": "split", "frequencies_precision": "float64",
}  # fmt: skip
LTX_LISTS = (
    "transformer_blocks",
    "video_embeddings_connector.transformer_1d_blocks",
    "audio_embeddings_connector.transformer_1d_blocks",
)
HUNYUAN_NETWORK = "comfy.ldm.hunyuan_video.model.HunyuanVideo"
REFINER = "txt_in.individual_token_refiner.blocks"

EVERY_FAMILY = (
    *WAN_FAMILIES,
    *(Family(name=name, base="Flux", network="comfy.ldm.flux.model.Flux", settings=FLUX,
        lists=("double_blocks", "single_blocks"), sizes=((1, 16, HEIGHT, WIDTH),),
        text=(4096, 12, 12), conditions=conditions, unet_config=FLUX_WIDTH,
        renames=(("_norm.weight", "_norm.scale"),))
        for name, conditions in (("flux", _flux), ("flux_kontext", _kontext))),
    Family(name="qwen_image", base="QwenImage",
        network="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
        settings={"num_layers": 4, **QWEN}, lists=("transformer_blocks",),
        sizes=((1, 16, 1, HEIGHT, WIDTH),), text=(QWEN["joint_attention_dim"], 12, 9),
        conditions=_references(1, 16, 1, HEIGHT, WIDTH), unet_config=QWEN),
    Family(name="hunyuan_video", base="HunyuanVideo", network=HUNYUAN_NETWORK, settings=HUNYUAN,
        lists=("double_blocks", "single_blocks", REFINER), sizes=(_wan(),), text=(4096, 12, 12),
        conditions=_hunyuan_text),
    Family(name="hunyuan_video_15", base="HunyuanVideo15", network=HUNYUAN_NETWORK,
        settings=HUNYUAN_15, lists=("double_blocks", REFINER), sizes=((1, 32, TIME, 4, 4),),
        text=(3584, 12, 9), conditions=_hunyuan),
    Family(name="ltx_2", base="LTXAV", network="comfy.ldm.lightricks.av_model.LTXAVModel",
        settings={"num_layers": 4}, lists=LTX_LISTS, sizes=((1, 128, 2, 4, 3), (1, 8, 6, 16)),
        text=(LTX["caption_channels"], 12, 9), conditions=_ltx, transformer=LTX,
        prefix="model.diffusion_model."),
)  # fmt: skip
FAMILIES = {family.name: family for family in EVERY_FAMILY if family.have}


@contextmanager
def given_configuration(family):
    """Give ComfyUI what it does not read from the family's files, while a file is loaded."""
    detect = model_detection.detect_unet_config

    def detected(*args, **options):
        found = detect(*args, **options)
        return None if found is None else {**found, **family.unet_config}

    with ExitStack() as stack:
        stack.enter_context(patch("comfy.model_detection.detect_unet_config", detected))
        for name, replacement in family.patches.items():
            stack.enter_context(patch(name, replacement()))
        yield


RANK = 4


def _lora(shape, random, rank=RANK):
    rows, columns = shape
    down = random(rank, columns) * columns**-0.5
    up = random(rows, rank) * 0.3 * rank**-0.5
    return {"lora_A.weight": down, "lora_B.weight": up}


def _kohya(shape, random):
    down, up = _lora(shape, random).values()
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(RANK / 2)}


def _dora(shape, random):
    return {**_kohya(shape, random), "dora_scale": 1 + 0.1 * random(shape[0], 1)}


def _dora_of_columns(shape, random):
    return {**_kohya(shape, random), "dora_scale": 1 + 0.1 * random(1, shape[1])}


def _loha(shape, random):
    rows, columns = shape
    found = {"alpha": torch.tensor(float(RANK))}
    for i, size in ((1, 1.0), (2, 0.3 * columns**-0.5)):
        found[f"hada_w{i}_a"] = random(rows, RANK) * size
        found[f"hada_w{i}_b"] = random(RANK, columns) * RANK**-0.5
    return found


def _lokr(shape, random):
    rows, columns = shape
    second = random(rows // 4, columns // 4) * columns**-0.5
    return {"lokr_w1": random(4, 4) * 0.3, "lokr_w2": second}


LORAS = {
    "lora": _lora,
    "rank 8": partial(_lora, rank=8),
    "kohya": _kohya,
    "dora": _dora,
    "dora columns": _dora_of_columns,
    "loha": _loha,
    "lokr": _lokr,
    "offset": _lora,
    "diff": lambda shape, random: {"diff": random(*shape) * 0.3 * shape[-1] ** -0.5},
}
"""LoRA tensors for a matrix, by LoRA kind.

"kohya" is "lora" with other keys and an alpha, "offset" is "lora" for a matrix's first rows (Flux
only), and "diff" is for all weights, biases and modulations.
"""

BESIDE_THE_BLOCKS = ("text_embedding.0.weight", "txt_in.weight")
"""Matrices outside the blocks, also changed by `write_lora`."""


def _lora_key(kind, name):
    """Return a parameter's key in a LoRA, or None if the LoRA does not change it."""
    bare = name.removesuffix(".weight")
    if kind == "offset":
        return f"diffusion_model.{bare}_qkv" if name.endswith(".linear1.weight") else None
    if kind == "kohya":
        return "lora_unet_" + bare.replace(".", "_")
    return f"diffusion_model.{bare}"


def write_lora(kind, path, weights):
    """Write a LoRA kind from `LORAS` for the blocks and one other matrix in a Wan or Flux model.

    The weights are the diffusion model's, by name. Only their shapes matter.
    """
    generator = torch.Generator().manual_seed(5)
    stored = {}

    def random(*shape):
        return torch.randn(shape, generator=generator)

    for name, weight in weights.items():
        shape = weight.shape
        wanted = "blocks." in name or name in BESIDE_THE_BLOCKS
        key = _lora_key(kind, name)
        if not wanted or key is None:
            continue
        if kind == "diff" and name.endswith(".bias"):
            # ComfyUI finds these by the weight's key.
            stored[f"{key.removesuffix('.bias')}.diff_b"] = random(*shape) * 0.1
            continue
        if kind != "diff" and not (name.endswith(".weight") and len(shape) == 2):
            continue
        changed = (3 * shape[1], shape[1]) if kind == "offset" else tuple(shape)
        for suffix, tensor in LORAS[kind](changed, random).items():
            stored[f"{key}.{suffix}"] = tensor.contiguous()
    save_file(stored, path)


@torch.inference_mode()
def load_lora(model, path, strength=1.0):
    """Return a MODEL clone with a LoRA, as Load LoRA makes it."""
    lora = utils.load_torch_file(str(path), safe_load=True)
    return sd.load_lora_for_models(model, None, lora, strength, 0)[0]


@torch.inference_mode()
def native(path, family, *, weight_dtype="default"):
    """Return the MODEL from Load Diffusion Model."""
    options = dict(WEIGHT_DTYPES[weight_dtype])
    with given_configuration(family):
        return sd.load_diffusion_model(str(path), model_options=options)


@torch.inference_mode()
def sample(model, family, *, sampler="euler", scheduler="simple", steps=3, cfg=3.0, denoise=1.0):
    """Return KSampler's latent, on the CPU.

    A nested latent's parts are joined into one vector.
    """
    latent = family.latent()
    noise = comfy.sample.prepare_noise(latent, 7)
    given = (noise, steps, cfg, sampler, scheduler, *family.conditioning(), latent)
    options = {"denoise": denoise, "noise_mask": family.mask(), "disable_pbar": True, "seed": 7}
    samples = comfy.sample.sample(model, *given, **options)
    if not isinstance(samples, torch.Tensor):
        samples = torch.cat([part.flatten() for part in samples.unbind()])
    return samples.cpu()


def _difference(one, other):
    return float((one - other).norm() / other.norm())
