"""Errors keep their type and arguments on the way from another process."""

import copy
from pathlib import Path

import pytest

from wanstream.distributed.ray.environment import RaySetupError
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.offload.formats import CheckpointFileError, NotFiniteError
from wanstream.sampling import steps
from wanstream.schema import OffloadPolicy
from wanstream.wan.checkpoint.files import CheckpointError

ERRORS = [
    *(steps.SamplingCancelled(3, 5), steps.SmallerPolicyError("less", OffloadPolicy.layerwise(2))),
    *(steps.InsufficientMemoryError("no room"), steps.RequestError("no"), NotFiniteError(7)),
    *(CheckpointFileError(Path("/a"), "is gone"), CheckpointError(Path("/a"), "is gone")),
    *(WorkerTimeoutError("hangs"), PeerLostError("lost"), WorkerLostError("gone", 3)),
    RaySetupError("none"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_its_way(error):
    again = copy.copy(error)  # made as unpickling makes it
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
