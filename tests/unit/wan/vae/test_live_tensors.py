"""`TensorMemoryTracker` on the CPU and on `meta`."""

from __future__ import annotations

import pytest
import torch

from wanstream.wan.vae.memory import TensorMemoryTracker

KB = 1024


@pytest.mark.parametrize("device", ["cpu", "meta"])
class TestCounting:
    def test_freed_tensors_are_not_counted(self, device: str) -> None:
        with TensorMemoryTracker() as tracker:
            first = torch.zeros(KB, device=device)
            second = first + 1
            del first
            third = second * 2
            assert tracker.now == 2 * 4 * KB
        assert tracker.peak == 2 * 4 * KB
        del second, third
        assert tracker.now == 0

    def test_views_and_earlier_tensors_are_free(self, device: str) -> None:
        given = torch.zeros(4 * KB, device=device)
        with TensorMemoryTracker() as tracker:
            view = given.view(2, -1)[0]
            assert tracker.now == 0
            made = view.clone()
            part = made[:10]
            del made
            assert tracker.now == 2 * 4 * KB, "a view keeps its storage alive"
            del part
            assert tracker.now == 0

    def test_a_change_in_place_allocates_nothing(self, device: str) -> None:
        given = torch.zeros(KB, device=device)
        with TensorMemoryTracker() as tracker:
            given.add_(1).mul_(2)
        assert tracker.peak == 0

    def test_a_convolution_may_copy_what_it_reads_and_writes(self, device: str) -> None:
        given = torch.zeros(1, 2, 8, 8, 8, device=device)
        layer = torch.nn.Conv3d(2, 4, 1, device=device).requires_grad_(False)
        with torch.no_grad(), TensorMemoryTracker() as tracker:
            made = layer(given)
        assert tracker.peak == made.nbytes
        assert tracker.convolution_peak == 2 * made.nbytes + given.nbytes
