"""Download addresses and folders for the model files in shipped workflows."""

from __future__ import annotations

from typing import NamedTuple

REPACKAGED = "https://huggingface.co/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
REPACKAGED_21 = (
    "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
)
BERNINI = "https://huggingface.co/Comfy-Org/Bernini-R/resolve/main"
QWEN_IMAGE = "https://huggingface.co/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
LUMINA = "https://huggingface.co/Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files"
LTX_2 = "https://huggingface.co/Comfy-Org/ltx-2/resolve/main/split_files"
LIGHTRICKS = "https://huggingface.co/Lightricks/LTX-2/resolve/main"
FLUX = "https://huggingface.co/Comfy-Org/flux1-dev/resolve/main"
FLUX_TEXT = "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main"
LIGHTX2V_VAES = "https://huggingface.co/lightx2v/Autoencoders/resolve/main"
KIJAI = "https://huggingface.co/Kijai/WanVideo_comfy/resolve/main"


class ModelFile(NamedTuple):
    """Model file: name, folder below ComfyUI's `models/`, and address in ComfyUI's templates."""

    name: str
    directory: str
    url: str


def _file(repository: str, directory: str, name: str) -> ModelFile:
    return ModelFile(name, directory, f"{repository}/{directory}/{name}")


def _flat_file(repository: str, directory: str, name: str, folder: str = "") -> ModelFile:
    """Return a file from a repository with other folders than ComfyUI's."""
    return ModelFile(name, directory, f"{repository}/{folder}{name}")


_ALL = (
    *(
        _file(
            REPACKAGED,
            "diffusion_models",
            f"wan2.2_{family}_{expert}_noise_14B_fp8_scaled.safetensors",
        )
        for family in ("t2v", "i2v", "fun_control", "fun_inpaint")
        for expert in ("high", "low")
    ),
    *(
        _file(
            BERNINI, "diffusion_models", f"wan2.2_bernini_r_{expert}_noise_fp8_scaled.safetensors"
        )
        for expert in ("high", "low")
    ),
    *(
        _file(
            REPACKAGED,
            "loras",
            f"wan2.2_{family}_lightx2v_4steps_lora_{version}_{expert}_noise.safetensors",
        )
        for family, version in (("t2v", "v1.1"), ("i2v", "v1"))
        for expert in ("high", "low")
    ),
    *(
        _flat_file(
            KIJAI,
            "loras",
            f"SVI_v2_PRO_Wan2.2-I2V-A14B_{expert}_lora_rank_128_fp16.safetensors",
            "LoRAs/Stable-Video-Infinity/v2.0/",
        )
        for expert in ("HIGH", "LOW")
    ),
    _file(REPACKAGED, "diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors"),
    _file(REPACKAGED_21, "diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors"),
    _file(REPACKAGED_21, "diffusion_models", "wan2.1_i2v_480p_14B_fp8_scaled.safetensors"),
    _file(REPACKAGED_21, "clip_vision", "clip_vision_h.safetensors"),
    _file(REPACKAGED_21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors"),
    _file(REPACKAGED, "vae", "wan_2.1_vae.safetensors"),
    _file(REPACKAGED, "vae", "wan2.2_vae.safetensors"),
    _flat_file(LIGHTX2V_VAES, "vae_approx", "lighttaew2_1.safetensors"),
    _file(REPACKAGED_21, "diffusion_models", "wan2.1_vace_14B_fp16.safetensors"),
    _flat_file(KIJAI, "loras", "Wan21_CausVid_14B_T2V_lora_rank32.safetensors"),
    _file(REPACKAGED, "diffusion_models", "wan2.2_animate_14B_bf16.safetensors"),
    _flat_file(
        KIJAI,
        "loras",
        "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors",
        "Lightx2v/",
    ),
    _flat_file(KIJAI, "loras", "WanAnimate_relight_lora_fp16.safetensors", "LoRAs/Wan22_relight/"),
    _flat_file(FLUX, "diffusion_models", "flux1-dev.safetensors"),
    _flat_file(FLUX_TEXT, "text_encoders", "clip_l.safetensors"),
    _flat_file(FLUX_TEXT, "text_encoders", "t5xxl_fp16.safetensors"),
    _file(LUMINA, "vae", "ae.safetensors"),
    _file(QWEN_IMAGE, "diffusion_models", "qwen_image_fp8_e4m3fn.safetensors"),
    _file(QWEN_IMAGE, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors"),
    _file(QWEN_IMAGE, "vae", "qwen_image_vae.safetensors"),
    _flat_file(LIGHTRICKS, "checkpoints", "ltx-2-19b-dev-fp8.safetensors"),
    _file(LTX_2, "text_encoders", "gemma_3_12B_it_fp4_mixed.safetensors"),
)

MODEL_FILES = {file.name: file for file in _ALL}
"""Model files in shipped workflows, by name."""
