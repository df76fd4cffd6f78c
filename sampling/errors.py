"""What sampling raises.

ValueError
  RequestError            what was asked for cannot be done; raised before any compute
    ConditioningError     a native CONDITIONING or LATENT that the models here cannot use
  NonFiniteLatentError    a step made NaN or infinity
  NoRoomError             the device has too little memory for the smallest policy (also torch's OutOfMemoryError)
  SmallerPolicyError      memory was short in a step that others compute too: all must take it again, in less memory
Exception
  Cancelled               the caller asked to stop
"""

from __future__ import annotations

import torch

from ..offload import StoppedTogether
from ..schema import Cancelled, OffloadPolicy


class RequestError(ValueError):
    """A request that cannot be carried out; the message says what to change."""


class ConditioningError(RequestError):
    """A native CONDITIONING or LATENT that Wan2.2 A14B cannot use."""


class NonFiniteLatentError(ValueError, StoppedTogether):
    """The latent holds NaN or infinity after a step."""


class NoRoomError(ValueError, torch.OutOfMemoryError):
    """The device has too little memory even for the smallest policy; the message says what was tried.

    Also an error of torch's kind: hosts know by it that other models should go.
    """


class SmallerPolicyError(ValueError):
    """Memory was short in a step that other workers compute too: all of them take it again under `policy`."""

    def __init__(self, message: str, policy: OffloadPolicy) -> None:
        super().__init__(message, policy)
        self.policy = policy

    def __str__(self) -> str:
        return str(self.args[0])


class SamplingCancelled(StoppedTogether, Cancelled):
    """The run was stopped before block `block` of step `step`; the pair can be used again at once."""

    def __init__(self, step: int, block: int) -> None:
        super().__init__(step, block)
        self.step = step
        self.block = block

    def __str__(self) -> str:
        return f"cancelled before block {self.block} of step {self.step}"
