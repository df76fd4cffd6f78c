"""Nodes for servers whose memory is tested."""

import ctypes
import gc
import hashlib

import comfy.model_management
import psutil
import torch


class TestHeld:
    """Process memory after the prompt, without garbage and the allocator's free lists."""

    RETURN_TYPES = ()
    FUNCTION = "report"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, latent):
        return float("nan")

    def report(self, latent):
        gc.collect()
        if hasattr(trim := ctypes.CDLL(None), "malloc_trim"):
            trim.malloc_trim(0)
        digest = hashlib.sha1(latent["samples"].contiguous().numpy().tobytes()).hexdigest()
        models = comfy.model_management.current_loaded_models
        loaded = [type(model.model).__name__ for model in models]
        rss = psutil.Process().memory_info().rss
        return {"ui": {"rss": [rss], "latent": [digest], "loaded": loaded}}


class TestTakeDevice:
    """Takes all but `leave` device bytes until the next prompt, and passes a latent on."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "take"
    CATEGORY = "test"
    taken = None

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"leave": ("INT", {"default": 0, "max": 2**62}), "latent": ("LATENT",)}}

    def take(self, leave, latent):
        device = comfy.model_management.get_torch_device()
        nbytes = max(0, int(comfy.model_management.get_free_memory(device)) - leave)
        self.taken = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return (latent,)


NODE_CLASS_MAPPINGS = {"TestHeld": TestHeld, "TestTakeDevice": TestTakeDevice}
