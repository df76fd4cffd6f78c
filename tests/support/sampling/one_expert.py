"""Runs of a single model, and diffusers' pipelines for them."""

from __future__ import annotations

from typing import Any

from diffusers import WanTransformer3DModel

from wanstream.tests.support.wan.pipelines import make_pipeline
from wanstream.wan import ExpertPair

STEPS = 3
SHIFT = 3.0
SETTINGS = {
    "steps": STEPS,
    "flow_shift": SHIFT,
    "switch_step": None,
    "boundary_ratio": 0.0,
    "guidance": (5.0, 5.0),
    "solver": "unipc",
    "schedule": "wan",
}
"""Settings of the pipelines, as keywords of a request."""


def pipeline_of(kind: Any, pair: ExpertPair, **parts: Any) -> Any:
    """Return a `kind` pipeline with the only model of `pair`."""
    transformer = WanTransformer3DModel.from_pretrained(pair.high.path).requires_grad_(False)
    return make_pipeline(kind, flow_shift=SHIFT, transformer=transformer, **parts)
