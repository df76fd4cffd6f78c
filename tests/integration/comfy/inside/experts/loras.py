"""Runs in ComfyUI's own Python: LoRAs on our experts, and on native ones by LoraLoaderModelOnly."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import comfy.model_management
import comfy.sd
import folder_paths
import torch
from safetensors.torch import load_file, save_file

import nodes
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import make_lora
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora

from ..checks import for_each
from ..families import _difference, _normal

TIMESTEP = torch.tensor([900.0])
LATENTS = _normal(1, 16, 2, 4, 6, seed=0)
TEXT = _normal(1, 512, 4096, seed=1)
FOR_COMFYUI = " for ComfyUI"

Stack = list[tuple[str, float]]
Tensors = dict[str, torch.Tensor]


def _spelt(tensors: Tensors, down: str, up: str, *, flat: bool = False) -> Tensors:
    found = {}
    for key, tensor in tensors.items():
        key = key.replace("lora_down", down).replace("lora_up", up)
        if flat:
            endings = (f".{down}.weight", f".{up}.weight", ".alpha", ".diff_b")
            (ending,) = (each for each in endings if key.endswith(each))
            layer = key.removeprefix("diffusion_model.").removesuffix(ending)
            key = "lora_unet_" + layer.replace(".", "_") + ending
        found[key] = tensor
    return found


def _differences(weights: Tensors) -> Tensors:
    """A difference for every weight and bias, by ComfyUI's names.

    Bare parameters (modulation) are left out: ComfyUI 0.18 accepts their differences and then does
    not add them.
    """
    found = {}
    for seed, (name, tensor) in enumerate(weights.items()):
        layer, _, kind = name.rpartition(".")
        if kind != "modulation":
            ending = "diff_b" if kind == "bias" else "diff"
            found[f"diffusion_model.{layer}.{ending}"] = 0.02 * _normal(*tensor.shape, seed=seed)
    return found


def _of_lycoris(weights: Tensors) -> dict[str, Tensors]:
    """A LoKr, a LoHa and two DoRAs for some layers in every block."""
    generator = torch.Generator().manual_seed(9)
    alpha = {"alpha": torch.tensor(3.0)}

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    files: dict[str, Tensors] = {}
    for name in (
        f"blocks.{block}.{layer}"
        for block in range(4)
        for layer in ("self_attn.q", "cross_attn.o", "ffn.0")
    ):
        weight = weights[f"{name}.weight"]
        rows, columns = weight.shape
        up = drawn(rows, 4)
        down = drawn(4, columns)
        lora = {"lora_up.weight": up, "lora_down.weight": down, **alpha}
        norm = weight.norm(dim=1, keepdim=True)
        magnitude = norm * (1 + drawn(rows, 1).abs())
        # ComfyUI divides by the row norms before the addition, so it gets other magnitudes.
        other = magnitude * norm / (weight + up @ down * 3.0 / 4).norm(dim=1, keepdim=True)
        lokr = {"lokr_w1": drawn(8, 4), "lokr_w2_a": drawn(rows // 8, 4)}
        of_layer = {
            "lokr": {**lokr, "lokr_w2_b": drawn(4, columns // 4), **alpha},
            "loha": {
                f"hada_{number}_{side}": drawn(*((rows, 4) if side == "a" else (4, columns)))
                for number in ("w1", "w2")
                for side in "ab"
            },
            "dora columns": {**lora, "dora_scale": weight.norm(dim=0, keepdim=True) * 1.1},
            "dora rows": {**lora, "dora_scale": magnitude},
            f"dora rows{FOR_COMFYUI}": {**lora, "dora_scale": other},
        }
        for file, tensors in of_layer.items():
            layer = {f"diffusion_model.{name}.{key}": each.clone() for key, each in tensors.items()}
            files.setdefault(file, {}).update(layer)
    return files


def _native(expert: Path, stack: Stack) -> torch.Tensor:
    model = comfy.sd.load_diffusion_model(str(expert), model_options={"dtype": torch.float32})
    for name, strength in stack:
        lora = f"{name}.safetensors"
        (model,) = nodes.LoraLoaderModelOnly().load_lora_model_only(model, lora, strength)
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    result = model.model.diffusion_model(LATENTS, TIMESTEP, TEXT, transformer_options={})
    comfy.model_management.unload_all_models()
    return result


@cache
def _without_lora(expert: Path) -> torch.Tensor:
    return _native(expert, [])


@for_each(
    [],
    [("lightning", 0.8)],
    [("lora_A", 1.0)],
    [("musubi", 1.0)],
    [("differences", -0.7)],
    [("lokr", 0.8)],
    [("loha", -0.6)],
    [("dora columns", 0.7)],
    [(f"dora rows{FOR_COMFYUI}", 0.7)],
    [("lokr", 0.8), ("lightning", 1.0)],
    [("lightning", 0.5), ("differences", 0.3), ("musubi", -1.0)],
)
def check_one_forward(expert, stack):
    native = _native(expert, stack)
    with open_experts(expert, expert, compute_dtype=torch.float32) as pair:
        files = [
            (expert.with_name(f"{name.replace(FOR_COMFYUI, '')}.safetensors"), strength)
            for name, strength in stack
        ]
        pair.set_loras([(open_lora(file), strength) for file, strength in files], [])
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        lane = Lane(latents=LATENTS, text=TEXT)
        with engine.run(step_visits(["high"], engine.block_counts)) as run:
            [found] = forward_lanes(
                engine.models["high"], [lane], TIMESTEP, lambda block: run.visit(0, "high", block)
            )
    assert _difference(found, native) <= 1e-5
    if stack:
        assert _difference(native, _without_lora(expert)) > 1e-2


def setup(folder: Path) -> Path:
    expert = folder / "t2v_high.safetensors"
    weights = load_file(expert)
    lightning = make_lora(make_expert(TinyShape(), seed=1), seed=3)
    files = {
        "lightning": lightning,
        "lora_A": _spelt(lightning, "lora_A", "lora_B"),
        "musubi": _spelt(lightning, "lora_down", "lora_up", flat=True),
        "differences": _differences(weights),
        **_of_lycoris(weights),
    }
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    folder_paths.add_model_folder_path("loras", str(folder), is_default=True)
    return expert
