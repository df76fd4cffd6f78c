"""RAM for loading a checkpoint and two steps with its MODEL, and for a text encoder and a text.

python benchmarks/native/checkpoint_memory.py

Each way runs in a separate process, in ComfyUI's Python (`COMFYUI_PATH`, `COMFYUI_PYTHON`). The
process's anonymous memory is sampled every 5 ms.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from comfyui_process import INSIDE, enter_comfyui, run_in_comfyui

ENCODERS = {
    "umt5": {
        "num_layers": 8, "num_heads": 32, "d_kv": 64, "d_ff": 8192, "d_model": 2048,
        "vocab_size": 50_000,
    },
    "qwen3-vl, 36 layers": {"hidden_size": 2560, "intermediate_size": 2048, "vocab_size": 50_000},
    "gemma3, 48 layers": {"intermediate_size": 4096, "vocab_size": 50_000},
}  # fmt: skip
"""Sizes of encoders: a UMT5 with few blocks, and others in real depth with thin layers."""
LOADERS = ("ComfyUI's loader", "streamed")
CHECKPOINTS = ("checkpoint", "checkpoint with UMT5 and VAE")
WAYS = (
    *(f"{name}: {loader}" for name in (*CHECKPOINTS, *ENCODERS) for loader in LOADERS),
    "checkpoint: ComfyUI's loader and Stream Model",
)
WRITE = "write"
SECONDS = 0.005


def anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    # RssAnon leaves out mapped files: the kernel can drop their pages at any time.
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Measure the memory added in the `with` body: the peak, and the rest afterwards."""
    before = anonymous_mib()
    found = {"peak": 0.0}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SECONDS):
            found["peak"] = max(found["peak"], anonymous_mib() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        # Freed tensors below 32 MB stay in the process's heap.
        ctypes.CDLL(None).malloc_trim(0)
        found["afterwards"] = anonymous_mib() - before
        ended.set()
        thread.join()


def family() -> Any:
    """Return a Wan model with 8 blocks, 67 MB each in fp32."""
    from inside import families

    settings = {"model_type": "t2v", "dim": 1024, "layers": 8}
    found = families._wan_family("wan_mid", "WAN21", "model.WanModel", **settings)
    return replace(found, sizes=((1, 16, 1, 16, 16),))


def write(folder: Path) -> None:
    """Write the checkpoints and the encoders. An encoder's file is in a folder of its name."""
    from inside.tiny_encoders import thin_encoders
    from safetensors.torch import load_file, save_file

    with thin_encoders():
        for name in ENCODERS:
            (folder / name).mkdir()
            encoder(name).write(folder / name)
    of_model = family()
    weights = of_model.weights()
    stored = {f"model.diffusion_model.{of_model.key(key)}": each for key, each in weights.items()}
    save_file(stored, folder / "checkpoint.safetensors")
    text = load_file(folder / "umt5" / "umt5xxl.safetensors")
    stored |= {f"text_encoders.umt5xxl.transformer.{key}": each for key, each in text.items()}
    stored |= {f"vae.{key}": each for key, each in vae().items()}
    save_file(stored, folder / "checkpoint with UMT5 and VAE.safetensors")


def encoder(name: str) -> Any:
    from inside.tiny_encoders import CANDIDATES, _gemma_3

    found = _gemma_3(48, width=1024) if name.startswith("gemma3") else CANDIDATES[name]
    config = {part: {**sizes, **ENCODERS[name]} for part, sizes in found.config.items()}
    return replace(found, config=config)


def vae() -> dict[str, Any]:
    """Return the weights of Wan's VAE in fp16."""
    from comfy.ldm.wan.vae import WanVAE

    return {key: each.half() for key, each in WanVAE(dim=96, z_dim=16).state_dict().items()}


def run(way: str, folder: Path) -> dict[str, float]:
    """Return the figures for one way."""
    import comfy.text_encoders.wan
    import torch
    from inside.tiny_encoders import thin_encoders

    name, _, loader = way.partition(": ")
    thin = partial(_thin_umt5, comfy.text_encoders.wan.UMT5XXlModel)
    with (
        torch.inference_mode(),
        thin_encoders(),
        patch.object(comfy.text_encoders.wan, "UMT5XXlModel", thin),
    ):
        if name in CHECKPOINTS:
            return _checkpoint(loader, folder / f"{name}.safetensors")
        (path,) = (folder / name).iterdir()
        return _encoder(loader, path, encoder(name))


def _thin_umt5(own: Any, *, model_options: Any, **settings: Any) -> Any:
    """Make the text encoder of a checkpoint, whose loader takes no options for it."""
    return own(model_options={**model_options, **encoder("umt5").options}, **settings)


def _checkpoint(loader: str, path: Path) -> dict[str, float]:
    import comfy.sd
    from inside.families import sample

    from wanstream.host import current_host
    from wanstream.host.comfy.native.load import load_checkpoint
    from wanstream.host.comfy.native.stream_model import ModelStreamer
    from wanstream.host.native_models import ModelStreaming
    from wanstream.schema import OffloadPolicy

    limits = {"smallest_block": 30_000, "smallest_model": 1_000}
    streaming = ModelStreaming(policy=OffloadPolicy.layerwise(1))
    with measured() as found:
        if loader == "streamed":
            parts = load_checkpoint(path, streaming, current_host(), limits)
            model = parts.model
            clip = parts.clip
        else:
            # Kept, as in ComfyUI's node cache.
            own = comfy.sd.load_checkpoint_guess_config(str(path))
            model, clip = own[:2]
        if loader.endswith("Stream Model"):
            model = ModelStreamer(current_host()).stream(model, streaming, **limits)
        loaded = anonymous_mib()
        sample(model, family(), steps=2, cfg=1.0)
        found["in steps"] = anonymous_mib() - loaded
        if clip is not None:
            _encode(clip, encoder("umt5"))
    return found


def _encoder(loader: str, path: Path, of_text: Any) -> dict[str, float]:
    from wanstream.host.comfy.native.encoders import load_encoders
    from wanstream.host.native_models import EncoderFiles
    from wanstream.schema import OffloadPolicy

    limits = {"smallest_block": 30_000, "smallest_model": 1_000}
    with measured() as found:
        if loader == "streamed":
            files = EncoderFiles(paths=(path,), kind=of_text.kind)
            clip = load_encoders(files, OffloadPolicy.layerwise(), limits, of_text.options)
        else:
            clip = of_text.load((path,))
        _encode(clip, of_text)
    return found


def _encode(clip: Any, of_text: Any) -> None:
    for _ in range(2):
        clip.encode_from_tokens(of_text.prompt(90))


def in_comfyui(way: str, folder: Path) -> None:
    """Write the files, or measure one way, in ComfyUI's Python."""
    versions = enter_comfyui("--base-directory", str(folder / "base"))
    figures = {}
    if way == WRITE:
        write(folder)
    else:
        figures = {name: round(value) for name, value in run(way, folder).items()}
    print(json.dumps({"figures": figures, "versions": versions}))


def main() -> None:
    """Measure all ways and save the figures."""
    from wanstream.bench.results import versions
    from wanstream.benchmarks.record import record

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "base").mkdir()
        # A separate process writes the files, so the writer's memory is not counted later.
        run_in_comfyui(__file__, WRITE, folder)
        for way in WAYS:
            found = run_in_comfyui(__file__, way, folder)
            figures[way] = found["figures"]
            print(f"{way}: {figures[way]}", flush=True)
        sizes = {
            path.stem: round(path.stat().st_size / 1e6)
            for path in Path(folder).rglob("*.safetensors")
        }
    path = record(
        "checkpoint-memory",
        method="anonymous memory of a process beyond that before loading, in MiB, sampled every 5 "
        "ms, and afterwards without the freed heap: a Wan model of 8 blocks in fp32 below the "
        "prefix of checkpoints, loaded and sampled in 2 steps at CFG 1, alone and with the UMT5 "
        "and a VAE of Wan in fp16 in the file; a UMT5 of 8 blocks, a Qwen3-VL of 36 and a Gemma 3 "
        "of 48 thin layers in fp16, loaded, and two texts of 90 tokens encoded; layerwise with "
        "one block ahead from disk",
        figures={"file_mb": sizes, "anonymous_mib": figures},
        versions={**versions(libraries=()), **found["versions"]},
    )
    print(path)


if __name__ == "__main__":
    # `enter_comfyui` replaces the arguments, so they are read here.
    in_comfyui(sys.argv[2], Path(sys.argv[3])) if INSIDE in sys.argv else main()
