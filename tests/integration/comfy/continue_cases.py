"""Runs in ComfyUI's own Python: clips continued by latent.

They are compared with ComfyUI's samplers under the same conditions. `answers(folder)` returns one
JSON value per case. `test_continue_video.py` checks the values. The native conditions are written
by hand with ComfyUI's own functions, from the SVI 2.0 Pro description.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import comfy.latent_formats
import comfy.sd
import folder_paths
import node_helpers
import torch
from comfy_extras import nodes_hunyuan, nodes_model_advanced
from installed_pack import load_pack

import nodes

load_pack()
from wanstream.nodes.clips.continue_video import WanStreamContinueVideo  # noqa: E402
from wanstream.nodes.clips.latent_files import WanStreamLoadLatent, WanStreamSaveLatent  # noqa: E402
from wanstream.nodes.sampler import WanStreamSampler  # noqa: E402
from wanstream.schema.refs.experts import ExpertsRef  # noqa: E402

SHIFT, BOUNDARY, STEPS, SWITCH, GUIDANCE = 5.0, 0.9, 4, 2, 3.5
WIDTH, HEIGHT, FRAMES = 48, 32, 17
LATENT_FRAMES = 5
SEEDS = (42, 43, 44)


class Sampler(WanStreamSampler):
    hidden = Namespace(unique_id=None)


class Saver(WanStreamSaveLatent):
    hidden = Namespace(unique_id="1", prompt=None, extra_pnginfo=None)


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _text(seed: int) -> list[Any]:
    return [[_normal(1, 12, 4096, seed=seed), {"pooled_output": None}]]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _native_condition(
    anchor: torch.Tensor, previous: torch.Tensor | None, overlap: int
) -> dict[str, torch.Tensor]:
    """Return the I2V condition as SVI 2.0 Pro fills it."""
    parts = [anchor[:, :, :1]]
    if previous is not None:
        parts.append(previous[:, :, previous.shape[2] - overlap :])
    missing = LATENT_FRAMES - sum(part.shape[2] for part in parts)
    padding = torch.zeros(1, 16, missing, *anchor.shape[3:])
    parts.append(comfy.latent_formats.Wan21().process_out(padding))
    mask = torch.ones(1, 1, LATENT_FRAMES, *anchor.shape[3:])
    mask[:, :, 0] = 0.0
    return {"concat_latent_image": torch.cat(parts, dim=2), "concat_mask": mask}


class Pair:
    """Two I2V experts as ComfyUI loads them, and as we do."""

    def __init__(self, folder: Path) -> None:
        files = {name: folder / f"i2v_{name}.safetensors" for name in ("high", "low")}
        self.ref = ExpertsRef(
            high_noise=files["high"], low_noise=files["low"], compute_dtype="float32"
        )
        self.natives = []
        for file in files.values():
            loaded = comfy.sd.load_diffusion_model(str(file))
            self.natives += nodes_model_advanced.ModelSamplingSD3().patch(loaded, SHIFT)
        self.sides = _text(1), _text(2)

    def native_clip(
        self, anchor: torch.Tensor, previous: torch.Tensor | None, overlap: int, seed: int
    ) -> torch.Tensor:
        values = _native_condition(anchor, previous, overlap)
        sides = [node_helpers.conditioning_set_values(side, values) for side in self.sides]
        empty = nodes_hunyuan.EmptyHunyuanLatentVideo
        if hasattr(empty, "execute"):
            latent = empty.execute(WIDTH, HEIGHT, FRAMES).args[0]
        else:
            (latent,) = empty().generate(WIDTH, HEIGHT, FRAMES)
        stages = (("enable", 0, SWITCH, "enable"), ("disable", SWITCH, 10000, "disable"))
        for model, (noise, start, end, leftover) in zip(self.natives, stages, strict=True):
            (latent,) = nodes.KSamplerAdvanced().sample(
                model,
                noise,
                seed,
                STEPS,
                GUIDANCE,
                "euler",
                "simple",
                *sides,
                latent,
                start,
                end,
                leftover,
            )
        return latent["samples"]

    def our_clip(self, seed: int, **continued: Any) -> dict[str, Any]:
        positive, negative = self.sides
        given = WanStreamContinueVideo.execute(positive, negative, frames=FRAMES, **continued).args
        settings = {
            "seed": seed,
            "steps": STEPS,
            "solver": "euler",
            "schedule": "simple",
            "flow_shift": SHIFT,
        }
        settings |= {"boundary_ratio": BOUNDARY, "switch_step": SWITCH, "start_step": 0}
        settings |= {"guidance_high": GUIDANCE, "guidance_low": GUIDANCE}
        return Sampler.execute(self.ref, *given, **settings).result[0]


def _three_clips(pair: Pair, overlap: int) -> dict[str, Any]:
    """Return the difference per clip, and how much the second depends on the first."""
    anchor = _normal(1, 16, 1, HEIGHT // 8, WIDTH // 8, seed=3)
    native: torch.Tensor | None = None
    ours: dict[str, Any] | None = None
    differences, clips = [], []
    for seed in SEEDS:
        native = pair.native_clip(anchor, native, overlap, seed)
        ours = pair.our_clip(seed, previous=ours, anchor={"samples": anchor}, overlap=overlap)
        differences.append(_difference(ours["samples"], native))
        clips.append(native)
    other = pair.native_clip(anchor, clips[0] + 0.5, overlap, SEEDS[1])
    return {
        "differences": differences,
        "effect": _difference(other, clips[1]),
        "shape": list(clips[-1].shape),
    }


def _files(pair: Pair) -> dict[str, bool]:
    """Return whether each side can read files saved by the other."""
    first = pair.our_clip(
        1, anchor={"samples": _normal(1, 16, 1, HEIGHT // 8, WIDTH // 8, seed=3)}, overlap=1
    )
    ui = Saver.execute(first, "latents/ours").ui
    (saved,) = (ui if isinstance(ui, dict) else ui.as_dict())["latents"]
    name = f"{saved['subfolder']}/{saved['filename']}"
    (theirs,) = nodes.LoadLatent().load(f"{name} [output]")
    accepted = nodes.LoadLatent.VALIDATE_INPUTS(f"{name} [output]")
    native = nodes.SaveLatent().save(first, "latents/theirs")["ui"]["latents"][0]
    (loaded,) = WanStreamLoadLatent.execute(f"{native['subfolder']}/{native['filename']}").args
    (choices,) = (each.options for each in WanStreamLoadLatent.define_schema().inputs)
    return {
        "theirs": torch.equal(theirs["samples"], first["samples"]),
        "accepted": accepted is True,
        "ours": torch.equal(loaded["samples"], first["samples"]),
        "listed": {name, f"{native['subfolder']}/{native['filename']}"} <= {*choices},
        "outside": _refused_outside(first),
    }


def _refused_outside(latent: dict[str, Any]) -> bool:
    """Return True if a name leading out of the output folder is refused and writes nothing."""
    folder = Path(folder_paths.get_output_directory()).parent
    before = {*folder.glob("x_*")}
    try:
        Saver.execute(latent, "../x")
    except ValueError as err:
        return "leaves the folder" in str(err) and {*folder.glob("x_*")} == before
    return False


def answers(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        pair = Pair(Path(folder))
        found = {f"overlap {overlap}": _three_clips(pair, overlap) for overlap in (1, 2)}
        return {**found, "files": _files(pair)}
