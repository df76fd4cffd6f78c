"""One thread for the tests in this folder, and runs compared with one worker's."""

import pytest
import torch

from wanstream.tests.support.one_thread import one_thread
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import normal

__all__ = ["one_thread"]


@pytest.fixture
def check_split(split):
    """`check_split(*given, exact=False)`: run, and return one worker's latents and all results.

    All workers have the latents of one worker alone, to the bit if `exact`.
    """

    def check(*given, exact=False):
        alone = split.alone(*given)
        results = split.run(*given)
        for worker in results:
            assert torch.equal(worker["latents"], results[0]["latents"])
            assert difference(worker["latents"], alone) <= (0 if exact else ROUNDING)
        return alone, results

    return check


@pytest.fixture
def make_request(make_task):
    """`make_request(shape=..., **changes)`: 4 steps, 2 of them high-noise, for 48-token lanes."""

    def make(*, shape=(1, 16, 2, 8, 12), **changes):
        return make_task(request={"noise": normal(*shape, seed=20), **changes}).request

    return make
