"""Runs in ComfyUI's own Python: common forms of native model files, streamed.

`answers(folder)` returns "equal", a difference or a refusal for each case. `test_native_files.py`
checks them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from installed_pack import load_pack
from native_families import FAMILIES, Family, native, results_of, sample
from native_format_cases import packed_type, streamed, write_gguf
from safetensors.torch import save_file

load_pack()
from wanstream.offload.formats import CheckpointFileError, decode_tensor, read_gguf_header  # noqa: E402
from wanstream.offload.sources import read_tensors  # noqa: E402

try:
    from comfy.quant_ops import QUANT_ALGOS
except ImportError:  # ComfyUI 0.3.64
    QUANT_ALGOS = {}

Tensors = dict[str, torch.Tensor]
FAMILY = FAMILIES["wan_t2v"]
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

FORMATS = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", INT8: "int8_tensorwise"}

WRONG = ("float8_e4m3fn", "nvfp4")
"""Formats in broken files' markers."""

PREFIXES = (
    *(
        "diffusion_model.",
        "transformer.",
        "video_model.",
        "unet.",
        "_orig_mod.",
        "module._orig_mod.",
        "pipe.dit.",
    ),
    *("model.", "net.", "model.model.", "model.diffusion_model.", "module.model.diffusion_model."),
)
OTHERS = (
    "vae.decoder.up_blocks.0.conv.weight",
    "text_encoders.umt5xxl.layers.0.ffn.weight",
    "first_stage_model.a",
)

Q = "blocks.0.self_attn.q"
MARKERS: dict[str, bytes] = {
    "string": b'"float8_e4m3fn"', "bare": b"float8_e4m3fn", "NUL": b'{"format": "float8_e4m3fn"}\0',
    "no JSON": b"{", "null": b"null", "list": b'["float8_e4m3fn"]', "number": b"8", "empty": b"",
    "no format": b"{}", "list as format": b'{"format": ["float8_e4m3fn"]}',
    "dict as format": b'{"format": {}}',
    "unknown": b'{"format": "int2"}',
}  # fmt: skip
HEADERS: dict[str, Any] = {
    "strings": "float8_e4m3fn", "null as layer": None,
    "list as layer": ["float8_e4m3fn"], "number as layer": 8,
    "no format in header": {}, "list as format in header": {"format": ["float8_e4m3fn"]},
}  # fmt: skip
TEXTS = {
    "no layers": "{}",
    "list at top": "[]",
    "layers as list": '{"layers": ["a"]}',
    "no JSON in header": "{",
}

SCALED: dict[str, tuple[torch.dtype, torch.dtype, str, str]] = {
    "one": (E4M3, FP32, "[]", "weight_scale"),
    "one bf16": (E4M3, BF16, "[1]", "weight_scale"),
    "one scale_weight": (E4M3, FP32, "[1]", "scale_weight"),
    "one e5m2 fp64": (E5M2, FP64, "[]", "scale_weight"),
    "rows": (E4M3, FP32, "[out, 1]", "weight_scale"),
    "rows bf16": (E4M3, BF16, "[out, 1]", "weight_scale"),
    "rows vector fp16": (E4M3, FP16, "[out]", "scale_weight"),
    "int8 rows": (INT8, FP32, "[out, 1]", "weight_scale"),
    "int8 rows bf16": (INT8, BF16, "[out, 1]", "weight_scale"),
    "int8 one": (INT8, FP32, "[1]", "weight_scale"),
    "blocks": (E4M3, BF16, "[out, n, 1]", "scale_weight"),
    "int8 blocks": (INT8, FP32, "[out, n, 1]", "weight_scale"),
}
"""Weight and scale dtype, scale shape and scale key, without a marker."""


def weights(family: Family = FAMILY) -> Tensors:
    return {family.key(name): tensor for name, tensor in family.weights().items()}


def run(model: Any, family: Family = FAMILY) -> torch.Tensor:
    result = sample(model, family, steps=1, cfg=1.0)
    comfy.model_management.unload_all_models()
    return result


def shown(path: Path, expected: torch.Tensor, family: Family = FAMILY) -> str:
    """Return "equal", a difference, or the streamed loader's refusal."""
    try:
        result = run(streamed(path, family), family)
    except CheckpointFileError as err:
        return f"refused: {err}"
    return (
        "equal"
        if torch.equal(result, expected)
        else f"differs by {float((result - expected).abs().max())}"
    )


