"""Errors of sampling.

ValueError
  RequestError               the request cannot be carried out; raised before any compute
    ConditioningError        a native CONDITIONING or LATENT that these models cannot use
  NonFiniteLatentError       a step made NaN or infinity
  InsufficientMemoryError    too little device memory for the smallest policy (also torch's OutOfMemoryError)
  SmallerPolicyError         out of memory in a step that several workers compute: all repeat it under a smaller policy
Exception
  SamplingCancelled          the caller requested a stop
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
    """The latent contains NaN or infinity after a step."""


class InsufficientMemoryError(ValueError, torch.OutOfMemoryError):
    """Too little device memory even for the smallest policy; the message lists the policies that were tried.

    It is an OutOfMemoryError too, so that hosts unload other models as they do for torch's own error.
    """


class SmallerPolicyError(ValueError):
    """Out of memory in a step that other workers compute too: all of them must repeat it under `policy`."""

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
