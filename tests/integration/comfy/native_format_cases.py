"""Runs in ComfyUI's Python: native files in every number format, streamed and loaded by ComfyUI.

`answers(folder)` returns one JSON value per case. `test_native_formats.py` checks the values.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import numpy as np
import torch
from installed_pack import load_pack
from native_families import (
    FAMILIES,
    SCALED_LAYOUTS,
    Family,
    given_configuration,
    load_lora,
    native,
    results_of,
    sample,
    write_lora,
    write_scaled_fp8,
)
from safetensors.torch import load_file, save_file

load_pack()
from native_loading import load_native  # noqa: E402

from wanstream.host.comfy.native.network.build import check_native  # noqa: E402
from wanstream.offload.formats import CheckpointFileError, decode_tensor, read_gguf_header  # noqa: E402
from wanstream.offload.sources import read_tensors  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

try:
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
except ImportError:  # ComfyUI 0.3.64
    QUANT_ALGOS = {}

PATCHED_FORMATS = ("float8_e4m3fn", "by row", "nvfp4", "mxfp8", "int8_tensorwise")
MARKED_LAYERS = [
    "opening nvfp4", "saved", "mixed wan_t2v all",
    *(f"quantised patches {kind}" for kind in PATCHED_FORMATS),
    *(
        f"scaled {name} {layout}"
        for name in ("wan_t2v", "flux")
        for layout in ("comfy_quant", "metadata")
    ),
    *(
        f"mixed {name} {kind}"
        for name in ("wan_t2v", "flux")
        for kind in ("float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8")
    ),
]  # fmt: skip
"""Cases ComfyUI 0.3.64 cannot run."""

LIMITS = {"smallest_block": 50_000, "smallest_model": 1000}
LAYERWISE = OffloadPolicy.layerwise(1)


@torch.inference_mode()
def streamed(
    path: Path,
    family: Family,
    weight_dtype: str = "default",
    policy: OffloadPolicy = LAYERWISE,
    **limits: int,
) -> Any:
    with given_configuration(family):
        return load_native(path, weight_dtype, policy, **{**LIMITS, **limits})


def buffer_bytes(model: Any) -> int:
    return model.weights.device_bytes(LAYERWISE) - model.weights.device_bytes(
        OffloadPolicy.layerwise(0)
    )


def compare(
    path: Path, family: Family, reference: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Return how two streamed runs of a file compare with a native run of it or `reference`."""
    expected = sample(native(reference or path, family), family)
    found: dict[str, Any] = {"finite": bool(expected.isfinite().all()), "equal": []}
    for policy in (LAYERWISE, OffloadPolicy.block_swap(2)):
        model = streamed(path, family, policy=policy, **options)
        for _ in range(2):
            found["equal"].append(torch.equal(sample(model, family), expected))
        found["buffer"] = buffer_bytes(model)
        comfy.model_management.unload_all_models()
    return found


def scaled(folder: Path, name: str, layout: str) -> dict[str, Any]:
    path = folder / "scaled.safetensors"
    write_scaled_fp8(FAMILIES[name], path, layout=layout)
    return compare(path, FAMILIES[name])


def write_mixed(family: Family, path: Path, format_of: Callable[[int], str | None]) -> None:
    """Write a file with block matrix number n quantised as `format_of(n)`."""
    stored, number = {}, 0
    for name, tensor in family.weights().items():
        key, layer = family.key(name), family.key(name).removesuffix(".weight")
        chosen = None
        if family.is_in_block(name) and name.endswith(".weight") and tensor.ndim == 2:
            chosen, number = format_of(number), number + 1
        if chosen is None:
            stored[key] = tensor.to(torch.bfloat16)
            continue
        options = {} if chosen == "mxfp8" else {"scale": "recalculate"}
        weight = QuantizedTensor.from_float(
            tensor, QUANT_ALGOS[chosen]["comfy_tensor_layout"], **options
        )
        for ending, inner in weight.state_dict("weight").items():
            plain = (
                inner.element_size() > 1 or inner.is_floating_point() or inner.dtype == torch.int8
            )
            stored[f"{layer}.{ending}"] = inner if plain else inner.view(torch.uint8)
        stored[f"{layer}.comfy_quant"] = torch.tensor(
            list(json.dumps({"format": chosen}).encode()), dtype=torch.uint8
        )
    save_file(stored, path, metadata=family.metadata)


