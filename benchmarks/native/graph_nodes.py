"""Nodes for the servers in `graph.py`: inputs for random models, and model call times.

Loaded by ComfyUI as custom nodes, with the helpers in `tests/integration/comfy`.
"""

import json
import pathlib
import sys
import time
from dataclasses import replace

import comfy.model_detection
import comfy.samplers
import folder_paths

# Resolved, because the server loads this file through a link.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/integration/comfy"))
from inside import families, further_families

WIDTH = 1024
LAYERS = 8
CALLS = pathlib.Path(folder_paths.get_output_directory()).parent / "calls.jsonl"
"""File with a line per model call: start and end in seconds."""

lumina = {**further_families.LUMINA, "dim": WIDTH, "n_heads": 8, "n_kv_heads": 8}
FAMILIES = {
    "wan": replace(
        families._wan_family(
            "wan", "WAN21", "model.WanModel", model_type="t2v", dim=WIDTH, layers=LAYERS
        ),
        sizes=((1, 16, 2, 16, 16),),
    ),
    "z_image": replace(
        further_families.FURTHER["z_image"],
        settings=lumina | {"n_layers": LAYERS},
        unet_config=lumina | {"n_layers": LAYERS},
        sizes=((1, 16, 32, 32),),
    ),
}


class GraphInputs:
    """CONDITIONING and LATENT for a family. `larger` ones have twice the height."""

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI reads this name
        return {"required": {"family": (list(FAMILIES), {}), "larger": ("BOOLEAN", {})}}

    def make(self, family, larger):
        chosen = FAMILIES[family]
        if larger:
            *first, height, width = chosen.sizes[0]
            chosen = replace(chosen, sizes=((*first, 2 * height, width),))
        positive, negative = chosen.conditioning()
        return positive, negative, {"samples": chosen.latent()}


def write_files():
    """Write a bf16 checkpoint and two LoRAs for each family without them."""
    models = pathlib.Path(folder_paths.get_folder_paths("diffusion_models")[0])
    loras = pathlib.Path(folder_paths.get_folder_paths("loras")[0])
    for folder in (models, loras):
        folder.mkdir(parents=True, exist_ok=True)
    for name, family in FAMILIES.items():
        path = models / f"{name}.safetensors"
        if path.exists():
            continue
        family.write(path, "bf16")
        weights = family.weights()
        for lora in ("first", "second"):
            families.write_lora("lora", loras / f"{name}_{lora}.safetensors", weights)


def timed(calc_cond_batch):
    """Return the function for one model call, with a line in `CALLS`."""

    def call(*arguments, **named):
        # `time.time` is also the clock behind ComfyUI's timestamps.
        start = time.time()
        result = calc_cond_batch(*arguments, **named)
        with CALLS.open("a") as file:
            file.write(json.dumps([start, time.time()]) + "\n")
        return result

    return call


def detected(detect):
    """Return ComfyUI's detection, with the settings that depend on the width of real models."""

    def of_file(*arguments, **named):
        found = detect(*arguments, **named)
        if found is not None and found["image_model"] == "lumina2":
            found |= FAMILIES["z_image"].unet_config
        return found

    return of_file


write_files()
comfy.model_detection.detect_unet_config = detected(comfy.model_detection.detect_unet_config)
comfy.samplers.calc_cond_batch = timed(comfy.samplers.calc_cond_batch)

NODE_CLASS_MAPPINGS = {"GraphInputs": GraphInputs}
