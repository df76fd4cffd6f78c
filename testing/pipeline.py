"""What a sample pipeline folder of diffusers has beside its models: settings, and components that others have too."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from diffusers import UniPCMultistepScheduler, __version__

SHARED = ("vae", "text_encoder", "tokenizer")
"""Components that are the same in every pipeline of Wan2.1 and Wan2.2 A14B."""

COMPONENTS = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "WanTransformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}


def write_settings(
    pipeline: Path,
    *,
    kind: str,
    flow_shift: float,
    boundary_ratio: float | None,
    more: Mapping[str, tuple[str | None, str | None]],
    expand_timesteps: bool = False,
) -> None:
    """Write the scheduler, and the list of components that diffusers opens a pipeline by.

    `kind` is the pipeline's class, `more` are components beside `COMPONENTS`; a boundary makes it one of two experts,
    and `expand_timesteps` has every token told its timestep.
    """
    UniPCMultistepScheduler(
        num_train_timesteps=1000, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    ).save_pretrained(pipeline / "scheduler")
    index = {
        "_class_name": kind,
        "_diffusers_version": __version__,
        "boundary_ratio": boundary_ratio,
        "expand_timesteps": expand_timesteps,
        "transformer_2": (None, None) if boundary_ratio is None else COMPONENTS["transformer"],
        **COMPONENTS,
        **more,
    }
    (pipeline / "model_index.json").write_text(
        json.dumps(dict(sorted(index.items())), indent=2) + "\n", encoding="utf-8"
    )


def link_shared(source: Path, target: Path) -> None:
    """Give the components that the pipeline `source` shares with `target` a place there too."""
    link_components(source, target, SHARED)


def link_components(source: Path, target: Path, components: Iterable[str]) -> None:
    """Give these components of the pipeline `source` a place in `target` too."""
    for component in components:
        _link_files(source / component, target / component)


def _link_files(source: Path, target: Path) -> None:
    """Give every file of `source` a second name in `target`, or a copy where the file system has no second names."""
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)