def mixed(folder: Path, name: str, formats: tuple[str | None, ...]) -> dict[str, Any]:
    path = folder / "mixed.safetensors"
    try:
        write_mixed(FAMILIES[name], path, lambda number: formats[number % len(formats)])
    except NotImplementedError as err:  # no CPU kernel for this format
        return {"skip_reason": str(err)}
    return compare(path, FAMILIES[name])


def saved(folder: Path) -> dict[str, Any]:
    """Streamed quantised layers, saved, and loaded again by ComfyUI."""
    path, again, family = (
        folder / "quantised.safetensors",
        folder / "again.safetensors",
        FAMILIES["wan_t2v"],
    )
    write_mixed(family, path, lambda number: ("nvfp4", "float8_e4m3fn", None)[number % 3])
    expected, model = sample(native(path, family), family), streamed(path, family)
    with torch.inference_mode():
        comfy.sd.save_checkpoint(str(again), model)
    stored, written = load_file(path), load_file(again)
    found = {
        "layers": sum(key.endswith(".comfy_quant") for key in stored),
        "kept": sum(
            torch.equal(written["model.diffusion_model." + key], stored[key])
            for key in quantised_keys(stored)
        ),
        "quantised": len(quantised_keys(stored)),
        "equal": torch.equal(sample(native(again, family), family), expected),
    }
    lora = folder / "lora.safetensors"
    write_lora("lora", lora, {key: tuple(tensor.shape) for key, tensor in family.weights().items()})
    with torch.inference_mode():
        try:
            comfy.sd.save_checkpoint(str(again), load_lora(model, lora))
        except ValueError as err:
            found["with a LoRA"] = str(err)
    return found


def quantised_patches(folder: Path, quantised: str) -> dict[str, Any]:
    """A LoRA on quantised layers, streamed and loaded by ComfyUI, and their products."""
    path, family = folder / f"{quantised}.safetensors", FAMILIES["wan_t2v"]
    lora = folder / "lora.safetensors"
    write_lora("lora", lora, {key: tuple(tensor.shape) for key, tensor in family.weights().items()})
    try:
        write_mixed(family, path, lambda _: "float8_e4m3fn" if quantised == "by row" else quantised)
        if quantised == "by row":
            scale_rows(path)
        unpatched = sample(native(path, family), family)
    except NotImplementedError as err:  # no CPU kernel for this format
        return {"skip_reason": str(err)}
    with products() as counts:
        expected = sample(native(path, family, loras=[lora]), family)
        found: dict[str, Any] = {"differ": not torch.equal(unpatched, expected), "equal": []}
        for policy in (LAYERWISE, replace(LAYERWISE, source="pinned"), OffloadPolicy.resident()):
            model = load_lora(streamed(path, family, policy=policy), lora)
            for _ in range(2):
                counts.append(0)
                found["equal"].append(torch.equal(sample(model, family), expected))
    return {**found, "products": counts}


def scale_rows(path: Path) -> None:
    """Give each matrix row a separate scale."""
    stored = load_file(path)
    for key in [key for key in stored if key.endswith(".weight_scale")]:
        rows = stored[key.removesuffix("_scale")].shape[0]
        stored[key] = stored[key].float().view(1, 1).repeat(rows, 1)
    save_file(stored, path)


