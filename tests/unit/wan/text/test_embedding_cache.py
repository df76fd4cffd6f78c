"""Text embedding cache: bit-equality, invalidation by replaced files, bounded memory."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext

import pytest
import torch

from wanstream.host.embedded import EmbeddedHost, Folders
from wanstream.wan.text import EmbeddingCache, open_text_encoder

CPU = torch.device("cpu")


class CountedEncoder:
    """Encoder that embeds a text letter by letter and records the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts, **_):
        self.calls.append(list(texts))
        embeddings = [torch.zeros(1, 16, 4) for _ in texts]
        for text, embedding in zip(texts, embeddings, strict=True):
            embedding[0, : len(text)] = torch.tensor([*map(ord, text)])[:, None].float()
        return embeddings


@pytest.fixture
def encoder():
    return CountedEncoder()


@pytest.fixture
def kept(encoder):
    opened = lambda *_, **__: nullcontext(encoder)  # noqa: E731
    return EmbeddingCache(max_bytes=16 * 4 * 4 * 2, open_encoder=opened)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "encoder.safetensors").touch()
    return tmp_path / "encoder.safetensors"


def test_equal_texts_are_encoded_once(kept, path, encoder):
    kept.encode(path, ["boat", "blurry"], device=CPU)[0].zero_()
    again = kept.encode(path, ["boat", "blurry"], device=CPU)
    other = kept.encode(path, ["car", "blurry"], device=CPU)
    same = kept.encode(path, ["car", "car"], device=CPU)
    assert encoder.calls == [["boat", "blurry"], ["car"]]
    assert [tuple(embedding.shape) for embedding in (*again, *other, *same)] == [(1, 16, 4)] * 6
    boat = [*map(ord, "boat"), 0]
    assert again[0][0, :5, 0].tolist() == boat, "a caller may change its embeddings"
    assert torch.equal(other[1], again[1])
    for _ in range(2):
        (empty,) = kept.encode(path, [""], device=CPU)
        assert not empty.any()
    assert len(encoder.calls) == 3


def test_replaced_encoder_and_another_device_encode_again(kept, path, encoder):
    kept.encode(path, ["boat"], device=CPU)
    os.utime(path, ns=(1, 1))
    kept.encode(path, ["boat"], device=CPU)
    kept.encode(path, ["boat"], device=torch.device("meta"))
    assert len(encoder.calls) == 3


def test_least_recent_text_is_dropped(kept, path, encoder):
    for letter in "abcada":
        kept.encode(path, [letter * 10], device=CPU)
        assert kept.nbytes <= 16 * 4 * 4 * 2
    assert [call[0][0] for call in encoder.calls] == ["a", "b", "c", "d"]


def test_tokenizer_of_a_folder_counts_too(tiny_pipeline, tmp_path, kept, encoder):
    folder = shutil.copytree(tiny_pipeline(), tmp_path / "pipeline")
    for _ in range(2):
        kept.encode(folder, ["boat"], device=CPU)
    assert len(encoder.calls) == 1
    os.utime(next((folder / "tokenizer").iterdir()), ns=(1, 1))
    kept.encode(folder, ["boat"], device=CPU)
    assert len(encoder.calls) == 2


def test_embedded_host_keeps_texts_from_run_to_run(tiny_pipeline, tmp_path, monkeypatch):
    opened = []

    def counted(path, **options):
        opened.append(path)
        return open_text_encoder(path, **options)

    defaults = {"max_bytes": 1 << 20, "open_encoder": counted}
    monkeypatch.setattr(EmbeddingCache.__init__, "__kwdefaults__", defaults)
    host = EmbeddedHost()
    folders = Folders(models=tmp_path, output=tmp_path, input=tmp_path)
    for _ in range(2):
        with host.opened(folders, device=CPU):
            host.models.encode_texts(tiny_pipeline(), ["boat", "blurry"])
    assert opened == [tiny_pipeline()]
