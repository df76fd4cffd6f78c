"""Cancellation before and within blocks: on a CPU, a block of a large video takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...offload import StreamSession

LONG_VISIT_FLOPS = 2e10
"""FLOP per block with all lanes from which a stop is polled inside it: some tenths of a second on a
CPU."""

PIECE_FLOPS = 5e10
"""FLOP of attention between two polls. More if pieces would have fewer than `PIECE_ROWS` rows."""

PIECE_ROWS = 768
"""Least number of queries in a piece of attention.

From 768 queries on, torch's CPU kernel works on 256 queries at a time. For fewer it takes smaller
groups, which round differently. Pieces with at least 768 queries in multiples of 256 are therefore
bit-equal to the whole attention, except for the case in `_must_stay_whole`.
"""
ROWS_AT_ONCE = 256
"""Queries per group in torch's CPU kernel."""


@contextmanager
def interruptible_visit(
    session: StreamSession, poll: Callable[[], None], block: int
) -> Iterator[None]:
    """Visit a block in a session, and call `poll` within the block too."""
    with session.visit(block), Interruptible(poll):
        yield


class Interruptible(TorchFunctionMode):
    """Mode that calls `poll` before every linear layer and attention piece on this thread.

    `poll` ends the computation by raising. Attention is divided into pieces, with a bit-equal
    result.
    """

    def __init__(self, poll: Callable[[], None]) -> None:
        super().__init__()
        self._poll = poll

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is functional.linear:
            self._poll()
        elif func is functional.scaled_dot_product_attention:
            return self._attend(func, *args, **given)
        return func(*args, **given)

    def _attend(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **given: Any,
    ) -> torch.Tensor:
        self._poll()
        # A mask may have rows for all queries, and would have to be cut too.
        masked = bool(args) or given.get("attn_mask") is not None or given.get("is_causal")
        pieces: tuple[slice, ...] = ()
        if not masked and not _must_stay_whole(query):
            pieces = tuple(_pieces(query, key))
        if len(pieces) < 2:
            whole: torch.Tensor = func(query, key, value, *args, **given)
            return whole
        # The kernel gives its result the query's layout. A contiguous one would change the strides
        # downstream.
        attended = torch.empty_like(query)
        for piece in pieces:
            self._poll()
            attended[..., piece, :] = func(query[..., piece, :], key, value, **given)
        return attended


def _must_stay_whole(query: torch.Tensor) -> bool:
    """Return True if attention of these queries is bit-equal only if computed as a whole."""
    # With AMX, torch's kernel decides by query count whether to pack half-precision keys and values
    # for oneDNN, and the two ways round differently. There a stop waits for the whole attention.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)  # an older torch lacks it
    return query.element_size() < torch.float32.itemsize and has_amx()


def _pieces(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Divide queries [..., S, D] into pieces.

    A remainder that is too short joins the last piece.
    """
    rows = query.shape[-2]
    # QK^T and PV each take a multiplication and an addition, so the factor is 4.
    row_flops = 4 * key.shape[-2] * query.numel() // max(1, rows)
    fitting = int(PIECE_FLOPS / max(1, row_flops)) // ROWS_AT_ONCE * ROWS_AT_ONCE
    size = max(PIECE_ROWS, fitting)
    start = 0
    while start < rows:
        stop = start + size
        if rows - stop < PIECE_ROWS:
            stop = rows
        yield slice(start, stop)
        start = stop
