"""Adding a LoRA to the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..host import ExpertsRef, LoraRef, host, io, search_words
from ..wan.suspicions import lora_suspicions
from . import sockets
from .warnings_shown import shown_warnings

NONE = "none"

_FOLDER = "loras"


class WanStreamLora(io.ComfyNode):
    """Names a LoRA for each expert and checks that it fits."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLora",
            display_name="Wan LoRA (pair)",
            category="WanStream/loaders",
            **search_words("lightning", "lightx2v", "4 steps", "distill", "load lora"),
            description="Adds a LoRA to each expert's weights as they arrive on the device. Several of these nodes in "
            "a row add up; another LoRA or strength reloads no expert. The LoRA of a model of one expert is "
            "high_noise.",
            inputs=[
                sockets.Experts.Input(
                    "experts",
                    tooltip="From Wan Experts (streamed), Wan Model (single) or another Wan LoRA (pair).",
                ),
                _file("high_noise", "early, noisy steps"),
                _file("low_noise", "later steps"),
                _strength("strength_high"),
                _strength("strength_low"),
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def execute(
        cls, experts: ExpertsRef, high_noise: str, low_noise: str, strength_high: float, strength_low: float
    ) -> io.NodeOutput:
        if high_noise == low_noise == NONE:
            return io.NodeOutput(experts)
        lora = LoraRef(
            high_noise=None if high_noise == NONE else host.model_path(high_noise, _FOLDER),
            low_noise=None if low_noise == NONE else host.model_path(low_noise, _FOLDER),
            strength_high=strength_high,
            strength_low=strength_low,
        )
        ref = replace(experts, loras=(*experts.loras, lora))
        # Opened here so that a bad file is reported on the node that names it.
        pair = host.experts(ref)
        found = lora_suspicions(lora.high_noise, lora.low_noise, pair.high, one=experts.one)
        return io.NodeOutput(ref, ui=shown_warnings(found))

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> bool:
        """Let the node run again when what it warns of becomes an error, or no error any more."""
        return host.strict()


def _file(name: str, steps: str) -> io.Combo.Input:
    return io.Combo.Input(
        name,
        options=[NONE, *host.model_names(_FOLDER)],
        default=NONE,
        tooltip=f"The LoRA for the expert of the {steps}. Costs its own size in RAM (0.6 GB at rank 64 in bf16) twice, "
        "2 % more bytes per block at rank 64, and no device memory worth naming.",
    )


def _strength(name: str) -> io.Float.Input:
    return io.Float.Input(
        name,
        default=1.0,
        min=-10.0,
        max=10.0,
        step=0.01,
        tooltip="How much of the LoRA is added; 0 leaves it out. Another strength costs nothing but the blocks that "
        "stay on the device, which are fetched once more.",
    )
