"""Tiny text encoders for runs in ComfyUI's own Python: files, prompts, and ComfyUI's CLIP.

The architectures are ComfyUI's, with fewer and thinner layers, by ComfyUI's configuration options.
`ENCODERS` has the ones this ComfyUI detects.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import comfy.text_encoders.llama
import comfy.text_encoders.qwen_vl
import torch
from comfy import sd
from safetensors.torch import save_file

from ..custom_nodes.clip import read

VOCABULARY = 300
T5 = {"num_layers": 4, "num_heads": 2, "d_kv": 16, "d_ff": 96, "d_model": 64, "vocab_size": 300}
LLAMA = {
    "vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 96}
GEMMA_4_VISION = {
    **VISION, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 3,
    "position_embedding_size": 64,
}  # fmt: skip
GEMMA_4_AUDIO = {
    **VISION, "num_attention_heads": 2, "num_hidden_layers": 2, "output_proj_dims": 48,
}  # fmt: skip
GEMMA_4_PATCHES = {"mm_embed_dim": 64, "mm_posemb_size": 32, "output_proj_dims": 64}
T5_GEMMA = {
    "vocab_size": VOCABULARY, **VISION, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
SIGLIP = {
    **VISION, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh", "image_size": 224,
    "model_type": "siglip_vision_model", "num_attention_heads": 2, "num_hidden_layers": 2,
    "patch_size": 14,
}  # fmt: skip
LAST_OF_T5 = "encoder.block.23.layer.1.DenseReluDense.wi_1.weight"
"""A tensor that identifies T5-XXL and UMT5-XXL to ComfyUI, if it has the real size."""
MARK_OF_T5 = {LAST_OF_T5: (96, 64)}


@contextmanager
def thin_encoders():
    """Let ComfyUI detect thin encoders, and make their vision parts thin.

    Texts are given as tokens. ComfyUI's tokenizers, some of which need files, are not made.
    """
    with ExitStack() as patched:
        patched.enter_context(patch("comfy.sd1_clip.SDTokenizer.__init__", _no_tokenizer))
        own = comfy.text_encoders.qwen_vl.Qwen2VLVisionTransformer
        thin = partial(_with, own, {**VISION, "num_heads": 2, "num_layers": 3})
        patched.enter_context(patch.object(comfy.text_encoders.qwen_vl, own.__name__, thin))
        gemma = getattr(comfy.text_encoders.llama, "Gemma3_12B_Config", None)
        if gemma is not None:
            patched.enter_context(patch.object(gemma, "vision_config", SIGLIP))
        patched.enter_context(patch("comfy.sd.detect_te_model", partial(_detected, DETECT)))
        # For a longer CLIP-L it would replace our configuration.
        long_clip = "comfy.text_encoders.long_clipl.model_options_long_clip"
        patched.enter_context(patch(long_clip, lambda _tensors, *given: given))
        if find_spec("comfy.text_encoders.qwen3vl"):
            from comfy.text_encoders import qwen3vl

            settings = {**VISION, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
            for name in qwen3vl.QWEN3VL_VISION:
                patched.enter_context(patch.dict(qwen3vl.QWEN3VL_VISION, {name: settings}))
        if find_spec("comfy.text_encoders.gemma4"):
            from comfy.text_encoders import gemma4, sa3

            for settings, thin in (
                (gemma4.GEMMA4_VISION_CONFIG, GEMMA_4_VISION),
                (gemma4.GEMMA4_AUDIO_CONFIG, GEMMA_4_AUDIO),
                (gemma4.GEMMA4_UNIFIED_VISION_CONFIG, GEMMA_4_PATCHES),
            ):
                patched.enter_context(patch.dict(settings, thin))
            config = sa3.T5GemmaEncoderConfig()
            vars(config).update(T5_GEMMA)
            patched.enter_context(patch.object(sa3, "T5GemmaEncoderConfig", lambda: config))
        yield


DETECT = sd.detect_te_model


def _detected(detect, tensors):
    return sd.TEModel.T5_XXL if LAST_OF_T5 in tensors else detect(tensors)


def _no_tokenizer(self, *_, **__):
    self.min_length = 1


def _with(own, changed, **settings):
    return own(**{**settings, **changed})


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A CLIP from one or several files."""

    kind: str
    """Type in ComfyUI's loaders."""
    parts: Mapping[str, str]
    """Each encoder's token key, by encoder name. One file each."""
    config: Mapping[str, Mapping[str, Any]]
    """Configuration by encoder name."""
    marks: tuple[Mapping[str, tuple[int, ...]], ...]
    """Tensors that identify each file's encoder to ComfyUI."""
    detected: str
    """ComfyUI's name for the largest encoder."""
    sees: bool = False
    """True for vision encoders."""
    renames: tuple[tuple[str, str], ...] = ()
    """Key prefixes in the network, and in distributed files."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other ComfyUI model options."""

    @property
    def have(self):
        """True if this ComfyUI detects it."""
        return hasattr(sd.TEModel, self.detected) and hasattr(sd.CLIPType, self.kind.upper())

    @property
    def options(self):
        configs = {f"{name}_model_config": dict(config) for name, config in self.config.items()}
        return {**configs, **self.settings}

    @property
    def type(self):
        return sd.CLIPType[self.kind.upper()]

    def write(self, folder, dtype=torch.float16):
        """Write files with random weights, and return their paths."""
        zeros = partial(torch.zeros, dtype=dtype)
        files = [{key: zeros(shape) for key, shape in marks.items()} for marks in self.marks]
        options = {**self.options, "dtype": dtype}
        load = partial(sd.load_text_encoder_state_dicts, clip_type=self.type)
        clip = load([dict(each) for each in files], model_options=options)
        generator = torch.Generator().manual_seed(1)
        paths = []
        for name, tensors in zip(self.parts, files, strict=True):
            part = clip.cond_stage_model.get_submodule(name)
            network = getattr(part, "transformer", part)
            for key, shape in _shapes(network):
                values = torch.randn(shape, generator=generator)
                values = 1 + 0.1 * values if len(shape) < 2 else values / shape[-1] ** 0.5
                tensors[self._key(key)] = values.to(dtype)
            if name == "clip_l" and self.kind != "hidream":
                tensors.pop("text_projection.weight")  # distributed files have none
            paths.append(folder / f"{name or self.kind}.safetensors")
            save_file(tensors, paths[-1])
        return tuple(paths)

    def _key(self, key):
        for start, renamed in self.renames:
            if key.startswith(start):
                return renamed + key.removeprefix(start)
        return key

    def load(self, paths):
        """Return ComfyUI's own CLIP."""
        tensors = [read(str(path)) for path in paths]
        options = {"clip_type": self.type, "model_options": self.options}
        return sd.load_text_encoder_state_dicts(tensors, **options)

    def prompt(self, length, image=None):
        """Return tokens for a text, some with a weight, and for an image in it."""
        tokens = [(3 + 7 * place % (VOCABULARY - 3), 1.0) for place in range(length)]
        if "t5" in [*self.parts][-1]:  # the others compare with a token missing in VOCABULARY
            tokens[length // 3] = (tokens[length // 3][0], 1.2)
        if image is not None:
            tokens.insert(length // 2, ({"type": "image", "data": image}, 1.0))
        if "" in self.parts:
            return [tokens]
        prompt = {key: [list(tokens)] for key in self.parts.values()}
        # With a one-row textual inversion, and in sections.
        words = [*tokens[:20], (torch.linspace(-1, 1, 64), 1.1), (9, 1.3)]
        for key in prompt.keys() & {"l", "g"}:
            prompt[key] = [[(49406, 1.0), *words, *[(49407, 1.0)] * 54]] * (1 + length // 60)
        return prompt


def _shapes(network):
    """Yield key and shape for each tensor in a file. Some layers get a weight when loading."""
    for key, tensor in network.state_dict().items():
        yield key, tuple(tensor.shape)
    for name, layer in network.named_modules():
        if getattr(layer, "weight", ()) is None:
            shape = getattr(layer, "_orig_shape", (layer.out_features, layer.in_features))
            yield f"{name}.weight", shape


def _llama(
    kind, name, detected, marks, *, sees=False,
    renames = (), **config,
):  # fmt: skip
    return Encoder(
        kind=kind, parts={name: name}, config={name: {**LLAMA, **config}}, detected=detected,
        marks=(marks,), sees=sees, renames=renames,
    )  # fmt: skip


LAYER = "model.layers.0."
FEED = f"{LAYER}post_feedforward_layernorm.weight"
CLIP = {**VISION, "num_hidden_layers": 3, "num_attention_heads": 2}
MARK_OF_CLIP_L = {"text_model.encoder.layers.0.mlp.fc1.weight": (96, 64)}
MARK_OF_CLIP_G = {"text_model.encoder.layers.30.mlp.fc1.weight": (96, 64)}
MARK_OF_LLAMA = {f"{LAYER}post_attention_layernorm.weight": (64,)}
QWEN_3_VL = (("model.", "model.language_model."), ("visual.", "model.visual."))


def _t5(kind, name, **config):
    return Encoder(
        kind=kind, parts={name: name}, config={name: {**T5, **config}}, detected="T5_XXL",
        marks=(MARK_OF_T5,),
    )  # fmt: skip


def _qwen_3_vl(layers):
    marks = {
        "model.visual.deepstack_merger_list.0.norm.weight": (256,),
        "model.visual.merger.linear_fc2.weight": (2560, 256),
    }
    config = {"num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": 1}
    return _llama(
        "krea2", "qwen3vl_4b", "QWEN3VL_4B", marks, sees=True, renames=QWEN_3_VL, **config
    )


def _gemma_2(**config):
    marks = {FEED: (64,)}
    return _llama("lumina2", "gemma2_2b", "GEMMA_2_2B", marks, hidden_size=64, **config)


def _gemma_3(layers, width=64):
    marks = {
        FEED: (width,),
        "model.layers.47.self_attn.q_norm.weight": (256,),
        "model.layers.5.self_attn.v_proj.weight": (1024, width),
    }
    config = {"num_hidden_layers": layers, "hidden_size": width}
    return _llama("ltxv", "", "GEMMA_3_12B", marks, sees=True, **config)


def _gemma_4(detected, last, **config):
    marks = {FEED: (64,), f"model.layers.{last}.self_attn.q_norm.weight": (256,)}
    config |= {"hidden_size": 64, "num_hidden_layers": 9, "num_key_value_heads": 2}
    return _llama("stable_diffusion", "gemma4", detected, marks, sees=True, **config)


def _ltx_2():
    gemma = _gemma_4("GEMMA_4_E4B", 41)
    start = "text_embedding_projection.aggregate_embed."
    return replace(
        gemma,
        kind="ltxv",
        parts={"gemma3_12b": "gemma4", "text_embedding_projection": "gemma4"},
        config={"": gemma.config["gemma4"]},
        marks=(*gemma.marks, {f"{start}weight": (3840, 640)}),
        renames=(("weight", f"{start}weight"), ("bias", f"{start}bias")),
    )


GPT_OSS = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
CLIP_L_AND_LLAMA = {"clip_l": CLIP, "llama": {**LLAMA, "hidden_size": 64}}
CANDIDATES = {
    "umt5": _t5("wan", "umt5xxl"),
    "umt5, 24 layers": _t5("wan", "umt5xxl", num_layers=24),
    "t5": _t5("mochi", "t5xxl"),
    "clip-l and t5": Encoder(kind="flux", parts={"clip_l": "l", "t5xxl": "t5xxl"},
        config={"clip_l": CLIP, "t5xxl": T5}, detected="T5_XXL",
        marks=(MARK_OF_CLIP_L, MARK_OF_T5)),
    "clip-l and llama": Encoder(kind="hunyuan_video", parts={"clip_l": "l", "llama": "llama"},
        config=CLIP_L_AND_LLAMA, detected="LLAMA3_8", marks=(MARK_OF_CLIP_L, MARK_OF_LLAMA)),
    "clip-l, clip-g and t5": Encoder(kind="sd3",
        parts={"clip_l": "l", "clip_g": "g", "t5xxl": "t5xxl"},
        config={"clip_l": CLIP, "clip_g": CLIP, "t5xxl": {**T5, "d_model": 4096}},
        detected="T5_XXL", marks=(MARK_OF_CLIP_L, MARK_OF_CLIP_G, MARK_OF_T5)),
    "clip-l, clip-g, t5 and llama": Encoder(kind="hidream",
        parts={"clip_l": "l", "clip_g": "g", "t5xxl": "t5xxl", "llama": "llama"},
        config={**CLIP_L_AND_LLAMA, "clip_g": CLIP, "t5xxl": T5}, detected="LLAMA3_8",
        marks=(MARK_OF_CLIP_L, MARK_OF_CLIP_G, MARK_OF_T5, MARK_OF_LLAMA)),
    "qwen2.5-vl": _llama("qwen_image", "qwen25_7b", "QWEN25_7B",
        {f"{LAYER}self_attn.k_proj.bias": (512,)}, sees=True, hidden_size=64),
    "qwen3": _llama("lumina2", "qwen3_4b", "QWEN3_4B",
        {f"{LAYER}post_attention_layernorm.weight": (2560,),
        f"{LAYER}self_attn.q_norm.weight": (128,)}),
    "qwen3-vl": _qwen_3_vl(layers=5),
    "qwen3-vl, 36 layers": _qwen_3_vl(layers=36),
    "gemma2": _gemma_2(),
    "gemma2 with a head": _gemma_2(lm_head=True),
    "gemma3": _gemma_3(layers=6),
    "gemma3, 48 layers": _gemma_3(layers=48),
    "gemma4": _gemma_4("GEMMA_4_E4B", 41, hidden_size_per_layer_input=16, num_kv_shared_layers=2),
    "gemma4 and projection": _ltx_2(),
    "gemma4 without vision layers": _gemma_4("GEMMA_4_12B", 47),
    "t5-gemma": Encoder(kind="stable_audio", parts={"t5gemma": "t5gemma"}, config={},
        detected="T5_GEMMA",
        marks=({"model.encoder.layers.0.pre_self_attn_layernorm.weight": (64,)},)),
    "gpt-oss": Encoder(kind="lens", parts={"gpt_oss": "gpt_oss"}, config={},
        settings={"gpt_oss_config": GPT_OSS, "selected_layers": (1, 3), "txt_offset": 7},
        detected="GPT_OSS_20B", marks=({"layers.0.self_attn.sinks": (4,),
        "layers.0.mlp.experts.gate_up_proj.weight": (4, 128, 64)},),),
}  # fmt: skip
ENCODERS = {name: each for name, each in CANDIDATES.items() if each.have}
