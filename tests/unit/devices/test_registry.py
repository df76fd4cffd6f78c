"""Runtimes by device type."""

from __future__ import annotations

import pytest
import torch

from wanstream.devices import registry


@pytest.mark.parametrize("family", ["cuda", "xpu"])
def test_devices_of_one_type_share_their_locked_pages(family: str) -> None:
    one, other = (registry.runtime_for(torch.device(family, index)) for index in range(2))
    assert one is not None
    assert other is not None
    assert one.shared_pages._pages is other.shared_pages._pages is registry.LOCKED_PAGES[family]
