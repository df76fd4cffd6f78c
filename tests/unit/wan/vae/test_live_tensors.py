"""Bytes of tensors that are alive at once, counted where nothing is computed too."""

from __future__ import annotations

import pytest
import torch

from wanstream.wan.vae.memory import TensorMemoryTracker

KB = 1024


@pytest.mark.parametrize("device", ["cpu", "meta"])
class TestCounting:
    def test_what_has_ended_is_counted_no_more(self, device: str) -> None:
        with TensorMemoryTracker() as counted:
            first = torch.zeros(KB, device=device)
            second = first + 1
            del first
            third = second * 2
            assert counted.now == 2 * 4 * KB
        assert counted.peak == 2 * 4 * KB
        del second, third
        assert counted.now == 0

    def test_views_and_what_was_there_before_cost_nothing(self, device: str) -> None:
        given = torch.zeros(4 * KB, device=device)
        with TensorMemoryTracker() as counted:
            view = given.view(2, -1)[0]
            assert counted.now == 0
            made = view.clone()
            part = made[:10]
            del made
            assert counted.now == 2 * 4 * KB, "a part holds the whole"
            del part
            assert counted.now == 0

    def test_a_change_in_place_makes_nothing(self, device: str) -> None:
        given = torch.zeros(KB, device=device)
        with TensorMemoryTracker() as counted:
            given.add_(1).mul_(2)
        assert counted.peak == 0

    def test_a_convolution_may_copy_what_it_reads_and_writes(self, device: str) -> None:
        given = torch.zeros(1, 2, 8, 8, 8, device=device)
        layer = torch.nn.Conv3d(2, 4, 1, device=device).requires_grad_(False)
        with torch.no_grad(), TensorMemoryTracker() as counted:
            made = layer(given)
        assert counted.peak == made.nbytes
        assert counted.convolution_peak == 2 * made.nbytes + given.nbytes
