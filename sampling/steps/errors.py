"""Sampling errors.

ValueError
  RequestError               the request cannot be carried out; raised before any compute
    ConditioningError        a native CONDITIONING or LATENT that these models cannot use
  NonFiniteLatentError       a step made NaN or infinity
  InsufficientMemoryError    too little device memory for the smallest policy
                             (also torch's OutOfMemoryError)
  SmallerPolicyError         out of memory in a step that several workers compute:
                             all repeat it under a smaller policy
Exception
  SamplingCancelled          the caller requested a stop
"""

from __future__ import annotations

import torch

from ...devices.machine import insufficient_ram
from ...offload import StoppedTogether
from ...schema import Cancelled, OffloadPolicy
from ...schema.text import format_need


class RequestError(ValueError):
    """A request that cannot be carried out. The message says what to change."""


class ConditioningError(RequestError):
    """A native CONDITIONING or LATENT that Wan2.2 A14B cannot use."""


class NonFiniteLatentError(ValueError, StoppedTogether):
    """The latent contains NaN or infinity after a step."""


class InsufficientMemoryError(ValueError, torch.OutOfMemoryError):
    """Too little device memory even for the smallest policy.

    The message lists the policies tried.

    It is an OutOfMemoryError too, so that hosts unload other models as they do for torch's own
    error.
    """


def check_ram(nbytes: int, *, subject: str, remedy: str) -> None:
    """Raise InsufficientMemoryError for a tensor for which the system would kill the process."""
    # The allocation itself would not fail: Linux overcommits memory and kills the process at the
    # first writes.
    lacking = insufficient_ram(nbytes)
    if lacking is not None:
        raise InsufficientMemoryError(
            f"{subject} {format_need(nbytes)} of RAM, and {format_need(lacking)} are free (swap "
            f"included): {remedy}"
        )


class SmallerPolicyError(ValueError):
    """Out of memory in a step shared by workers: all of them must repeat it under `policy`."""

    def __init__(self, message: str, policy: OffloadPolicy) -> None:
        super().__init__(message, policy)
        self.policy = policy

    def __str__(self) -> str:
        return str(self.args[0])


class SamplingCancelled(StoppedTogether, Cancelled):
    """The run was stopped before block `block` of step `step`.

    The pair can be used again at once.
    """

    def __init__(self, step: int, block: int) -> None:
        super().__init__(step, block)
        self.step = step
        self.block = block

    def __str__(self) -> str:
        return f"cancelled before block {self.block} of step {self.step}"
