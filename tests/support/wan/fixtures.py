"""Fixtures: a lane, and LoRA files in the spellings that diffusers reads."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream import block_kernels
from wanstream.testing.experts import make_lora
from wanstream.tests.support.offload.edited_files import rewrite
from wanstream.wan import ExpertEngine, Lane
from wanstream.wan.checkpoint.key_names import native_transformer_name

Tensors = dict[str, torch.Tensor]
RANK = 4
ALPHA = 2.0


@dataclass(frozen=True, kw_only=True)
class Style:
    """A trainer's key spelling. Without `alpha` the scale is folded into the factors."""

    prefix: str = "diffusion_model."
    down: str = ".lora_down.weight"
    up: str = ".lora_up.weight"
    bias: str = ".diff_b"
    alpha: bool = True
    native: bool = True
    dot: str = "."

    def layer(self, name: str) -> str:
        if self.native:
            name = native_transformer_name(f"{name}.weight").removesuffix(".weight")
        return self.prefix + name.replace(".", self.dot)


AB = {"down": ".lora_A.weight", "up": ".lora_B.weight"}
STYLES = {
    "lightning": Style(),
    "lora_A": Style(**AB),
    "lora_A without alpha": Style(**AB, alpha=False),
    "musubi": Style(prefix="lora_unet_", dot="_"),
    "diffusers": Style(prefix="transformer.", **AB, bias=".lora_B.bias", alpha=False, native=False),
}


def spelt(lora: Tensors, style: Style, *, biases: bool) -> Tensors:
    """Return a lightning LoRA with another style's keys.

    Alpha / rank is a power of two, so values are exact.
    """
    names = {Style().layer(name): name for name in _layers(lora)}
    tensors: Tensors = {}
    for key, tensor in lora.items():
        native, _, ending = key.removesuffix(".weight").rpartition(".")
        layer = style.layer(names[native])
        if ending == "lora_down":
            tensors[layer + style.down] = tensor
        elif ending == "lora_up":
            tensors[layer + style.up] = tensor if style.alpha else tensor * (ALPHA / RANK)
        elif ending == "alpha" and style.alpha:
            tensors[f"{layer}.alpha"] = tensor
        elif ending == "diff_b" and biases:
            tensors[layer + style.bias] = tensor
    return tensors


def _layers(lora: Tensors) -> list[str]:
    layers = [f"attn{n}.{p}" for n in (1, 2) for p in ("to_q", "to_k", "to_v", "to_out.0")]
    layers += ["ffn.net.0.proj", "ffn.net.2"]
    blocks = sorted({key.split(".")[2] for key in lora})
    return [f"blocks.{block}.{layer}" for block in blocks for layer in layers]


@pytest.fixture(scope="session")
def lane():
    """A T2V lane with 2 x 2 x 3 patches and 5 tokens."""
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 2, 4, 6, generator=draw)
    return Lane(latents=latents, text=torch.randn(1, 5, 4096, generator=draw))


@pytest.fixture
def equal_bf16_rows(monkeypatch):
    """Multiply bf16 without oneDNN, whose kernels depend on the number of rows.

    They do so most of all on a processor with AMX.

    With them the last bits differ between a chunk and all tokens at once.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture
def changed_expert(tiny_expert_file, tmp_path):
    """`changed_expert(change, metadata=None, **file)`: a changed copy of a tiny expert file."""

    return lambda change, metadata=None, **file: rewrite(
        tiny_expert_file(**file), tmp_path / "changed.safetensors", change, metadata
    )


@pytest.fixture
def lightning(make_tiny_expert):
    """`lightning(seed=0, **shape)`: a lightning LoRA's tensors for a tiny expert.

    They are in fp32, with rank 4 and alpha 2.
    """
    given = {"rank": RANK, "alpha": ALPHA}
    return lambda seed=0, **shape: make_lora(make_tiny_expert(**shape), seed=seed, **given)


@pytest.fixture
def lora_file(tmp_path, lightning):
    """Return a function that writes a LoRA file and returns the path.

    `lora_file(tensors=None, seed=0, style="lightning", biases=True)` is the call.
    """
    count = iter(range(1000))

    def write(tensors=None, *, seed=0, style="lightning", biases=True):
        path = tmp_path / f"lora_{next(count)}.safetensors"
        if tensors is None:
            tensors = spelt(lightning(seed=seed), STYLES[style], biases=biases)
        stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(stored, path, {"format": "pt"})
        return path

    return write


def wait_for_embedders(engine: ExpertEngine) -> int:
    """Wait for the submitted reads and return the RAM bytes of embedder weights.

    The weights are read and not used yet.
    """
    models = engine.models
    models._reader.submit(int).result()
    reads = [read for (_, part), read in models._reads.items() if part is not None]
    return sum(tensor.nbytes for read in reads for tensor in read.result()[0].values())


@pytest.fixture(scope="module")
def triton_math():
    """The module with Triton's set, with kernels for Triton's interpreter."""
    pytest.importorskip("triton")
    folder = Path(block_kernels.__file__).parent
    package = "wanstream.block_kernels"
    own = ("triton_rows", "triton_math")

    def imported() -> list[str]:
        """Triton modules written in Python."""
        parts = (name.split(".") for name in sys.modules)
        return [".".join(each) for each in parts if each[0] == "triton" and each[1:2] != ["_C"]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in imported():  # Triton makes functions for the interpreter on import
            patch.delitem(sys.modules, name)
        for name in own:
            whole = f"{package}.{name}"
            spec = importlib.util.spec_from_file_location(whole, folder / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            patch.setitem(sys.modules, whole, importlib.util.module_from_spec(spec))
            spec.loader.exec_module(sys.modules[whole])
        yield sys.modules[f"{package}.triton_math"]
        for name in imported():
            del sys.modules[name]
