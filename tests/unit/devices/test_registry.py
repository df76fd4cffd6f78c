"""Runtimes by device type."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from wanstream.devices import registry
from wanstream.devices.shared_pages import LockedPages


def test_devices_of_one_type_share_their_locked_pages_even_if_threads_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowPages(LockedPages):
        def __init__(self) -> None:
            time.sleep(0.02)
            super().__init__()

    monkeypatch.setattr(registry, "LockedPages", SlowPages)
    restore = registry.register_runtime("cuda", lambda device, pages: pages)  # type: ignore[arg-type, return-value]
    try:
        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(registry.runtime_for, (torch.device("cuda", index) for index in range(2)))
        assert one is other
    finally:
        restore()
