"""Titles of the shipped workflows in ComfyUI's template browser, which are their file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .comfyui import ROOT

WORKFLOWS = ROOT / "workflows"

TITLES = {
    "benchmark": "Wan2.2 benchmark",
    "bernini": "Wan2.2 video editing with Bernini",
    "bernini_workers": "Wan2.2 video editing with Bernini on two GPUs",
    "continue_video": "Wan2.2 continue a video",
    "draft": "Wan2.2 text to video with moving preview",
    "flf2v": "Wan2.2 first and last frame to video",
    "fun_control": "Wan2.2 video from a video with Fun Control",
    "fun_control_workers": "Wan2.2 video from a video with Fun Control on two GPUs",
    "fun_inp": "Wan2.2 first and last frame to video with Fun InP",
    "fun_inp_workers": "Wan2.2 first and last frame to video with Fun InP on two GPUs",
    "guider": "Wan2.2 text to video with any sampler",
    "i2v": "Wan2.2 image to video",
    "i2v_lightning": "Wan2.2 image to video in 4 steps",
    "long_video": "Wan2.2 long video of three clips",
    "native_animate": "Wan2.2 person in a video with Animate",
    "native_flux": "Flux text to image",
    "native_joined": "Wan2.2 text to video with one KSampler",
    "native_ltx2": "LTX-2 text to video with sound",
    "native_mixed": "Wan2.2 text to video with nodes of ComfyUI",
    "native_qwen_image": "Qwen-Image text to image",
    "native_vace": "Wan2.1 reference and control to video with VACE",
    "native_wan22": "Wan2.2 text to video with two KSamplers",
    "t2v": "Wan2.2 text to video",
    "t2v_lightning": "Wan2.2 text to video in 4 steps",
    "three_stages": "Wan2.2 text to video in three stages",
    "wan21_i2v": "Wan2.1 14B image to video",
    "wan21_t2v": "Wan2.1 1.3B text to video",
    "wan22_5b_i2v": "Wan2.2 5B image to video",
    "wan22_5b_t2v": "Wan2.2 5B text to video",
    "workers": "Wan2.2 text to video on two GPUs",
}
"""Titles by the name of the API file."""


def template_path(name: str) -> Path:
    """Return the canvas file of a shipped workflow."""
    return WORKFLOWS / f"{TITLES[name]}.json"


def template(name: str) -> dict[str, Any]:
    """Read the canvas file of a shipped workflow."""
    found: dict[str, Any] = json.loads(template_path(name).read_text(encoding="utf-8"))
    return found
