"""The inputs of the sampler, and what each setting costs."""

from __future__ import annotations

from ..host import io
from ..sampling import SCHEDULES, SOLVERS
from .expert_inputs import (
    boundary_input,
    cache_input,
    experts_input,
    guidance_input,
    policy_input,
    windows_input,
    workers_input,
)

FROM_BOUNDARY = -1
"""The `switch_step` that leaves the switch to `boundary_ratio`."""

TO_THE_END = 10000
"""The `end_step` that no schedule reaches; ComfyUI's samplers use the same."""


def sampler_inputs() -> list[io.Input]:
    """All inputs in the order of the node; saved workflows depend on it."""
    return [*_socket_inputs(), seed_input(), *setting_inputs()]


def setting_inputs() -> list[io.Input]:
    """What a run is told beside its experts and what each video brings: texts, latent and seed."""
    return [*_step_inputs(), *_switch_inputs(), *_guidance_inputs(), *_part_inputs(), *_optional_inputs()]


def seed_input() -> io.Input:
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=2**64 - 1,
        control_after_generate=True,
        tooltip="Draws the same noise as ComfyUI's own samplers. A new seed reloads nothing.",
    )


def _socket_inputs() -> list[io.Input]:
    return [
        experts_input(),
        io.Conditioning.Input(
            "positive",
            tooltip="From Wan Text Encode or CLIP Text Encode; with an image, from an image-to-video node.",
        ),
        io.Conditioning.Input("negative", tooltip="As positive. Costs nothing where a guidance is 1."),
        io.Latent.Input(
            "latent",
            tooltip="An empty latent, or one to go on from (see start_step). A noise mask keeps what it covers with 0.",
        ),
    ]


def _step_inputs() -> list[io.Input]:
    return [
        io.Int.Input(
            "steps",
            default=40,
            min=1,
            max=1000,
            tooltip="Time is proportional to it: every step computes 40 blocks for each prompt in use. 40 is what "
            "Wan2.2 was tuned for, 20 are usually enough, 4 need a distilled LoRA.",
        ),
        io.Combo.Input(
            "solver",
            options=list(SOLVERS),
            default="unipc",
            tooltip="The rule of a step. unipc and dpm++: second order, need fewer steps. euler: first order, for "
            "distilled LoRAs. lcm: draws new noise in every step, for LoRAs distilled that way. None costs time worth "
            "naming.",
        ),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default="wan",
            tooltip="How noise falls from step to step. wan: as in Wan2.2 and diffusers. simple: as in ComfyUI.",
        ),
        io.Float.Input(
            "flow_shift",
            default=12.0,
            min=0.01,
            max=100.0,
            step=0.01,
            tooltip="Higher: more steps at high noise, so more of them run the high-noise expert. 12 for "
            "text-to-video, 5 for image-to-video.",
        ),
    ]


def _switch_inputs() -> list[io.Input]:
    return [
        boundary_input(),
        io.Int.Input(
            "switch_step",
            default=FROM_BOUNDARY,
            min=FROM_BOUNDARY,
            max=1000,
            tooltip="First step of the low-noise expert, counted from 0. -1: boundary_ratio decides.",
        ),
    ]


def _guidance_inputs() -> list[io.Input]:
    return [
        io.Float.Input(
            "guidance_high",
            default=4.0,
            min=1.0,
            max=100.0,
            step=0.1,
            tooltip="How strongly the high-noise expert follows the prompt. Anything but 1 computes the negative as "
            "well and doubles the compute of its steps; the bytes that are moved stay the same. One expert follows it "
            "in every step.",
        ),
        io.Float.Input(
            "guidance_low",
            default=3.0,
            min=1.0,
            max=100.0,
            step=0.1,
            tooltip="The same for the low-noise expert. 1 halves the compute of its steps. Not used by one expert.",
        ),
    ]


def _part_inputs() -> list[io.Input]:
    """Which part of the schedule is run, with the meaning that KSampler (Advanced) gives to the same settings."""
    return [
        io.Int.Input(
            "start_step",
            default=0,
            min=0,
            max=999,
            tooltip="Steps to leave out at the start, and their time with them. The connected latent is mixed with "
            "noise of the level of that step; see add_noise.",
        ),
        io.Int.Input(
            "end_step",
            default=TO_THE_END,
            min=1,
            max=TO_THE_END,
            optional=True,
            tooltip="The step before which the run ends; beyond the last one: it takes all steps. A following sampler "
            "goes on with this number as its start_step.",
        ),
        io.Boolean.Input(
            "add_noise",
            default=True,
            optional=True,
            tooltip="Off: the latent carries its noise already, from a sampler that left it over. Both samplers need "
            "the same steps, schedule and flow_shift.",
        ),
        io.Boolean.Input(
            "leftover_noise",
            default=False,
            optional=True,
            tooltip="On: a run that ends before the last step hands its noise on, for another sampler with add_noise "
            "off. Off: its last step removes all noise at once.",
        ),
    ]


def _optional_inputs() -> list[io.Input]:
    return [
        policy_input(),
        io.Sigmas.Input(
            "sigmas",
            optional=True,
            tooltip="Noise levels from another node, used as they are instead of steps, schedule and flow_shift. Where "
            "they end above 0, that noise is left over.",
        ),
        workers_input(),
        cache_input(),
        guidance_input(),
        windows_input(),
    ]
