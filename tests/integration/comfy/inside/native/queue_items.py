"""Runs in ComfyUI's own Python: the memory after queue items, in a process of its own."""

import gc
from dataclasses import replace

import comfy.model_management as mm
import psutil
import torch

from wanstream.schema import OffloadPolicy

from ..tiny_models import LIMITS, WAN, load_native, with_free
from .life import FREE, load_vae
from .models import halves

ITEMS = 5


def _resident_bytes():
    gc.collect()
    return psutil.Process().memory_info().rss


def check_queue_items_leave_no_memory_behind(folder):
    """The process's resident bytes are flat within 2 % after two items.

    By then all threads have their heaps. Between items a VAE evicts the experts. After the second
    item, `/free` runs and the models are dropped.
    """
    path = folder / "expert.safetensors"
    # A 200 MB file with six blocks.
    sizes = {"dim": 1024, "ffn_dim": 4096, "num_heads": 8, "num_layers": 6}
    replace(WAN, settings={**WAN.settings, **sizes}).write(path, "fp16")

    def experts():
        policy = OffloadPolicy.block_swap(4)
        return [load_native(path, "default", policy, **LIMITS) for _ in range(2)]

    models = experts()
    results = []
    loaded = []
    evicted = []
    for item in range(ITEMS):
        with with_free(FREE):
            results.append(halves(*models, WAN))
            loaded.append(_resident_bytes())
        with with_free(0):
            vae = load_vae()
        assert [model.loaded_size() for model in models] == [0, 0]
        if item == 1:
            mm.unload_all_models()
            models = []
            gc.collect()
            mm.soft_empty_cache()
            models = experts()
        del vae
        evicted.append(_resident_bytes())
    assert all(torch.equal(each, results[0]) for each in results)
    for sizes in (loaded[2:], evicted[2:]):
        assert max(sizes) <= 1.02 * min(sizes), (loaded, evicted)
    assert min(loaded) > 1.05 * max(evicted), "the experts show"
