"""LoRAs against ComfyUI's own: the same file on a native expert, loaded by LoraLoaderModelOnly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import make_lora
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora

pytestmark = pytest.mark.comfy

TOLERANCE = 1e-5
TIMESTEP = 900.0

ASK = """
import torch
import comfy.model_management, comfy.sd
from safetensors.torch import load_file, save_file

inputs, found = load_file(arguments[0]), {}
for name, stack in arguments[3].items():
    model = comfy.sd.load_diffusion_model(arguments[1], model_options={"dtype": torch.float32})
    for lora, strength in stack:
        model = nodes.LoraLoaderModelOnly().load_lora_model_only(model, lora, strength)[0]
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    with torch.no_grad():
        found[name] = model.model.diffusion_model(
            inputs["latents"], torch.tensor([arguments[4]]), inputs["text"], transformer_options={}
        ).contiguous()
    comfy.model_management.unload_all_models()
save_file(found, arguments[2])
answer = None
"""

STACKS = {
    "none": [],
    "lightning": [("lightning.safetensors", 0.8)],
    "lora_A": [("lora_A.safetensors", 1.0)],
    "musubi": [("musubi.safetensors", 1.0)],
    "every difference": [("differences.safetensors", -0.7)],
    "LoKr": [("lokr.safetensors", 0.8)],
    "LoHa": [("loha.safetensors", -0.6)],
    "DoRA, columns": [("dora columns.safetensors", 0.7)],
    # ComfyUI divides by the row norms before the addition, so it gets a file with other magnitudes.
    "DoRA, rows": [("dora rows for ComfyUI.safetensors", 0.7)],
    "LoKr and lightning": [("lokr.safetensors", 0.8), ("lightning.safetensors", 1.0)],
    "stack": [
        ("lightning.safetensors", 0.5),
        ("differences.safetensors", 0.3),
        ("musubi.safetensors", -1.0),
    ],
}


def _spelt(
    tensors: dict[str, torch.Tensor], down: str, up: str, *, flat: bool = False
) -> dict[str, torch.Tensor]:
    found = {}
    for key, tensor in tensors.items():
        key = key.replace("lora_down", down).replace("lora_up", up)
        if flat:
            layer = key.removeprefix("diffusion_model.")
            ending = next(
                end
                for end in (f".{down}.weight", f".{up}.weight", ".alpha", ".diff_b")
                if key.endswith(end)
            )
            key = "lora_unet_" + layer.removesuffix(ending).replace(".", "_") + ending
        found[key] = tensor
    return found


def _differences(expert: Path) -> dict[str, torch.Tensor]:
    """A difference for every weight and bias, by ComfyUI's names.

    Bare parameters (modulation) are left out: ComfyUI 0.18 accepts their differences and then does
    not add them.
    """
    generator = torch.Generator().manual_seed(8)
    found = {}
    for name, tensor in load_file(expert).items():
        if name.endswith("modulation"):
            continue
        key = f"diffusion_model.{name}"
        key = (
            f"{key.removesuffix('.weight')}.diff"
            if not name.endswith(".bias")
            else f"{key[: -len('.bias')]}.diff_b"
        )
        found[key] = 0.02 * torch.randn(tensor.shape, generator=generator)
    return found


def _of_lycoris(expert: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A LoKr, a LoHa and two DoRAs for some layers in every block."""
    generator = torch.Generator().manual_seed(9)

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    weights, alpha = load_file(expert), {"alpha": torch.tensor(3.0)}
    files: dict[str, dict[str, torch.Tensor]] = {"lokr": {}, "loha": {}}
    files |= {"dora columns": {}, "dora rows": {}, "dora rows for ComfyUI": {}}
    for name in (
        f"blocks.{block}.{layer}"
        for block in range(4)
        for layer in ("self_attn.q", "cross_attn.o", "ffn.0")
    ):
        weight = weights[f"{name}.weight"]
        rows, columns = weight.shape
        up, down = drawn(rows, 4), drawn(4, columns)
        summed = weight + up @ down * 3.0 / 4
        lora = {"lora_up.weight": up, "lora_down.weight": down, **alpha}
        magnitude = weight.norm(dim=1, keepdim=True) * (1 + drawn(rows, 1).abs())
        for_comfyui = (
            magnitude * weight.norm(dim=1, keepdim=True) / summed.norm(dim=1, keepdim=True)
        )
        tensors = {
            "lokr": {
                "lokr_w1": drawn(8, 4),
                "lokr_w2_a": drawn(rows // 8, 4),
                "lokr_w2_b": drawn(4, columns // 4),
                **alpha,
            },
            "loha": {
                f"hada_{w}_{f}": drawn(*((rows, 4) if f == "a" else (4, columns)))
                for w in ("w1", "w2")
                for f in "ab"
            },
            "dora columns": {**lora, "dora_scale": weight.norm(dim=0, keepdim=True) * 1.1},
            "dora rows": {**lora, "dora_scale": magnitude},
            "dora rows for ComfyUI": {**lora, "dora_scale": for_comfyui},
        }
        for file, of_layer in tensors.items():
            files[file] |= {
                f"diffusion_model.{name}.{key}": tensor.clone() for key, tensor in of_layer.items()
            }
    return files


@pytest.fixture(scope="module")
def loras(tiny_expert_file: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every LoRA kind for the tiny expert."""
    folder = tmp_path_factory.mktemp("loras")
    lightning = make_lora(make_expert(TinyShape(), seed=1), seed=3)
    files = {
        "lightning": lightning,
        "lora_A": _spelt(lightning, "lora_A", "lora_B"),
        "musubi": _spelt(lightning, "lora_down", "lora_up", flat=True),
        "differences": _differences(tiny_expert_file(seed=1)),
        **_of_lycoris(tiny_expert_file(seed=1)),
    }
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "latents": torch.randn(1, 16, 2, 4, 6, generator=generator),
        "text": torch.randn(1, 512, 4096, generator=generator),
    }


@pytest.fixture(scope="module")
def native(
    in_comfyui: Callable[..., None],
    base: Path,
    loras: Path,
    inputs: dict[str, torch.Tensor],
    tiny_expert_file: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, torch.Tensor]:
    """ComfyUI's results with each LoRA stack."""
    folder = tmp_path_factory.mktemp("native")
    place = base / "models" / "loras"
    shutil.copytree(loras, place, dirs_exist_ok=True)
    try:
        save_file(inputs, folder / "inputs.safetensors")
        in_comfyui(
            ASK,
            *(
                str(path)
                for path in (
                    folder / "inputs.safetensors",
                    tiny_expert_file(seed=1),
                    folder / "found",
                )
            ),
            STACKS,
            TIMESTEP,
        )
    finally:
        for file in loras.iterdir():
            (place / file.name).unlink()
    return load_file(folder / "found")


@pytest.mark.parametrize("name", STACKS)
def test_one_forward(
    native: dict[str, torch.Tensor],
    loras: Path,
    inputs: dict[str, torch.Tensor],
    tiny_expert_file: Callable[..., Path],
    record_property: Callable[[str, object], None],
    name: str,
) -> None:
    expert = tiny_expert_file(seed=1)
    with open_experts(expert, expert, compute_dtype=torch.float32) as pair:
        files = [
            (loras / file.replace(" for ComfyUI", ""), strength) for file, strength in STACKS[name]
        ]
        pair.set_loras([(open_lora(file), strength) for file, strength in files], [])
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        with torch.inference_mode(), engine.run(step_visits(["high"], engine.block_counts)) as run:
            [found] = forward_lanes(
                engine.models["high"],
                [Lane(**inputs)],
                torch.tensor([TIMESTEP]),
                lambda block: run.visit(0, "high", block),
            )
    distance = float((found - native[name]).norm() / native[name].norm())
    record_property("rel_l2", distance)
    assert distance <= TOLERANCE
    if name != "none":
        assert (native[name] - native["none"]).norm() > 1e-2 * native["none"].norm()
