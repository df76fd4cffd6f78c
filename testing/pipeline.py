"""Writer of a pipeline folder of diffusers: its settings, and links to components of another pipeline."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from diffusers import UniPCMultistepScheduler, __version__

SHARED = ("vae", "text_encoder", "tokenizer")
"""Components that all pipelines of Wan2.1 and Wan2.2 A14B share."""

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
    """Write the scheduler and `model_index.json`.

    Args:
        kind: class of the pipeline.
        boundary_ratio: boundary of a pipeline with two experts; None: single expert.
        more: components in addition to `COMPONENTS`.
        expand_timesteps: use one timestep per token, as TI2V-5B does.
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
    """Link the components in `SHARED` of the pipeline `source` into `target`."""
    link_components(source, target, SHARED)


def link_components(source: Path, target: Path, components: Iterable[str]) -> None:
    """Link these components of the pipeline `source` into `target`."""
    for component in components:
        _link_files(source / component, target / component)


def _link_files(source: Path, target: Path) -> None:
    """Hard-link every file of `source` into `target`, or copy it if the file system has no hard links."""
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)
