"""Choosing the two experts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..host import ExpertsRef, host, io, search_words
from ..plan import Attention, Storage
from ..wan.block_storage import STORAGES
from ..wan.compute_dtype import AUTO, dtype_name
from ..wan.suspicions import expert_suspicions
from . import sockets
from .expert_inputs import attention_input, compile_input
from .warnings_shown import shown_warnings

if TYPE_CHECKING:
    from ..wan.expert_pair import ExpertPair

SAME_FOLDER = "from the same pipeline folder"

FOLDERS = ("diffusion_models", "diffusers")
DTYPES = {AUTO: AUTO, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LOG = logging.getLogger("wanstream.nodes")


class WanStreamExperts(io.ComfyNode):
    """Names the high-noise and the low-noise expert and checks that they belong together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = host.model_names(*FOLDERS)
        return io.Schema(
            node_id="WanStreamExperts",
            display_name="Wan Experts (streamed)",
            category="WanStream/loaders",
            **search_words(
                "moe", "high noise", "low noise", "load diffusion model", "unet", "gguf", "fp8", "a14b", "wan 2.2"
            ),
            description="Opens the two experts of Wan2.2 A14B. Only headers are read: weights move when a step needs "
            "them.",
            inputs=[
                io.Combo.Input(
                    "high_noise",
                    options=names,
                    tooltip="The expert of the early, noisy steps: a .safetensors or .gguf file of diffusion_models, "
                    "or a folder of diffusers. What is read per step where all blocks stream: 28 GB in bf16 and fp16, "
                    "15 GB in Q8_0, 14 GB in fp8, 8 GB in Q4_K. Device memory is the same for all.",
                ),
                io.Combo.Input(
                    "low_noise",
                    options=[SAME_FOLDER, *names],
                    default=SAME_FOLDER,
                    tooltip="The expert of the later steps. A diffusers pipeline folder chosen as high_noise holds "
                    "both.",
                ),
                dtype_input(),
                storage_input(),
                attention_input(),
                compile_input(),
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def execute(
        cls,
        high_noise: str,
        low_noise: str,
        compute_dtype: str,
        storage: Storage = "as stored",
        attention: Attention = "default",
        compile: bool = False,
    ) -> io.NodeOutput:
        ref = ExpertsRef(
            high_noise=host.model_path(high_noise, *FOLDERS),
            low_noise=None if low_noise == SAME_FOLDER else host.model_path(low_noise, *FOLDERS),
            compute_dtype=DTYPES[compute_dtype],
            storage=storage,
            attention=attention,
            compile=compile,
        )
        # Opened here so that a bad file or a missing package is reported on the node that names it. The sampler finds
        # the pair open.
        with host.ledger().phase("open", host.device()):
            pair = host.experts(ref)
        log_auto_dtype(ref, pair)
        return io.NodeOutput(ref, ui=shown_warnings(expert_suspicions(pair.high, pair.low)))

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> bool:
        """Let the node run again when what it warns of becomes an error, or no error any more."""
        return host.strict()


def log_auto_dtype(ref: ExpertsRef, pair: ExpertPair) -> None:
    """Log the dtype that `compute_dtype` auto gives in this process. It stays "auto" in `ref` for workers, which agree
    on a dtype that is fast on the devices of all of them."""
    if ref.compute_dtype == AUTO:
        LOG.info("compute_dtype auto: the blocks compute in %s on %s", dtype_name(pair.compute_dtype), host.device())


def dtype_input() -> io.Combo.Input:
    return io.Combo.Input(
        "compute_dtype",
        options=list(DTYPES),
        default=AUTO,
        tooltip="What the blocks compute in, whatever the file holds. auto: bf16 where the device has units for it, "
        "else fp16, else fp32, as on most CPUs. bf16 and fp16: 0.70 GB per buffer; a CPU without bf16 units takes "
        "three to five times as long in them as in fp32. fp32: twice the memory, and on a GPU at least twice the time.",
    )


def storage_input() -> io.Combo.Input:
    return io.Combo.Input(
        "storage",
        options=list(STORAGES),
        default="as stored",
        optional=True,
        tooltip="What blocks are kept in. fp8 quantises a bf16, fp16 or fp32 file while it is read: half "
        "the RAM and half the bytes over the bus of bf16, as many from the disk, 0.33 s of one core per "
        "block, and 2.7 % of each weight's size as error. fp8 and GGUF files stay as they are.",
    )
