"""ComfyUI's sigma schedules for Wan's flow models."""

from __future__ import annotations

import comfy.model_sampling
import comfy.samplers
import torch

from ...sampling import check_flow_shift, schedules


class FlowSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """Noise levels of one flow shift, as the `model_sampling` of ComfyUI's samplers and schedules."""

    def __init__(self, flow_shift: float) -> None:
        super().__init__()
        check_flow_shift(flow_shift)
        self.set_parameters(shift=flow_shift)


def schedule_names() -> list[str]:
    """Return the names of ComfyUI's schedules and, last, "wan", the schedule of Wan2.2 and diffusers."""
    return [*comfy.samplers.SCHEDULER_NAMES, "wan"]


def schedule_sigmas(name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
    """Return the last `steps` + 1 values of a schedule of int(steps / denoise) steps, float32, on the CPU."""
    if name == "wan":
        return schedules.schedule_sigmas(name, steps, denoise, flow_shift)
    sampling = FlowSampling(flow_shift)

    def make(total: int) -> torch.Tensor:
        sigmas: torch.Tensor = comfy.samplers.calculate_sigmas(sampling, name, total)
        return sigmas.cpu()

    return schedules.partial_sigmas(make, steps, denoise)
