"""Cancellation before and within blocks: on a CPU, one block of a large video computes for minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...offload import EngineRun
from ..errors import SamplingCancelled

LONG_VISIT_FLOPS = 2e10
"""FLOP of a block with all of its lanes, some tenths of a second on a CPU, from which a stop is polled inside it."""

PIECE_FLOPS = 5e10
"""FLOP of attention between two polls; more if pieces would have fewer than `PIECE_ROWS` rows."""

PIECE_ROWS = 768
"""Least number of queries in a piece of attention.

From 768 queries on, torch's CPU kernel works on 256 queries at a time; for fewer it takes smaller groups, which round
differently. Pieces of at least 768 queries in multiples of 256 are therefore bit-equal to the whole attention, except
for the case in `_must_stay_whole`.
"""
ROWS_AT_ONCE = 256
"""Queries that torch's CPU kernel works on at a time."""


def block_visit(
    run: EngineRun,
    step: int,
    expert: str,
    stops_before: Callable[[int], bool] | None,
    block: int,
    *,
    patch: int = 0,
    waiting: bool = False,
    inside: bool = False,
) -> AbstractContextManager[object]:
    """Return the visit of a block, for `with`; polls `stops_before` first.

    Args:
        stops_before: maps a block to True if the run stops before it.
        patch: see `BlockKey.patch`.
        waiting: poll while the block is read, too.
        inside: poll within the block too; see `Interruptible`.

    Raises:
        SamplingCancelled: `stops_before` returned True; within the block too.
    """
    if stops_before is None:
        return run.visit(step, expert, block, patch)

    def poll() -> None:
        if stops_before(block):
            raise SamplingCancelled(step, block)

    poll()
    visit = run.visit(step, expert, block, patch, poll=poll if waiting else None)
    return _interruptible(visit, poll) if inside else visit


@contextmanager
def _interruptible(visit: AbstractContextManager[object], poll: Callable[[], None]) -> Iterator[None]:
    with visit, Interruptible(poll):
        yield


class Interruptible(TorchFunctionMode):
    """Mode that calls `poll` before every linear layer and every piece of attention of this thread.

    `poll` ends the computation by raising. Attention is divided into pieces, with a bit-equal result.
    """

    def __init__(self, poll: Callable[[], None]) -> None:
        super().__init__()
        self._poll = poll

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.linear:
            self._poll()
        elif func is functional.scaled_dot_product_attention:
            return self._attend(func, *args, **given)
        return func(*args, **given)

    def _attend(
        self, func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **given: Any
    ) -> torch.Tensor:
        self._poll()
        masked = bool(args) or given.get("attn_mask") is not None or given.get("is_causal")
        pieces = () if masked or _must_stay_whole(query) else tuple(_pieces(query, key))
        if len(pieces) < 2:
            whole: torch.Tensor = func(query, key, value, *args, **given)
            return whole
        # The kernel gives its result the layout of the query; a contiguous one would change the strides downstream.
        attended = torch.empty_like(query)
        for piece in pieces:
            self._poll()
            attended[..., piece, :] = func(query[..., piece, :], key, value, **given)
        return attended


def _must_stay_whole(query: torch.Tensor) -> bool:
    """Return True if attention of these queries is bit-equal only when it is computed as a whole."""
    # With AMX, torch's kernel decides by the number of queries whether to pack half-precision keys and values for
    # oneDNN, and the two ways round differently. A stop waits for the whole attention there.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)  # an older torch lacks it
    return query.element_size() < torch.float32.itemsize and has_amx()


def _pieces(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Divide queries [..., S, D] into pieces; a remainder that is too short joins the last piece."""
    rows = query.shape[-2]
    row_flops = 4 * key.shape[-2] * query.numel() // max(1, rows)
    fitting = int(PIECE_FLOPS / max(1, row_flops)) // ROWS_AT_ONCE * ROWS_AT_ONCE
    size, start = max(PIECE_ROWS, fitting), 0
    while start < rows:
        stop = start + size if rows - start - size >= PIECE_ROWS else rows
        yield slice(start, stop)
        start = stop
