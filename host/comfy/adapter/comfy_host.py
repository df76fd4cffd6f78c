"""Host inside ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import comfy.cli_args

from ....schema.refs import ExpertsRef
from ....wan import ExpertPair, open_pair
from ...api import HostSettings
from ...auto_policy import AutoPlanner
from ...files import listed_model
from .. import versions
from ..experts.patcher import OpenExperts
from .events import ComfyEvents
from .files import ComfyFiles, user_setting
from .memory import ComfyMemory
from .models import ComfyModels
from .native_models import ComfyNativeModels
from .user_settings import STRICT


class ComfyHost:
    """`Host` with ComfyUI's folders, devices, memory manager, progress and interrupt."""

    name = f"ComfyUI {versions.version()}"

    def __init__(
        self,
        open_experts: Callable[[ExpertsRef], ExpertPair] = open_pair,
        planner: AutoPlanner | None = None,
    ) -> None:
        self.open_experts = OpenExperts(open_experts)
        self.files = ComfyFiles()
        self.events = ComfyEvents(partial(listed_model, self.files))
        self.memory = ComfyMemory(self.open_experts, planner)
        self.models = ComfyModels(self, self.open_experts)
        self.native = ComfyNativeModels(self)

    def settings(self) -> HostSettings:
        arguments = comfy.cli_args.args
        return HostSettings(
            strict=user_setting(STRICT),
            graph_in_files=not arguments.disable_metadata,
            shows_latents=arguments.preview_method
            is not comfy.cli_args.LatentPreviewMethod.NoPreviews,
        )
