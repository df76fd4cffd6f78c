"""A stop inside a block: on a CPU one block of a large video computes for minutes, one attention of it for longer."""

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
"""Of a block with all of its lanes: some tenths of a second. A shorter one is over before a user notices."""

PIECE_FLOPS = 5e10
"""Of attention between two looks, where `PIECE_ROWS` allow it."""

PIECE_ROWS = 768
"""torch's CPU kernel works on 256 queries at a time from that many on, and on fewer of a shorter piece, which rounds
otherwise. So pieces are multiples of 256 and this long at least, and attention in pieces is the same to the bit. It
is not divided where that does not hold, see `_in_whole`."""
ROWS_AT_ONCE = 256


class BlockVisits:
    """Visits of the blocks of one model call, for `with visits(block):`; `should_stop` is polled before each of them.

    Args:
        inside: poll within a block too, see `Interruptible`.

    Raises:
        SamplingCancelled: `should_stop` returned True.
    """

    def __init__(
        self,
        run: EngineRun,
        step: int,
        expert: str,
        should_stop: Callable[[], bool] | None,
        *,
        inside: bool = False,
    ) -> None:
        self._run, self._step, self._expert = run, step, expert
        self._should_stop, self._inside = should_stop, inside and should_stop is not None
        self._block = 0

    def __call__(self, block: int) -> AbstractContextManager[object]:
        self._block = block
        self._poll()
        visit = self._run.visit(self._step, self._expert, block)
        return self._interruptible(visit) if self._inside else visit

    def _poll(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise SamplingCancelled(self._step, self._block)

    @contextmanager
    def _interruptible(self, visit: AbstractContextManager[object]) -> Iterator[None]:
        with visit, Interruptible(self._poll):
            yield


class Interruptible(TorchFunctionMode):
    """While it is entered, `look` is called before every linear layer and every piece of attention of this thread.

    It ends what is being computed by raising.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.linear:
            self._look()
        elif func is functional.scaled_dot_product_attention:
            return self._attend(func, *args, **given)
        return func(*args, **given)

    def _attend(
        self, func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **given: Any
    ) -> torch.Tensor:
        self._look()
        masked = bool(args) or given.get("attn_mask") is not None or given.get("is_causal")
        pieces = () if masked or _in_whole(query) else tuple(_pieces(query, key))
        if len(pieces) < 2:
            whole: torch.Tensor = func(query, key, value, *args, **given)
            return whole
        # Of the layout that the kernel gives its result: that of the query.
        attended = torch.empty_like(query)
        for piece in pieces:
            self._look()
            attended[..., piece, :] = func(query[..., piece, :], key, value, **given)
        return attended


def _in_whole(query: torch.Tensor) -> bool:
    """True if attention of these queries must not be divided to stay the same to the bit."""
    # With AMX, torch's kernel packs keys and values of half precision for oneDNN's products, or does not, by the number
    # of queries, and the two round otherwise. A stop waits for the whole attention there.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)  # an older torch lacks it
    return query.element_size() < torch.float32.itemsize and has_amx()


def _pieces(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Queries [..., S, D] in pieces; the last one takes what is too short for one of its own."""
    rows = query.shape[-2]
    row_flops = 4 * key.shape[-2] * query.numel() // max(1, rows)
    fitting = int(PIECE_FLOPS / max(1, row_flops)) // ROWS_AT_ONCE * ROWS_AT_ONCE
    size, start = max(PIECE_ROWS, fitting), 0
    while start < rows:
        stop = start + size if rows - start - size >= PIECE_ROWS else rows
        yield slice(start, stop)
        start = stop
