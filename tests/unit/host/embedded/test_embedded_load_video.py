"""LoadVideo and GetVideoComponents without ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host import io
from wanstream.host.embedded.load_video import VideoInputError
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.validate import InvalidWorkflowError
from wanstream.nodes.runs import write_mp4


class Sink(io.ComfyNode):
    """Reads images, so that they are loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Sink", inputs=[io.Image.Input("image")], is_output_node=True)

    @classmethod
    def execute(cls, image: torch.Tensor) -> None:
        return None


@pytest.fixture
def load(run: Callable[..., History]) -> Callable[[str], tuple[Any, ...]]:
    def load(name: str) -> tuple[Any, ...]:
        prompt = {
            "1": {"class_type": "LoadVideo", "inputs": {"file": name}},
            "2": {"class_type": "GetVideoComponents", "inputs": {"video": ["1", 0]}},
            "3": {"class_type": "Sink", "inputs": {"image": ["2", 0]}},
        }
        return run(prompt, nodes=[Sink], keep=["2"]).results["2"]

    return load


def test_every_frame_is_decoded_in_order(load: Callable[[str], tuple[Any, ...]], tmp_path: Path) -> None:
    frames = torch.linspace(0.1, 0.9, 7).view(7, 1, 1, 1).expand(7, 32, 48, 3)
    write_mp4(tmp_path / "input" / "a.mp4", frames, fps=12, crf=1, metadata={})
    images, audio, rate = load("a.mp4")
    assert images.shape == (7, 32, 48, 3)
    assert images.dtype == torch.float32
    assert torch.allclose(images, frames, atol=0.03)
    assert audio is None
    assert rate == 12.0


@pytest.mark.parametrize("name", ["none.mp4", "../outside.mp4"])
def test_a_file_that_is_not_there_is_refused(load: Callable[[str], tuple[Any, ...]], tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.mp4").touch()
    with pytest.raises(InvalidWorkflowError, match="Invalid video file"):
        load(name)


def test_what_is_no_video_is_refused(load: Callable[[str], tuple[Any, ...]], tmp_path: Path) -> None:
    (tmp_path / "input" / "a.mp4").write_bytes(b"no video")
    with pytest.raises(NodeFailedError, match=r"a\.mp4 cannot be decoded") as failed:
        load("a.mp4")
    assert isinstance(failed.value.__cause__, VideoInputError)