@contextmanager
def products() -> Iterator[list[int]]:
    """Count products with quantised weights in the last value of the list."""
    counts, linear = [0], torch.nn.functional.linear

    def counting(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        counts[-1] += isinstance(weight, QuantizedTensor)
        return linear(x, weight, *bias)

    with patch.object(torch.nn.functional, "linear", counting):
        yield counts


def quantised_keys(stored: Mapping[str, torch.Tensor]) -> list[str]:
    layers = [key.removesuffix(".comfy_quant") for key in stored if key.endswith(".comfy_quant")]
    return [f"{layer}.weight" for layer in layers] + [f"{layer}.weight_scale" for layer in layers]


def unknown_format(folder: Path) -> str:
    path, family = folder / "unknown.safetensors", FAMILIES["wan_t2v"]
    stored = {family.key(name): tensor for name, tensor in family.weights().items()}
    marker = json.dumps({"format": "int2_mystery"}).encode()
    stored["blocks.1.self_attn.q.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    save_file(stored, path)
    return refusal(path, family)


def refusal(path: Path, family: Family, *, weight_dtype: str = "default", **options: Any) -> str:
    """Return the message for a file that cannot stream.

    "header: " begins a check's message, before the graph runs.
    """
    with given_configuration(family):
        try:
            check_native(path, weight_dtype)
        except CheckpointFileError as err:
            return f"header: {err}"
    try:
        streamed(path, family, weight_dtype=weight_dtype, **options)
    except CheckpointFileError as err:
        return str(err)
    return "opened"


GGUF_TYPES = {"F32": 0, "Q8_0": 8, "Q4_K": 12, "IQ1_S": 19}


def _q8(tensor: torch.Tensor) -> bytes:
    groups = tensor.reshape(-1, 32).numpy()
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(groups / np.maximum(scales.astype(np.float32), 1e-8)).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()


def _q4k(tensor: torch.Tensor) -> bytes:
    """Return random groups with usefully sized values."""
    groups = np.random.default_rng(tensor.numel()).integers(
        0, 256, (tensor.numel() // 256, 144), dtype=np.uint8
    )
    groups[:, :4] = np.array([2e-4, 1.5e-3], dtype=np.float16).view(np.uint8)
    return groups.tobytes()


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    type_of: Callable[[str, torch.Tensor], str],
    architecture: str,
) -> None:
    """Write a GGUF version 3 file."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    field = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    entries, data = b"", b""
    for name, tensor in tensors.items():
        kind = type_of(name, tensor)
        shape = list(reversed(tensor.shape))
        entries += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_TYPES[kind], len(data)
        )
        encoded = {"Q8_0": _q8, "Q4_K": _q4k}.get(kind, lambda each: each.numpy().tobytes())(tensor)
        data += encoded + bytes(-len(encoded) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + field + entries
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def packed_type(name: str, tensor: torch.Tensor) -> str:
    if tensor.ndim != 2 or not name.endswith(".weight") or tensor.shape[1] % 32:
        return "F32"
    return "Q4_K" if tensor.shape[1] % 256 == 0 else "Q8_0"


def gguf(folder: Path, name: str, prefix: str = "") -> dict[str, Any]:
    family, path, decoded = FAMILIES[name], folder / "model.gguf", folder / "decoded.safetensors"
    tensors = {prefix + family.key(key): tensor for key, tensor in family.weights().items()}
    write_gguf(path, tensors, packed_type, "wan")
    plain = {}
    for key, place in read_gguf_header(path).tensors.items():
        plain[key] = torch.empty(place.shape, dtype=torch.float32)
        decode_tensor(read_tensors({key: place})[key], plain[key], packing=place.packing)
    save_file(plain, decoded, metadata=family.metadata)
    return compare(path, family, decoded)


def gguf_patches(folder: Path) -> dict[str, Any]:
    """A LoRA on a packed model, and what packed weights cannot do."""
    family, path, lora = FAMILIES["wan_t2v"], folder / "model.gguf", folder / "lora.safetensors"
    gguf(folder, "wan_t2v")
    write_lora("lora", lora, {key: tuple(tensor.shape) for key, tensor in family.weights().items()})
    expected = sample(native(folder / "decoded.safetensors", family, loras=[lora]), family)
    model = streamed(path, family)
    plain, patched = sample(model, family), sample(load_lora(model, lora), family)
    found: dict[str, Any] = {
        "equal": torch.equal(patched, expected),
        "differ": not torch.equal(patched, plain),
    }
    for name, method in (("saved", model.state_dict_for_saving), ("merged", model.get_key_patches)):
        try:
            method()
        except ValueError as err:
            found[name] = str(err)
    return found


def gguf_refusals(folder: Path) -> dict[str, str]:
    family, path = FAMILIES["wan_t2v"], folder / "other.gguf"
    weights = family.weights()
    write_gguf(path, {"enc.blk.0.attn_q.weight": torch.ones(32, 64)}, packed_type, "t5encoder")
    found = {"text encoder": refusal(path, family)}
    write_gguf(path, weights, lambda *_: "IQ1_S", "wan")
    found["unknown"] = refusal(path, family)
    write_gguf(path, weights, packed_type, "wan")
    found["weight type"] = refusal(path, family, weight_dtype="fp8_e4m3fn")
    return found


def large_parameters(folder: Path) -> dict[str, Any]:
    """Bare [1, 6, dim] modulation parameters in Wan's blocks, as large ones."""
    path, family = folder / "large.safetensors", FAMILIES["wan_t2v"]
    family.write(path, "bf16")
    usual = buffer_bytes(streamed(path, family).model)
    return {**compare(path, family, large_parameter=1000), "usual": usual}


WIDE = {"dim": 1536, "num_heads": 12, "ffn_dim": 8960, "num_layers": 4}


def write_sparse(path: Path, kind: str) -> int:
    """Write a file for a wide Wan model without taking space on the disk.

    Return the bytes in blocks.
    """
    family = FAMILIES["wan_t2v"]
    module, _, name = family.network.rpartition(".")
    settings = {**family.settings, **WIDE}
    operations = comfy.ops.disable_weight_init
    network = getattr(import_module(module), name)(
        **settings, dtype=torch.float16, device="meta", operations=operations
    )
    tensors: dict[str, tuple[str, list[int], int]] = {}
    layers: dict[str, Any] = {}
    for key, tensor in network.state_dict().items():
        layer = key.removesuffix(".weight")
        if kind == "fp16" or not (
            family.is_in_block(key) and key.endswith(".weight") and tensor.ndim == 2
        ):
            tensors[key] = "F16", list(tensor.shape), 2
            continue
        rows, columns = tensor.shape
        layers[layer] = {"format": "nvfp4"}
        tensors[key] = "U8", [rows, columns // 2], 1
        tensors[f"{layer}.weight_scale"] = "F8_E4M3", [rows, columns // 16], 1
        tensors[f"{layer}.weight_scale_2"] = "F32", [], 4
    header, end, in_blocks = {}, 0, 0
    for key, (dtype, shape, itemsize) in tensors.items():
        nbytes = math.prod(shape) * itemsize
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
        in_blocks += nbytes * family.is_in_block(key)
    if layers:
        header["__metadata__"] = {
            "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})
        }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return in_blocks


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def opening(folder: Path, kind: str) -> dict[str, int]:
    path = folder / "wide.safetensors"
    in_blocks = write_sparse(path, kind)
    # Memory freed by earlier cases would hide new allocations.
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()
    model = streamed(path, FAMILIES["wan_t2v"]).model
    grown = anonymous_bytes() - before
    outside = sum(
        tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
    )
    return {
        "in blocks": in_blocks,
        "outside": outside,
        "grown": grown,
        "blocks": len(model.weights.blocks),
    }


def refusals(folder: Path) -> dict[str, str]:
    family, path = FAMILIES["wan_t2v"], folder / "refused.safetensors"
    family.write(path, "fp16")
    found = {
        "threshold": refusal(path, family, smallest_model=2_000_000_000),
        "blocks": refusal(path, family, smallest_block=8_000_000),
    }
    weights = {key: tensor.half() for key, tensor in family.weights().items()}
    weights["blocks.1.ffn.0.weight"] = weights["blocks.1.ffn.0.weight"][:-1].contiguous()
    weights["blocks.1.norm3.weight"] = weights["blocks.1.norm3.weight"][:-1].contiguous()
    save_file(weights, path)
    found["shape"] = refusal(path, family)
    family.write(path, "fp16")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    found["truncated"] = refusal(path, family)
    for name in ("model.pt", "model.ckpt", "model.bin"):
        torch.save({"blocks.0.weight": torch.ones(2)}, folder / name)
        found[name] = refusal(folder / name, family)
    save_file({"something.weight": torch.ones(4, 4)}, path)
    found["no model"] = refusal(path, family)
    found["missing"] = refusal(folder / "missing.safetensors", family)
    return found


def diffusers(folder: Path) -> dict[str, Any]:
    """Flux with diffusers keys: ComfyUI joins the query, key and value matrices."""
    path, family = folder / "diffusers.safetensors", FAMILIES["flux"]
    settings, weights, stored = family.settings, family.weights(), {}
    written = set()
    sizes = {name: settings[name] for name in ("depth", "depth_single_blocks", "hidden_size")}
    for key, target in comfy.utils.flux_to_diffusers(sizes).items():
        name, part, change = (
            (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        )
        name = name if name in weights else name.replace("_norm.weight", "_norm.scale")
        if (
            name in weights
            and (name, part) not in written
            and not key.endswith("to_qkv_mlp_proj.weight")
        ):
            written.add((name, part))
            tensor = weights[name] if part is None else weights[name].narrow(*part)
            stored[key] = (tensor if change is None else change(tensor)).clone()
    save_file(stored, path)
    model = streamed(path, family)
    places = [
        name for name in model.model.stored if name.endswith(("qkv.weight", "linear1.weight"))
    ]
    return {
        **compare(path, family),
        "blocks": len(model.weights.blocks),
        "joined that stream": places,
    }


def without_lists(folder: Path) -> str:
    """Refuse a UNet with SDXL's topology, whose blocks have very different sizes."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    settings = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320,
        "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "num_head_channels": 64,
        "use_spatial_transformer": True, "context_dim": 2048,
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10, "use_linear_in_transformer": True, "adm_in_channels": 2816,
        "num_classes": "sequential", "legacy": False,
    }  # fmt: skip
    network = UNetModel(
        **settings, dtype=torch.float16, device="meta", operations=comfy.ops.disable_weight_init
    )
    header, end = {}, 0
    for key, tensor in network.state_dict().items():
        header[key] = {
            "dtype": "F16",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.numel() * 2],
        }
        end += tensor.numel() * 2
    text, path = json.dumps(header).encode(), folder / "unet.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    try:
        load_native(path, "default", LAYERWISE)
    except CheckpointFileError as err:
        return str(err)
    return "opened"


def changed_file(folder: Path) -> dict[str, Any]:
    """A file that is changed, removed and put back between and during runs."""
    path, family = folder / "changed.safetensors", FAMILIES["wan_t2v"]
    family.write(path, "fp16")
    expected = sample(native(path, family), family)
    model = streamed(path, family)
    status = path.stat()
    found: dict[str, Any] = {"first": torch.equal(sample(model, family), expected)}

    def error() -> str:
        try:
            sample(model, family)
        except OSError as err:
            return str(err)
        return "no error"

    calls = []

    def touch(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 2:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))

    hook = model.model.diffusion_model.register_forward_pre_hook(touch)
    found["changed"] = error()
    hook.remove()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    found["as before"] = torch.equal(sample(model, family), expected)
    comfy.model_management.unload_all_models()
    away = path.rename(folder / "away.safetensors")
    found["removed"] = error()
    away.rename(path)
    found["back"] = torch.equal(sample(model, family), expected)
    return found


def answers(folder: str) -> dict[str, Any]:
    """Return each case's result or traceback."""
    torch.set_num_threads(1)
    at = Path(folder)
    kinds = ("fp16", "nvfp4") if QUANT_ALGOS else ("fp16",)
    cases: dict[str, Callable[[], Any]] = {
        f"opening {kind}": partial(opening, at, kind) for kind in kinds
    }
    for name in ("wan_t2v", "flux"):
        cases |= {
            f"scaled {name} {layout}": partial(scaled, at, name, layout)
            for layout in SCALED_LAYOUTS
        }
        cases |= {f"mixed {name} {kind}": partial(mixed, at, name, (kind,)) for kind in QUANT_ALGOS}
        cases[f"gguf {name}"] = partial(gguf, at, name)
    if QUANT_ALGOS:
        cases |= {
            f"quantised patches {kind}": partial(quantised_patches, at, kind)
            for kind in PATCHED_FORMATS
            if kind in ("by row", *QUANT_ALGOS)
        }
        cases["saved"] = partial(saved, at)
        cases["mixed wan_t2v all"] = partial(
            mixed, at, "wan_t2v", (*QUANT_ALGOS, None, "float8_e4m3fn")
        )
    cases |= {
        "gguf prefix": partial(gguf, at, "wan_vace", "model.diffusion_model."),
        "gguf patches": partial(gguf_patches, at),
        "gguf refusals": partial(gguf_refusals, at),
        "unknown format": partial(unknown_format, at),
        "large parameters": partial(large_parameters, at),
        "refusals": partial(refusals, at),
        "diffusers": partial(diffusers, at),
        "without lists": partial(without_lists, at),
        "changed file": partial(changed_file, at),
    }
    found: dict[str, Any] = {"formats": list(QUANT_ALGOS)}
    if not QUANT_ALGOS:
        lacking = "this ComfyUI has no layers that are marked one by one"
        found |= {name: {"skip_reason": lacking} for name in MARKED_LAYERS}
    return found | results_of(cases, unload=True)
