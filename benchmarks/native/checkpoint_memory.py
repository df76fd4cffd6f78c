"""RAM for loading a checkpoint and two steps with its MODEL, and for a text encoder and a text.

python benchmarks/native/checkpoint_memory.py

Each way runs in a separate process, in ComfyUI's Python (`COMFYUI_PATH`, `COMFYUI_PYTHON`). The
process's anonymous memory is sampled every 5 ms.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfyui_process import INSIDE, enter_comfyui, run_in_comfyui

WAYS = (
    "checkpoint: ComfyUI's loader",
    "checkpoint: ComfyUI's loader and Stream Model",
    "checkpoint: streamed",
    "encoder: ComfyUI's loader",
    "encoder: streamed",
)
WRITE = "write"
SECONDS = 0.005


def anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
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
        found["afterwards"] = anonymous_mib() - before
        ended.set()
        thread.join()


def family() -> Any:
    """Return a Wan model with 8 blocks, 67 MB each in fp32."""
    import native_families

    settings = {"model_type": "t2v", "dim": 1024, "layers": 8}
    found = native_families._wan_family("wan_mid", "WAN21", "model.WanModel", **settings)
    return replace(found, sizes=((1, 16, 1, 16, 16),))


def write(folder: Path) -> None:
    """Write the checkpoint, and a UMT5 with 8 blocks, 134 MB each in fp16."""
    from safetensors.torch import save_file
    from tiny_encoders import thin_encoders

    of_model = family()
    weights = of_model.weights()
    stored = {f"model.diffusion_model.{of_model.key(key)}": each for key, each in weights.items()}
    save_file(stored, folder / "checkpoint.safetensors")
    with thin_encoders():
        encoder().write(folder)


def encoder() -> Any:
    from tiny_encoders import CANDIDATES

    sizes = {"num_layers": 8, "num_heads": 32, "d_kv": 64, "d_ff": 8192, "d_model": 2048}
    config = {"umt5xxl": {**sizes, "vocab_size": 50_000}}
    return replace(CANDIDATES["umt5"], config=config)


def run(way: str, folder: Path) -> dict[str, float]:
    """Return the figures for one way."""
    import torch
    from tiny_encoders import thin_encoders

    with torch.inference_mode():
        if way.startswith("checkpoint"):
            return _checkpoint(way, folder / "checkpoint.safetensors")
        with thin_encoders():
            return _encoder(way, folder / "umt5xxl.safetensors")


def _checkpoint(way: str, path: Path) -> dict[str, float]:
    import comfy.sd
    from native_families import sample

    from wanstream.host import current_host
    from wanstream.host.comfy.native.load import load_checkpoint
    from wanstream.host.comfy.native.stream_model import ModelStreamer
    from wanstream.host.native_models import ModelStreaming
    from wanstream.schema import OffloadPolicy

    limits = {"smallest_block": 30_000, "smallest_model": 1_000}
    streaming = ModelStreaming(policy=OffloadPolicy.layerwise(1))
    with measured() as found:
        if way.endswith(" streamed"):
            model = load_checkpoint(path, streaming, current_host(), limits).model
        else:
            # Kept, as in ComfyUI's node cache.
            own = comfy.sd.load_checkpoint_guess_config(str(path))[0]
            model = own
        if way.endswith("Stream Model"):
            model = ModelStreamer(current_host()).stream(own, streaming, **limits)
        loaded = anonymous_mib()
        sample(model, family(), steps=2, cfg=1.0)
        found["in steps"] = anonymous_mib() - loaded
    return found


def _encoder(way: str, path: Path) -> dict[str, float]:
    from wanstream.host.comfy.native.encoders import load_encoders
    from wanstream.host.native_models import EncoderFiles
    from wanstream.schema import OffloadPolicy

    of_text = encoder()
    limits = {"smallest_block": 30_000, "smallest_model": 1_000}
    with measured() as found:
        if way.endswith(" streamed"):
            files = EncoderFiles(paths=(path,), kind=of_text.kind)
            clip = load_encoders(files, OffloadPolicy.layerwise(), limits, of_text.options)
        else:
            clip = of_text.load((path,))
        for _ in range(2):
            clip.encode_from_tokens(of_text.prompt(90))
    return found


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
        run_in_comfyui(__file__, WRITE, folder)
        for way in WAYS:
            found = run_in_comfyui(__file__, way, folder)
            figures[way] = found["figures"]
            print(f"{way}: {figures[way]}", flush=True)
        sizes = {
            path.stem: round(path.stat().st_size / 1e6)
            for path in Path(folder).glob("*.safetensors")
        }
    path = record(
        "checkpoint-memory",
        method="anonymous memory of a process beyond that before loading, in MiB, sampled every 5 "
        "ms: a Wan model of 8 blocks in fp32 below the prefix of checkpoints, loaded and sampled "
        "in 2 steps at CFG 1; a UMT5 of 8 blocks in fp16, loaded, and two texts of 90 tokens "
        "encoded; layerwise with one block ahead from disk",
        figures={"file_mb": sizes, "anonymous_mib": figures},
        versions={**versions(libraries=()), **found["versions"]},
    )
    print(path)


if __name__ == "__main__":
    in_comfyui(sys.argv[2], Path(sys.argv[3])) if INSIDE in sys.argv else main()
