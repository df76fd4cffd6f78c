"""Runs in ComfyUI's own Python: LoRAs on our experts, and on native ones by LoraLoaderModelOnly."""

from functools import cache, partial

import folder_paths
import torch
from comfy import model_management, sd
from safetensors.torch import load_file, save_file

import nodes
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing import TinyShape, make_expert, make_lora
from wanstream.wan import Lane, forward_lanes, open_experts, open_lora

from ..checks import for_each
from ..families import _difference, _normal, write_lora

TIMESTEP = torch.tensor([900.0])
LATENTS = _normal(1, 16, 2, 4, 6, seed=0)
TEXT = _normal(1, 512, 4096, seed=1)
FOR_COMFYUI = " for ComfyUI"


def _doras(weights):
    """Two DoRAs for some layers in every block, and what ComfyUI needs for one of them."""
    generator = torch.Generator().manual_seed(9)
    files = {}
    layers = ("self_attn.q", "cross_attn.o", "ffn.0")
    for name in (f"blocks.{block}.{layer}" for block in range(4) for layer in layers):
        weight = weights[f"{name}.weight"]
        rows, columns = weight.shape
        up = 0.2 * torch.randn(rows, 4, generator=generator)
        down = 0.2 * torch.randn(4, columns, generator=generator)
        lora = {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(3.0)}
        norm = weight.norm(dim=1, keepdim=True)
        magnitude = norm * (1 + 0.2 * torch.randn(rows, 1, generator=generator).abs())
        # ComfyUI divides by the row norms before the addition, so it gets other magnitudes.
        other = magnitude * norm / (weight + up @ down * 3.0 / 4).norm(dim=1, keepdim=True)
        for file, scale in (
            ("dora columns", weight.norm(dim=0, keepdim=True) * 1.1),
            ("dora rows", magnitude),
            (f"dora rows{FOR_COMFYUI}", other),
        ):
            layer = {**lora, "dora_scale": scale}
            named = {f"diffusion_model.{name}.{key}": each.clone() for key, each in layer.items()}
            files.setdefault(file, {}).update(named)
    return files


def _native(expert, stack):
    model = sd.load_diffusion_model(str(expert), model_options={"dtype": torch.float32})
    for name, strength in stack:
        lora = f"{name}.safetensors"
        (model,) = nodes.LoraLoaderModelOnly().load_lora_model_only(model, lora, strength)
    model_management.load_models_gpu([model], force_full_load=True)
    result = model.model.diffusion_model(LATENTS, TIMESTEP, TEXT, transformer_options={})
    model_management.unload_all_models()
    return result


@cache
def _without_lora(expert):
    return _native(expert, [])


@for_each(
    [],
    [("lightning", 0.8)],
    [("lora", 1.0)],
    [("kohya", 1.0)],
    [("diff", -0.7)],
    [("lokr", 0.8)],
    [("loha", -0.6)],
    [("dora columns", 0.7)],
    [(f"dora rows{FOR_COMFYUI}", 0.7)],
    [("lightning", 0.5), ("diff", 0.3), ("kohya", -1.0)],
)
def check_one_forward(expert, stack):
    native = _native(expert, stack)
    with open_experts(expert, expert, compute_dtype=torch.float32) as pair:
        loras = []
        for name, strength in stack:
            file = expert.with_name(f"{name.replace(FOR_COMFYUI, '')}.safetensors")
            loras.append((open_lora(file), strength))
        pair.set_loras(loras, [])
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        lane = Lane(latents=LATENTS, text=TEXT)
        with engine.run(step_visits(["high"], engine.block_counts)) as run:
            visit = partial(run.visit, 0, "high")
            [found] = forward_lanes(engine.models["high"], [lane], TIMESTEP, visit)
    assert _difference(found, native) <= 1e-5
    if stack:
        assert _difference(native, _without_lora(expert)) > 1e-2


def setup(folder):
    expert = folder / "t2v_high.safetensors"
    weights = load_file(expert)
    lightning = make_lora(make_expert(TinyShape(), seed=1), seed=3)
    for name, tensors in {"lightning": lightning, **_doras(weights)}.items():
        save_file(tensors, folder / f"{name}.safetensors")
    # ComfyUI 0.18 accepts differences of bare parameters and then does not add them.
    layers = {name: each for name, each in weights.items() if not name.endswith("modulation")}
    for kind in ("lora", "kohya", "diff", "lokr", "loha"):
        write_lora(kind, folder / f"{kind}.safetensors", layers)
    folder_paths.add_model_folder_path("loras", str(folder), is_default=True)
    return expert
