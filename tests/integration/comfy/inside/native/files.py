"""Runs in ComfyUI's own Python: common forms of native model files, streamed or refused by name.

Streamed files have the same values as the usual form, loaded by ComfyUI.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from wanstream.offload.formats import CheckpointFileError
from wanstream.tests.support.wan.quantised_files import Form

from ..checks import for_each, refused, require
from ..families import Family, native, quant_marker, sample, write_scaled_fp8
from ..tiny_models import FLUX, WAN
from .formats import MARKS, QUANT_ALGOS, decode, packed_type, streamed, write_gguf

Tensors = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
INT8 = torch.int8
FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
FP64 = torch.float64
FORMATS = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", INT8: "int8_tensorwise"}
OTHERS = (
    "vae.decoder.up_blocks.0.conv.weight",
    "text_encoders.umt5xxl.layers.0.ffn.weight",
    "first_stage_model.a",
)
Q = "blocks.0.self_attn.q"
MARKERS: dict[bytes | str, str] = {
    b"{": "q.comfy_quant is not JSON",
    b'{"format": "int2"}': f"layer {Q} is quantised as int2, which this ComfyUI does not have",
    "{}": "_quantization_metadata has no layers",
}
"""Broken markers of a layer, in a tensor (bytes) or in the header, and the message. The unit tests
of experts have more, which are refused by the same code."""

SCALED = {
    "one": Form(shape="[]"),
    "one e5m2 fp64": Form(dtype=E5M2, scale=FP64, shape="[]", key="scale_weight"),
    "rows": Form(),
    "rows vector fp16": Form(scale=FP16, shape="[out]", key="scale_weight"),
    "int8 rows bf16": Form(dtype=INT8, scale=BF16),
    "int8 one": Form(dtype=INT8, shape="[1]"),
    "blocks": Form(scale=BF16, shape="[out, n, 1]", key="scale_weight"),
    "int8 blocks": Form(dtype=INT8, shape="[out, n, 1]"),
}
"""Scales without a marker."""


def run(model: Any, family: Family = WAN) -> torch.Tensor:
    return sample(model, family, steps=1, cfg=1.0)


def same(path: Path, reference: Path, family: Family = WAN) -> bool:
    """Return True if the streamed file has the result of ComfyUI's own run of the other one."""
    return torch.equal(run(streamed(path, family), family), run(native(reference, family), family))


def refusal(path: Path, *words: str) -> None:
    """Check the message for a file, which names it."""
    refused(lambda: run(streamed(path, WAN)), path.name, *words, kind=CheckpointFileError)


@for_each(
    *(
        (prefix, "plain")
        for prefix in (
            "diffusion_model.", "transformer.", "_orig_mod.", "module._orig_mod.", "pipe.dit.",
            "model.", "model.diffusion_model.", "module.model.diffusion_model.",
        )
    ),
    ("transformer.", "scaled_fp8"), ("model.", "scaled_fp8"), ("transformer.", "flux"),
    ("diffusion_model.", "whole checkpoint"),
)  # fmt: skip
def check_prefix(folder, prefix, layout):
    """A file under a prefix, next to the bare file loaded by ComfyUI."""
    bare = folder / "bare.safetensors"
    path = folder / "prefixed.safetensors"
    family = FLUX if layout == "flux" else WAN
    if layout == "scaled_fp8":
        write_scaled_fp8(family, bare, layout=layout)
    else:
        family.write(bare, "fp16")
    others = {key: torch.zeros(4, 4) for key in OTHERS} if layout == "whole checkpoint" else {}
    prefixed = {prefix + key: tensor for key, tensor in load_file(bare).items()}
    save_file(prefixed | others, path, family.metadata)
    assert same(path, bare, family)


def check_two_models_in_a_file_and_a_part_of_one_are_refused(folder):
    path = folder / "two.safetensors"
    stored = {key: each.half() for key, each in WAN.weights().items()}
    both = {p + key: each.clone() for key, each in stored.items() for p in ("high.", "low.")}
    save_file(both, path)
    refusal(path, "holds 2 diffusion models, under the prefixes 'high.' and 'low.'")
    path = folder / "part.safetensors"
    save_file({f"net.{key}": each for key, each in stored.items() if "blocks." in key}, path)
    refusal(path, "not a diffusion model that this ComfyUI detects", "blocks.0.")


def quantised(form: Form) -> tuple[Tensors, Tensors]:
    """Return a file with quantised block matrices, and the file with their values."""
    values = {key: tensor.bfloat16() for key, tensor in WAN.weights().items()}
    stored = dict(values)
    for name, tensor in WAN.weights().items():
        if name.startswith("blocks.") and tensor.ndim == 2:
            stored[name], scale, values[name] = form.quantise(tensor)
            stored[f"{name.removesuffix('.weight')}.{form.key}"] = scale
    return stored, values


def marked(stored: Tensors) -> Tensors:
    """Return a file in ComfyUI's layout: a marker for each layer, and scales in fp32."""
    result = {}
    for key, tensor in stored.items():
        layer, _, last = key.rpartition(".")
        if "scale" not in last:
            result[key] = tensor
            continue
        scale = tensor.float()
        result[f"{layer}.weight_scale"] = (
            scale if scale.numel() == 1 else scale.reshape(len(scale), -1)
        )
        name = FORMATS[stored[f"{layer}.weight"].dtype]
        result[f"{layer}.comfy_quant"] = quant_marker(format=name)
    return result


