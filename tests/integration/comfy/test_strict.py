"""The setting that turns a warning into an error, in a real ComfyUI.

ComfyUI's own route writes it, and the door reads it.
"""

from __future__ import annotations

import pytest

ASK = """
from wanstream.host import current_host
from wanstream.nodes.loaders import WanStreamExperts, WanStreamLora
fingerprints = [node.fingerprint_inputs()[0] for node in (WanStreamExperts, WanStreamLora)]
(answer,) = {current_host().settings().strict, *fingerprints}
"""

pytestmark = pytest.mark.comfy


def test_settings_of_the_page_are_read(server, in_comfyui):
    assert in_comfyui(ASK) is False
    for value in (True, False):
        status, _ = server.post("/settings/WanStream.Strict", value)
        assert status == 200
        assert in_comfyui(ASK) is value
