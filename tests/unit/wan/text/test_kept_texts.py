"""Text embedding cache: bit-equality, invalidation by replaced files, bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.files import Folders
from wanstream.wan.text import open_text_encoder
from wanstream.wan.text.embedding_cache import EmbeddingCache

CPU = torch.device("cpu")


class CountedEncoder:
    """Encoder that embeds a text letter by letter and records the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, path: Path, **_: object) -> Any:
        return self

    def __enter__(self) -> CountedEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode(
        self, texts: Sequence[str], *, device: torch.device, check: Callable[[], None]
    ) -> list[torch.Tensor]:
        self.calls.append(list(texts))
        embeddings = [torch.zeros(1, 16, 4) for _ in texts]
        for text, embedding in zip(texts, embeddings, strict=True):
            embedding[0, : len(text)] = torch.tensor([ord(letter) for letter in text])[
                :, None
            ].float()
        return embeddings


@pytest.fixture
def kept(tmp_path: Path) -> SimpleNamespace:
    path, encoder = tmp_path / "encoder.safetensors", CountedEncoder()
    path.touch()
    return SimpleNamespace(
        path=path,
        encoder=encoder,
        texts=EmbeddingCache(max_bytes=16 * 4 * 4 * 2, open_encoder=encoder),
    )


def test_equal_texts_are_encoded_once_and_only_new_ones_again(kept: SimpleNamespace) -> None:
    first = kept.texts.encode(kept.path, ["boat", "blurry"], device=CPU)
    first[0].zero_()
    again = kept.texts.encode(kept.path, ["boat", "blurry"], device=CPU)
    other = kept.texts.encode(kept.path, ["car", "blurry"], device=CPU)
    same = kept.texts.encode(kept.path, ["car", "car"], device=CPU)
    assert kept.encoder.calls == [["boat", "blurry"], ["car"]]
    assert [tuple(embedding.shape) for embedding in (*again, *other, *same)] == [(1, 16, 4)] * 6
    assert again[0][0, :5, 0].tolist() == [*map(ord, "boat"), 0], (
        "a caller may change its embeddings"
    )
    assert torch.equal(other[1], again[1])


def test_a_replaced_encoder_and_another_device_encode_again(kept: SimpleNamespace) -> None:
    kept.texts.encode(kept.path, ["boat"], device=CPU)
    os.utime(kept.path, ns=(1, 1))
    kept.texts.encode(kept.path, ["boat"], device=CPU)
    kept.texts.encode(kept.path, ["boat"], device=torch.device("meta"))
    assert len(kept.encoder.calls) == 3


def test_memory_is_bounded_and_the_least_recent_text_goes(kept: SimpleNamespace) -> None:
    for text in ("a" * 10, "b" * 10, "c" * 10, "a" * 10, "d" * 10, "a" * 10):
        kept.texts.encode(kept.path, [text], device=CPU)
        assert kept.texts.nbytes <= 16 * 4 * 4 * 2
    assert [call[0][0] for call in kept.encoder.calls] == ["a", "b", "c", "d"]


def test_an_empty_embedding_is_kept_too(kept: SimpleNamespace) -> None:
    for _ in range(2):
        (embedding,) = kept.texts.encode(kept.path, [""], device=CPU)
        assert not embedding.any()
    assert len(kept.encoder.calls) == 1


@pytest.mark.slow  # several whole models
def test_embeddings_are_those_of_the_encoder_to_the_bit(tiny_pipeline: Callable[..., Path]) -> None:
    folder, texts = tiny_pipeline(), ["a boat at dawn", "blurry", ""]
    with open_text_encoder(folder) as encoder:
        expected = encoder.encode(texts, device=CPU)
    kept = EmbeddingCache()
    kept.encode(folder, texts[1:], device=CPU)
    for found in (kept.encode(folder, texts, device=CPU), kept.encode(folder, texts, device=CPU)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_tokenizer_of_a_folder_counts_too(
    tiny_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    for part in ("text_encoder", "tokenizer"):
        (tmp_path / part).mkdir()
        for file in (tiny_pipeline() / part).iterdir():
            (tmp_path / part / file.name).write_bytes(file.read_bytes())
    encoder = CountedEncoder()
    kept = EmbeddingCache(open_encoder=encoder)
    kept.encode(tmp_path, ["boat"], device=CPU)
    kept.encode(tmp_path, ["boat"], device=CPU)
    assert len(encoder.calls) == 1
    os.utime(next((tmp_path / "tokenizer").iterdir()), ns=(1, 1))
    kept.encode(tmp_path, ["boat"], device=CPU)
    assert len(encoder.calls) == 2


def test_the_embedded_host_keeps_texts_from_run_to_run(
    tiny_pipeline: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def counted(path: Path, **options: Any) -> object:
        opened.append(path)
        return open_text_encoder(path, **options)

    monkeypatch.setattr(
        EmbeddingCache.__init__, "__kwdefaults__", {"max_bytes": 1 << 20, "open_encoder": counted}
    )
    host = EmbeddedHost()
    for _ in range(2):
        with host.opened(Folders(models=tmp_path, output=tmp_path, input=tmp_path), device=CPU):
            host.models.encode_texts(tiny_pipeline(), ["boat", "blurry"])
    assert opened == [tiny_pipeline()]
