"""Measured reads from a block source."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from wanstream.offload.formats.layout import allocate_flat
from wanstream.offload.sources.base import SourceError, timed_read
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey

KEYS = [BlockKey("high", 0), BlockKey("high", 1)]


@pytest.fixture
def inner(make_stack: Callable[..., nn.ModuleList], slow_source):
    return slow_source(ModuleSource({"high": make_stack(2)}), seed=0)


def test_every_read_is_passed_on_once_and_timed(inner) -> None:
    plain = inner.inner
    nbytes = plain.formats[KEYS[0]].stored.nbytes
    read, expected = allocate_flat(nbytes, "cpu").zero_(), allocate_flat(nbytes, "cpu").zero_()
    spans = []
    for key, straight in zip(KEYS, (False, True), strict=True):
        spans.append(timed_read(inner, key, read, None, straight=straight))
        plain.read_block(key, expected)
        assert torch.equal(read, expected)
    assert inner.reads == KEYS
    assert [span.nbytes for span in spans] == [nbytes, nbytes]
    assert [span.straight for span in spans] == [False, True]
    for first, second in pairwise([spans[0].start, spans[0].end, spans[1].start, spans[1].end]):
        assert first <= second


def test_a_read_that_fails_raises(inner) -> None:
    inner.fail_at = 0
    with pytest.raises(SourceError, match="went away"):
        timed_read(inner, KEYS[0], allocate_flat(inner.formats[KEYS[0]].stored.nbytes, "cpu"), None)
