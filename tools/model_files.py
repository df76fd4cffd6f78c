"""Download addresses and folders of the model files that the shipped workflows name."""

from __future__ import annotations

from typing import NamedTuple

REPACKAGED = "https://huggingface.co/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
REPACKAGED_21 = "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"


class ModelFile(NamedTuple):
    """Model file: its name, its folder below ComfyUI's `models/`, and the address in ComfyUI's templates."""

    name: str
    directory: str
    url: str


def _file(repository: str, directory: str, name: str) -> ModelFile:
    return ModelFile(name, directory, f"{repository}/{directory}/{name}")


_ALL = (
    *(
        _file(REPACKAGED, "diffusion_models", f"wan2.2_{family}_{expert}_noise_14B_fp8_scaled.safetensors")
        for family in ("t2v", "i2v")
        for expert in ("high", "low")
    ),
    *(
        _file(REPACKAGED, "loras", f"wan2.2_{family}_lightx2v_4steps_lora_{version}_{expert}_noise.safetensors")
        for family, version in (("t2v", "v1.1"), ("i2v", "v1"))
        for expert in ("high", "low")
    ),
    _file(REPACKAGED, "diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors"),
    _file(REPACKAGED_21, "diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors"),
    _file(REPACKAGED_21, "diffusion_models", "wan2.1_i2v_480p_14B_fp8_scaled.safetensors"),
    _file(REPACKAGED_21, "clip_vision", "clip_vision_h.safetensors"),
    _file(REPACKAGED_21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors"),
    _file(REPACKAGED, "vae", "wan_2.1_vae.safetensors"),
    _file(REPACKAGED, "vae", "wan2.2_vae.safetensors"),
)

MODEL_FILES = {file.name: file for file in _ALL}
"""Every model file that a shipped workflow names."""