def prefixed(folder: Path, prefix: str, layout: str, family: Family = FAMILY) -> str:
    """A file under a prefix, next to the bare file loaded by ComfyUI."""
    bare, path = folder / "bare.safetensors", folder / "prefixed.safetensors"
    stored = {key: tensor.half() for key, tensor in weights(family).items()}
    if layout == "scaled_fp8":
        for key in [
            key for key, tensor in stored.items() if key.startswith("blocks.") and tensor.ndim == 2
        ]:
            scale = stored[key].float().abs().amax() / 400
            layer = key.removesuffix(".weight")
            stored |= {key: (stored[key] / scale).to(E4M3), f"{layer}.scale_weight": scale}
        stored["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
    save_file(stored, bare, family.metadata)
    others = {key: torch.zeros(4, 4) for key in OTHERS} if layout == "whole checkpoint" else {}
    save_file(
        {prefix + key: tensor for key, tensor in stored.items()} | others, path, family.metadata
    )
    return shown(path, run(native(bare, family), family), family)


def two_models(folder: Path) -> str:
    path = folder / "two.safetensors"
    save_file(
        {p + key: each.half() for key, each in weights().items() for p in ("high.", "low.")}, path
    )
    return shown(path, torch.zeros(1))


def part(folder: Path) -> str:
    path = folder / "part.safetensors"
    save_file(
        {f"net.{key}": each.half() for key, each in weights().items() if "blocks." in key}, path
    )
    return shown(path, torch.zeros(1))


def quantised(
    dtype: torch.dtype, scale_dtype: torch.dtype, shape: str, key: str
) -> tuple[Tensors, Tensors]:
    """Return a file with quantised block matrices, and the file with their values."""
    values = {key: tensor.bfloat16() for key, tensor in weights().items()}
    stored = dict(values)
    for name, tensor in weights().items():
        if not (name.startswith("blocks.") and tensor.ndim == 2):
            continue
        rows = len(tensor) if "out" in shape else 1
        parts = tensor.view(rows, tensor.shape[1] // 64 if "n" in shape else 1, -1)
        scale = (parts.abs().amax(dim=2, keepdim=True) / (127 if dtype == INT8 else 400)).to(
            scale_dtype
        )
        codes = parts / scale.float()
        stored[name] = (codes.round() if dtype == INT8 else codes).to(dtype).view(tensor.shape)
        values[name] = (stored[name].float().view(parts.shape) * scale.float()).view(tensor.shape)
        sizes = {"out": rows, "n": parts.shape[1]}
        sized = [sizes.get(size) or int(size) for size in shape.strip("[]").split(", ") if size]
        stored[f"{name.removesuffix('.weight')}.{key}"] = scale.reshape(sized)
    return stored, values


def marked(stored: Tensors) -> Tensors:
    """Return a file in ComfyUI's layout: a marker for each layer, and scales in fp32."""
    result = {}
    for key, tensor in stored.items():
        layer, _, last = key.rpartition(".")
        sized = tensor.float() if tensor.numel() == 1 else tensor.float().reshape(len(tensor), -1)
        result[f"{layer}.weight_scale" if "scale" in last else key] = (
            sized if "scale" in last else tensor
        )
        if "scale" in last:
            name = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", INT8: "int8_tensorwise"}[
                stored[f"{layer}.weight"].dtype
            ]
            result[f"{layer}.comfy_quant"] = torch.tensor(
                list(json.dumps({"format": name}).encode()), dtype=torch.uint8
            )
    return result


def unmarked(folder: Path, name: str) -> dict[str, str]:
    """A file without markers, next to a file with the values and a marked file.

    The marked file is compared only where ComfyUI has the format.
    """
    path, reference = folder / "unmarked.safetensors", folder / "reference.safetensors"
    stored, values = quantised(*SCALED[name])
    save_file(stored, path)
    save_file(values, reference)
    found = {"values": shown(path, run(native(reference, FAMILY)))}
    if (
        QUANT_ALGOS
        and "blocks" not in name
        and (SCALED[name][0] != INT8 or "int8_tensorwise" in QUANT_ALGOS)
    ):
        save_file(marked(stored), reference)
        found["marked"] = shown(path, run(native(reference, FAMILY)))
    return found


def wide_scales(folder: Path, dtype: torch.dtype, layout: str) -> str:
    """Marked scales in another dtype, next to the same values in fp32."""
    path, reference = folder / "wide.safetensors", folder / "reference.safetensors"
    stored, _ = quantised(E4M3, dtype, "[]", "scale_weight")
    if layout == "scaled_fp8":
        stored["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
        same = {
            key: each.float() if key.endswith(".scale_weight") else each
            for key, each in stored.items()
        }
    else:
        same = marked(stored)
        stored = {
            key: each.to(dtype) if key.endswith(".weight_scale") else each
            for key, each in same.items()
        }
    save_file(stored, path)
    save_file(same, reference)
    return shown(path, run(native(reference, FAMILY)))


def with_marker(folder: Path, text: bytes | None, metadata: Mapping[str, str]) -> str:
    """One quantised layer with the marker `text`, or in the header, next to the good file."""
    path, reference = folder / "marker.safetensors", folder / "reference.safetensors"
    stored, _ = quantised(E4M3, FP32, "[]", "weight_scale")
    plain = {key: tensor.bfloat16() for key, tensor in weights().items()}
    stored = plain | {key: each for key, each in stored.items() if key.startswith(Q)}
    save_file(marked(stored), reference)
    more = {} if text is None else {f"{Q}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}
    save_file(stored | more, path, dict(metadata))
    return shown(path, run(native(reference, FAMILY)))


def refused(folder: Path, more: Tensors, without: str = "") -> str:
    path = folder / "refused.safetensors"
    stored, _ = quantised(E4M3, FP32, "[]", "weight_scale")
    save_file({key: each for key, each in (stored | more).items() if key != without}, path)
    return shown(path, torch.zeros(1))


GGUF_SHAPES: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "good": lambda name, each: each.flatten(0, 1) if name == "patch_embedding.weight" else each,
    "block modulation": lambda name, each: (
        each[0] if name.endswith(".modulation") and "blocks" in name else each
    ),
    "one modulation": lambda name, each: each[0] if name == "blocks.2.modulation" else each,
    "head modulation": lambda name, each: each[0] if name == "head.modulation" else each,
    "patches folded": lambda name, each: (
        each.reshape(-1, 1, 2, 2) if name == "patch_embedding.weight" else each
    ),
    "patches as a matrix": lambda name, each: (
        each.flatten(1) if name == "patch_embedding.weight" else each
    ),
    "patches flat": lambda name, each: each.flatten() if name == "patch_embedding.weight" else each,
    "all": lambda name, each: (
        each.squeeze().flatten(0, 1) if "patch_embedding.w" in name else each.squeeze()
    ),
}


def gguf(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> str:
    path, decoded = folder / "shapes.gguf", folder / "decoded.safetensors"
    original = weights()
    write_gguf(
        path,
        {key: change(key, each).contiguous() for key, each in original.items()},
        packed_type,
        "wan",
    )
    plain = {}
    for key, place in read_gguf_header(path).tensors.items():
        plain[key] = torch.empty(place.shape)
        decode_tensor(read_tensors({key: place})[key], plain[key], packing=place.packing)
        plain[key] = plain[key].view(original[key].shape)
    save_file(plain, decoded)
    return shown(path, run(native(decoded, FAMILY)))


def answers(folder: str) -> dict[str, Any]:
    """Return each case's result or traceback."""
    torch.set_num_threads(1)
    at = Path(folder)
    cases: dict[str, Callable[[], Any]] = {
        **{f"prefix {prefix}": partial(prefixed, at, prefix, "plain") for prefix in PREFIXES},
        **{
            f"fp8 {prefix}": partial(prefixed, at, prefix, "scaled_fp8")
            for prefix in ("transformer.", "model.")
        },
        "flux transformer.": partial(prefixed, at, "transformer.", "plain", FAMILIES["flux"]),
        "whole checkpoint": partial(prefixed, at, "diffusion_model.", "whole checkpoint"),
        "two models": partial(two_models, at),
        "part": partial(part, at),
        **{f"unmarked {name}": partial(unmarked, at, name) for name in SCALED},
        **{
            f"{name} {dtype}": partial(wide_scales, at, dtype, name)
            for name in ("scaled_fp8",)
            for dtype in (BF16, FP16)
        },
        **{f"gguf {name}": partial(gguf, at, change) for name, change in GGUF_SHAPES.items()},
        "uint8 scales": partial(
            refused, at, {f"{Q}.weight_scale": torch.zeros(128, 4, dtype=torch.uint8)}
        ),
        "no weight": partial(refused, at, {}, f"{Q}.weight"),
        "two scales": partial(refused, at, {f"{Q}.scale_weight": torch.ones(1)}),
        "quanto": partial(refused, at, {f"{Q}.weight._data": torch.ones(1)}),
        "one without a scale": partial(refused, at, {}, f"{Q}.weight_scale"),
        "other spelling": partial(refused, at, {f"{Q}.scale": torch.ones(1)}, f"{Q}.weight_scale"),
    }
    if QUANT_ALGOS:
        e4m3, nvfp4 = (
            torch.tensor(list(f'{{"format": "{name}"}}'.encode()), dtype=torch.uint8)
            for name in WRONG
        )
        cases |= {
            "marked bf16": partial(
                refused, at, {f"{Q}.comfy_quant": e4m3, f"{Q}.weight": torch.ones(128, 128)}
            ),
            "marked without a scale": partial(
                refused, at, {f"{Q}.comfy_quant": e4m3}, f"{Q}.weight_scale"
            ),
            "marked without a weight": partial(
                refused, at, {f"{Q}.comfy_quant": e4m3}, f"{Q}.weight"
            ),
            "nvfp4 without scales": partial(refused, at, {f"{Q}.comfy_quant": nvfp4}),
        }
        cases |= {
            f"comfy_quant {dtype}": partial(wide_scales, at, dtype, "comfy_quant")
            for dtype in (BF16, FP16, FP64)
        }
        cases |= {
            f"marker {name}": partial(with_marker, at, text, {}) for name, text in MARKERS.items()
        }
        headers = {
            name: json.dumps({"layers": {Q: settings}}) for name, settings in HEADERS.items()
        } | TEXTS
        cases |= {
            f"marker {name}": partial(with_marker, at, None, {"_quantization_metadata": text})
            for name, text in headers.items()
        }
    return {"formats": list(QUANT_ALGOS)} | results_of(cases, unload=True)
