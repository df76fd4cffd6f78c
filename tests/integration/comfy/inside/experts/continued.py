"""Runs in ComfyUI's own Python: clips continued by latent.

They are compared with ComfyUI's samplers under the same conditions. The native conditions are
written by hand with ComfyUI's own functions, from the SVI 2.0 Pro description.
"""

from types import SimpleNamespace as Namespace

import comfy.latent_formats
import node_helpers
import torch

import nodes
from wanstream.nodes.clips.continue_video import WanStreamContinueVideo
from wanstream.nodes.clips.latent_files import WanStreamLoadLatent, WanStreamSaveLatent

from ..checks import for_each
from ..families import _difference, _normal
from ..samplers import NEAR, ksamplers, our_sampler
from .guider import SHIFT, Side

STEPS = 4
SWITCH = 2
GUIDANCE = 3.5
FRAMES = 17
LATENT_FRAMES = 5
SEEDS = (42, 43, 44)

ANCHOR = _normal(1, 16, 1, 4, 6, seed=3)


class Saver(WanStreamSaveLatent):
    hidden = Namespace(unique_id="1", prompt=None, extra_pnginfo=None)


def _native_condition(anchor, previous, overlap):
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


def native_clip(pair, anchor, previous, overlap, seed):
    values = _native_condition(anchor, previous, overlap)
    sides = [node_helpers.conditioning_set_values(side, values) for side in pair.sides]
    latent = {"samples": torch.zeros(1, 16, LATENT_FRAMES, *anchor.shape[3:])}
    settings = {"steps": STEPS, "switch": SWITCH, "cfg": (GUIDANCE, GUIDANCE), "seed": seed}
    return ksamplers(*pair.natives, sides, latent, **settings)["samples"]


def our_clip(pair, seed, **continued):
    given = WanStreamContinueVideo.execute(*pair.sides, frames=FRAMES, **continued).args
    *sides, latent = given
    settings = {"seed": seed, "steps": STEPS, "switch_step": SWITCH, "flow_shift": SHIFT}
    return our_sampler(pair.ref, sides, latent, cfg=(GUIDANCE, GUIDANCE), **settings)


@for_each(1, 2)
def check_three_clips(pair, overlap):
    native = None
    ours = None
    clips = []
    for seed in SEEDS:
        native = native_clip(pair, ANCHOR, native, overlap, seed)
        ours = our_clip(pair, seed, previous=ours, anchor={"samples": ANCHOR}, overlap=overlap)
        assert _difference(ours["samples"], native) <= NEAR
        clips.append(native)
    other = native_clip(pair, ANCHOR, clips[0] + 0.5, overlap, SEEDS[1])
    assert _difference(other, clips[1]) > 10 * NEAR, "a clip depends on the one before"


def check_latent_files(pair):
    """Each side reads the files saved by the other."""
    first = our_clip(pair, 1, anchor={"samples": ANCHOR}, overlap=1)
    ui = Saver.execute(first, "latents/ours").ui
    (saved,) = (ui if isinstance(ui, dict) else ui.as_dict())["latents"]
    ours = f"{saved['subfolder']}/{saved['filename']}"
    assert nodes.LoadLatent.VALIDATE_INPUTS(f"{ours} [output]") is True
    (loaded,) = nodes.LoadLatent().load(f"{ours} [output]")
    assert torch.equal(loaded["samples"], first["samples"])
    (native,) = nodes.SaveLatent().save(first, "latents/theirs")["ui"]["latents"]
    theirs = f"{native['subfolder']}/{native['filename']}"
    (loaded,) = WanStreamLoadLatent.execute(theirs).args
    assert torch.equal(loaded["samples"], first["samples"])
    (choices,) = (each.options for each in WanStreamLoadLatent.define_schema().inputs)
    assert {ours, theirs} <= {*choices}


def setup(folder):
    return Side(folder, "i2v")
