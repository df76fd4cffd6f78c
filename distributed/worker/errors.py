"""What a worker raises when it cannot go on with the others of its group.

OSError
  PeerLostError     another worker of the group is gone, or this one has left the rendezvous (a ConnectionError)
  HungError         another worker of the group did not come in time (a TimeoutError)
RuntimeError
  GroupsOrderError  groups were used before they met, or after they were left
"""

from __future__ import annotations

import torch.distributed as dist

TIMED_OUT = ("timed out", "timeout")
"""Of what gloo, NCCL and the store say when nobody came; compared in lower case."""
OF_GLOO = "gloo"
"""Stands in the path that every error of gloo begins with: they are plain RuntimeErrors."""


class PeerLostError(ConnectionError):
    """Another worker of the group is gone, or this one has left; the groups are of no use any more."""


class WorkerTimeoutError(TimeoutError):
    """Another worker of the group did not come in time; the message says which one, where that is known."""


def is_timeout(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that somebody did not come in time."""
    said = str(error).lower()
    return any(words in said for words in TIMED_OUT)


def is_of_peers(error: RuntimeError) -> bool:
    """Whether `error` comes from torch.distributed, and not from what was computed here."""
    return isinstance(error, dist.DistError) or OF_GLOO in str(error)
