"""A model that is one expert: choosing it, and what the settings of two experts mean for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..host import ExpertsRef, host, io, search_words
from ..plan import Attention, Storage
from ..sampling import RequestError
from . import sockets
from .expert_inputs import attention_input, compile_input
from .load import DTYPES, FOLDERS, dtype_input, log_auto_dtype, storage_input
from .sample_inputs import FROM_BOUNDARY


class WanStreamOneExpert(io.ComfyNode):
    """Names a model that is one expert, which runs every step, and checks that it is whole."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamOneExpert",
            display_name="Wan Model (single)",
            category="WanStream/loaders",
            **search_words("load diffusion model", "unet", "gguf", "fp8", "5b", "ti2v", "1.3b", "wan 2.1"),
            description="Opens a model that has one expert for all steps: Wan2.1 T2V (1.3B, 14B), Wan2.1 I2V (14B) or "
            "Wan2.2 5B. Only headers are read: weights move when a step needs them.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=host.model_names(*FOLDERS),
                    tooltip="A .safetensors or .gguf file of diffusion_models, or a folder of diffusers. What is read "
                    "per step where all blocks stream: 28 GB for 14B (32 GB for Wan2.1 I2V), 9.8 GB for 5B and 2.8 GB "
                    "for 1.3B in bf16 and fp16, half of it in fp8.",
                ),
                dtype_input(),
                storage_input(),
                attention_input(),
                compile_input(),
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def execute(
        cls,
        file: str,
        compute_dtype: str,
        storage: Storage = "as stored",
        attention: Attention = "default",
        compile: bool = False,
    ) -> io.NodeOutput:
        ref = ExpertsRef(
            high_noise=host.model_path(file, *FOLDERS),
            compute_dtype=DTYPES[compute_dtype],
            storage=storage,
            one=True,
            attention=attention,
            compile=compile,
        )
        # Opened here so that a bad file or a missing package is reported on the node that names it. The sampler finds
        # it open.
        with host.ledger().phase("open", host.device()):
            pair = host.experts(ref)
        log_auto_dtype(ref, pair)
        return io.NodeOutput(ref)


def settings_for(experts: ExpertsRef, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a sampler or guider, as these experts take them.

    One expert takes every step under `guidance_high`; `boundary_ratio` and `guidance_low` are not used then.

    Raises RequestError for a `switch_step` where there is nothing to switch to.
    """
    if not experts.one:
        return dict(settings)
    switch = settings.get("switch_step", FROM_BOUNDARY)
    if switch != FROM_BOUNDARY:
        raise RequestError(
            f"switch_step is {switch}, and the model is one expert, which runs every step: set it to {FROM_BOUNDARY}"
        )
    return {**settings, "boundary_ratio": 0.0, "guidance_low": settings["guidance_high"]}
