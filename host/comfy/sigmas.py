"""ComfyUI's schedules of noise levels, for Wan's flow."""

from __future__ import annotations

import comfy.model_sampling
import comfy.samplers
import torch

from ...sampling import check_flow_shift
from ...sampling import schedules as partial


class FlowSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """What ComfyUI's samplers and schedules ask of a flow model: the noise levels of one flow shift."""

    def __init__(self, flow_shift: float) -> None:
        super().__init__()
        check_flow_shift(flow_shift)
        self.set_parameters(shift=flow_shift)


def schedule_names() -> list[str]:
    """ComfyUI's schedules and, last, the one of Wan2.2 and diffusers."""
    return [*comfy.samplers.SCHEDULER_NAMES, "wan"]


def schedule_sigmas(name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
    """The last `steps` + 1 values of a schedule of int(steps / denoise) steps, float32, on the CPU."""
    if name == "wan":
        return partial.schedule_sigmas(name, steps, denoise, flow_shift)
    sampling = FlowSampling(flow_shift)

    def make(total: int) -> torch.Tensor:
        made: torch.Tensor = comfy.samplers.calculate_sigmas(sampling, name, total)
        return made.cpu()

    return partial.partial_sigmas(make, steps, denoise)
