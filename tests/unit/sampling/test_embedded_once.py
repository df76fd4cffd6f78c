"""Runs that embed times and texts once.

Bytes read, with and without chunks.
"""

from __future__ import annotations

import pytest
import torch

from wanstream.sampling.inputs import DenoiseRequest
from wanstream.tests.support.sampling.runs import LAYERWISE, changed_request, run
from wanstream.wan import ExpertPair
from wanstream.wan.checkpoint.meta_model import embedder_part


def _bytes_of(pair: ExpertPair, part: str) -> int:
    """Return an embedder part's bytes in both experts."""
    weights = [item for each in (pair.high, pair.low) for item in each.weights.items()]
    return sum(tensor.nbytes for name, tensor in weights if embedder_part(name) == part)


@pytest.mark.slow  # several loop runs
def test_embedders_are_read_for_new_texts_and_times_only(open_pair, make_request):
    pair = open_pair(dtype=torch.bfloat16)
    request = make_request(batch=2)
    times, texts = (_bytes_of(pair, part) for part in ("time", "text"))

    def read(request: DenoiseRequest) -> int:
        return run(pair, request).timeline.non_block_bytes

    assert read(request) > times + texts
    assert read(make_request(batch=2)) == 0
    assert read(changed_request(request, positive=request.positive + 1)) == texts
    assert read(make_request(batch=2, steps=6)) == times + texts


def test_embedding_weights_are_gone_before_the_first_block(open_pair, make_request):
    pair, there = open_pair(), list[bool]()
    models = pair.engine(LAYERWISE, "cpu").models
    for name, stack in models.blocks.items():
        embedder = models.bare[name].condition_embedder
        stack[0].register_forward_pre_hook(
            lambda *_, embedder=embedder: there.extend(not p.is_meta for p in embedder.parameters())
        )
    run(pair, make_request())
    assert there
    assert not any(there)
