"""Runs in ComfyUI's own Python: LoRAs on our experts, and on native ones by LoraLoaderModelOnly."""

from functools import cache

import folder_paths
import torch
from comfy import model_management, sd
from safetensors.torch import load_file, save_file

import nodes
from wanstream.testing import TinyShape, make_expert, make_lora
from wanstream.tests.support.wan.opened_experts import FIRST_TIME, LAYERWISE, streamed
from wanstream.wan import Lane, open_experts, open_lora

from ..checks import for_each
from ..families import _difference, _normal, write_lora

TIMESTEP = torch.tensor([FIRST_TIME])
LATENTS = _normal(1, 16, 2, 4, 6, seed=0)
TEXT = _normal(1, 512, 4096, seed=1)


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
    [("lightning", 0.5), ("diff", 0.3), ("kohya", -1.0)],
)
def check_one_forward(expert, stack):
    native = _native(expert, stack)
    with open_experts(expert, expert, compute_dtype=torch.float32) as pair:
        loras = []
        for name, strength in stack:
            loras.append((open_lora(expert.with_name(f"{name}.safetensors")), strength))
        pair.set_loras(loras, [])
        [found] = streamed(pair, LAYERWISE, Lane(latents=LATENTS, text=TEXT))
    assert _difference(found, native) <= 1e-5
    if stack:
        assert _difference(native, _without_lora(expert)) > 1e-2


def setup(folder):
    expert = folder / "t2v_high.safetensors"
    weights = load_file(expert)
    lightning = make_lora(make_expert(TinyShape(), seed=1), seed=3)
    save_file(lightning, folder / "lightning.safetensors")
    # ComfyUI 0.18 accepts differences of bare parameters and then does not add them.
    layers = {name: each for name, each in weights.items() if not name.endswith("modulation")}
    for kind in ("lora", "kohya", "diff", "lokr", "loha", "dora columns"):
        write_lora(kind, folder / f"{kind}.safetensors", layers)
    folder_paths.add_model_folder_path("loras", str(folder), is_default=True)
    return expert
