"""split_request: the samples are unchanged, and merge_requests restores the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise, run_digest
from wanstream.sampling.inputs import DenoiseRequest, merge_requests, split_request
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair

SHAPE = (3, 16, 2, 4, 6)

Request = Callable[..., DenoiseRequest]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def texts_of_own_lengths(seed: int) -> list[torch.Tensor]:
    return [normal(1, 3 + number, 4096, seed=seed + number) for number in range(3)]


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "texts of own lengths": (
        {
            "positive": texts_of_own_lengths(20),
            "negative": texts_of_own_lengths(30),
            "solver": "unipc",
        },
        {},
    ),
    "a text for all": (
        {"positive": normal(1, 7, 4096, seed=40), "negative": normal(1, 4, 4096, seed=41)},
        {},
    ),
    "an image for each": (
        {"image_condition": normal(3, 20, *SHAPE[2:], seed=50)},
        {"in_channels": 36},
    ),
    "an image for all": (
        {"image_condition": normal(1, 20, *SHAPE[2:], seed=50)},
        {"in_channels": 36},
    ),
    "latents and masks": (
        {
            "latent": normal(*SHAPE, seed=60),
            "mask": (normal(3, 1, *SHAPE[2:], seed=61) > 0).float(),
            "start_step": 1,
        },
        {},
    ),
    "without a negative": ({"negative": None, "guidance": (1.0, 1.0)}, {}),
}


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("case", "sizes"), [(case, ((1, 2), (1, 1, 1))[at % 2]) for at, case in enumerate(CASES)]
)
def test_parts_make_the_samples_of_the_whole_to_the_bit(
    case: str, sizes: Sequence[int], open_pair: Callable[..., ExpertPair], make_request: Request
) -> None:
    changes, shape = CASES[case]
    request = make_request(batch=3, steps=3, switch_step=2, **changes)
    with open_pair(**shape) as pair:
        policy = OffloadPolicy.layerwise(1)
        whole = denoise(pair, request, policy=policy, device="cpu").latents
        parts = split_request(request, sizes)
        assert [part.batch for part in parts] == list(sizes)
        made = [denoise(pair, part, policy=policy, device="cpu").latents for part in parts]
        assert torch.equal(torch.cat(made), whole)
        assert torch.equal(
            denoise(pair, merge_requests(parts), policy=policy, device="cpu").latents, whole
        )


def test_a_part_carries_nothing_of_the_others(make_request: Request) -> None:
    for part in split_request(make_request(batch=3), (1, 1, 1)):
        for tensor in (part.noise, part.positive, part.negative):
            assert isinstance(tensor, torch.Tensor)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("given", [1, 3])
def test_a_part_sees_the_images_of_its_samples(given: int, make_request: Request) -> None:
    seen = normal(given, 257, 1280, seed=70)
    parts = split_request(make_request(batch=3, image_embedding=seen), (1, 2))
    expected = [seen, seen] if given == 1 else [seen[:1], seen[1:]]
    for part, own in zip(parts, expected, strict=True):
        assert part.inputs.image_embedding is not None
        assert torch.equal(part.inputs.image_embedding, own)
        assert part.inputs.image_embedding.untyped_storage().nbytes() == own.nbytes


def test_all_samples_are_the_request_itself(make_request: Request) -> None:
    request = make_request(batch=3)
    assert split_request(request, (3,)) == [request]
    assert run_digest(request, "") != run_digest(split_request(request, (1, 2))[1], "")


@pytest.mark.parametrize("sizes", [(), (1, 1), (4,), (0, 3), (-1, 4)])
def test_sizes_that_do_not_make_it_up_are_refused(
    sizes: Sequence[int], make_request: Request
) -> None:
    with pytest.raises(RequestError, match="the batch has 3 samples"):
        split_request(make_request(batch=3), sizes)
