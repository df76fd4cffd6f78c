"""The setting that turns a warning into an error, in a real ComfyUI.

ComfyUI's own route writes it, and the door reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ASK = """
from installed_pack import load_pack
load_pack()
from wanstream.host import current_host
host = current_host()
from wanstream.nodes.loaders import WanStreamExperts
from wanstream.nodes.loaders import WanStreamLora
fingerprints = [node.fingerprint_inputs()[0] for node in (WanStreamExperts, WanStreamLora)]
(answer,) = {host.settings().strict, *fingerprints}
"""

pytestmark = pytest.mark.comfy


def test_the_door_reads_what_the_settings_of_the_page_write(
    server: Any, in_comfyui: Callable[..., Any]
) -> None:
    assert in_comfyui(ASK) is False
    try:
        for value in (True, False):
            status, _ = server.post("/settings/WanStream.Strict", value)
            assert status == 200
            assert in_comfyui(ASK) is value
    finally:
        server.post("/settings/WanStream.Strict", False)