@for_each(*SCALED)
def check_scales_without_a_marker(folder, name):
    """The values of a file without markers are equal, and a marked file, where ComfyUI has it.

    ComfyUI rounds int8 layer inputs, so only the file with markers has equal results there.
    """
    path = folder / "unmarked.safetensors"
    reference = folder / "reference.safetensors"
    is_int8 = SCALED[name].dtype == INT8
    has_marks = QUANT_ALGOS and "blocks" not in name and FORMATS[SCALED[name].dtype] in QUANT_ALGOS
    stored, values = quantised(SCALED[name])
    save_file(stored, path)
    if has_marks:
        save_file(marked(stored), reference)
        assert same(path, reference)
    if not (has_marks and is_int8):
        save_file(values, reference)
        assert same(path, reference)


@for_each(
    (BF16, "scaled_fp8"), (FP16, "scaled_fp8"), (BF16, "comfy_quant"), (FP16, "comfy_quant"),
    (FP64, "comfy_quant"),
)  # fmt: skip
def check_marked_scales_in_another_dtype(folder, dtype, layout):
    """Next to the same values in fp32."""
    require(QUANT_ALGOS or layout == "scaled_fp8", MARKS)
    path = folder / "wide.safetensors"
    reference = folder / "reference.safetensors"
    stored, _ = quantised(Form(scale=dtype, shape="[]", key="scale_weight"))
    stored = marked(stored) if layout == "comfy_quant" else stored

    def with_scales(dtype: torch.dtype) -> Tensors:
        mark = {"scaled_fp8": torch.zeros(2, dtype=E4M3)} if layout == "scaled_fp8" else {}
        return mark | {
            key: each.to(dtype) if key.endswith((".weight_scale", ".scale_weight")) else each
            for key, each in stored.items()
        }

    save_file(with_scales(dtype), path)
    save_file(with_scales(FP32), reference)
    assert same(path, reference)


def save_with_marker(
    folder: Path, text: bytes | None, metadata: Mapping[str, str]
) -> tuple[Path, Path]:
    """Save one quantised layer with the marker `text`, or in the header, next to the good file."""
    require(QUANT_ALGOS, MARKS)
    path = folder / "marker.safetensors"
    reference = folder / "reference.safetensors"
    stored, _ = quantised(SCALED["one"])
    plain = {key: tensor.bfloat16() for key, tensor in WAN.weights().items()}
    stored = plain | {key: each for key, each in stored.items() if key.startswith(Q)}
    save_file(marked(stored), reference)
    more = {} if text is None else {f"{Q}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}
    save_file(stored | more, path, dict(metadata))
    return path, reference


def check_markers_in_other_spellings(folder):
    assert same(*save_with_marker(folder, b"float8_e4m3fn", {}))
    strings = json.dumps({"layers": {Q: "float8_e4m3fn"}})
    assert same(*save_with_marker(folder, None, {"_quantization_metadata": strings}))


@for_each(*MARKERS)
def check_broken_markers_are_refused(folder, text):
    header = {} if isinstance(text, bytes) else {"_quantization_metadata": text}
    path, _ = save_with_marker(folder, None if header else text, header)
    refusal(path, MARKERS[text])


def refuse_with(folder: Path, more: Tensors, words: str, without: str = "") -> None:
    path = folder / "refused.safetensors"
    stored, _ = quantised(SCALED["one"])
    save_file({key: each for key, each in (stored | more).items() if key != without}, path)
    refusal(path, words)


def check_layers_with_two_scales_or_without_a_part_are_refused(folder):
    refuse_with(folder, {f"{Q}.scale_weight": torch.ones(1)}, f"{Q} has two scales")
    require(QUANT_ALGOS, MARKS)
    fp8, nvfp4 = (
        {f"{Q}.comfy_quant": quant_marker(format=name)} for name in ("float8_e4m3fn", "nvfp4")
    )
    plain = {f"{Q}.weight": torch.ones(128, 128)}
    start = f"marked as float8_e4m3fn, but {Q}"
    refuse_with(folder, fp8 | plain, f"{start}.weight is torch.float32")
    for part in ("weight_scale", "weight"):
        refuse_with(folder, fp8, f"{start}.{part} is missing", f"{Q}.{part}")
    refuse_with(folder, nvfp4, f"marked as nvfp4, but {Q}.weight_scale_2 is missing")


PATCHES = "patch_embedding.weight"
GGUF_SHAPES: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "usual": lambda name, each: each.flatten(0, 1) if name == PATCHES else each,
    "block modulation": lambda name, each: (
        each[0] if name.endswith(".modulation") and "blocks" in name else each
    ),
    "one modulation": lambda name, each: each[0] if name == "blocks.2.modulation" else each,
    "head modulation": lambda name, each: each[0] if name == "head.modulation" else each,
    "folded patches": lambda name, each: each.reshape(-1, 1, 2, 2) if name == PATCHES else each,
    "patches as a matrix": lambda name, each: each.flatten(1) if name == PATCHES else each,
    "flat patches": lambda name, each: each.flatten() if name == PATCHES else each,
    "all": lambda name, each: (
        each.squeeze().flatten(0, 1) if "patch_embedding.w" in name else each.squeeze()
    ),
}


@for_each(*GGUF_SHAPES)
def check_gguf_with_other_shapes(folder, name):
    path = folder / "shapes.gguf"
    decoded = folder / "decoded.safetensors"
    original = WAN.weights()
    changed = {key: GGUF_SHAPES[name](key, each).contiguous() for key, each in original.items()}
    write_gguf(path, changed, packed_type, "wan")
    decode(path, decoded, original)
    assert same(path, decoded)
