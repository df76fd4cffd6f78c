"""One thread for the tests in this folder, and runs compared with one worker's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanstream.tests.support.distributed.split_jobs import SplitProcesses
from wanstream.tests.support.one_thread import one_thread
from wanstream.tests.support.rounding import ROUNDING, difference

__all__ = ["one_thread"]


@pytest.fixture
def check_split(split: SplitProcesses) -> Callable[..., Any]:
    """`check_split(*given, exact=False)`: run, and return one worker's latents and all results.

    All workers have the latents of one worker alone, to the bit if `exact`.
    """

    def check(*given: Any, exact: bool = False) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        alone = split.alone(*given)
        results = split.run(*given)
        for worker in results:
            assert torch.equal(worker["latents"], results[0]["latents"])
            assert difference(worker["latents"], alone) <= (0 if exact else ROUNDING)
        return alone, results

    return check
