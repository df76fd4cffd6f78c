"""Errors of a worker that cannot continue with the other workers of its group.

OSError
  PeerLostError       another worker of the group is gone, or this one has left the rendezvous (a ConnectionError)
  WorkerTimeoutError  another worker of the group did not respond in time (a TimeoutError)
"""

from __future__ import annotations

import torch.distributed as dist

TIMEOUT_WORDS = ("timed out", "timeout")
"""Parts of the timeout messages of gloo, NCCL and the store, in lower case."""
GLOO_PATH = "gloo"
"""Part of the source path at the start of every gloo error; gloo raises plain RuntimeErrors."""


class PeerLostError(ConnectionError):
    """Another worker of the group is gone, or this one has left; the groups cannot be used any more."""


class WorkerTimeoutError(TimeoutError):
    """Another worker of the group did not respond in time; the message names it if it is known."""


def is_timeout(error: BaseException) -> bool:
    """Return True if an error of torch.distributed reports a timeout."""
    message = str(error).lower()
    return any(words in message for words in TIMEOUT_WORDS)


def is_peer_error(error: RuntimeError) -> bool:
    """Return True if `error` was raised by torch.distributed, and not by the computation between its calls."""
    return isinstance(error, dist.DistError) or GLOO_PATH in str(error)
