"""A few small nodes, and a function that runs them in temporary folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wanstream.host import OutsideFolderError, current_host, io
from wanstream.host.embedded import Folders, History
from wanstream.sampling.steps import errors
from wanstream.tests.support.host.embedded import embedded_host, run_workflow


class Number(io.ComfyNode):
    """A constant."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.Int.Input("value", min=0, max=100)
        inputs = [value, io.Boolean.Input("negate", optional=True)]
        outputs = [io.Int.Output(), io.String.Output()]
        return io.Schema(node_id="Number", inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, value: int, negate: bool = False) -> io.NodeOutput:
        number = -value if negate else value
        return io.NodeOutput(number, str(number))


class Add(io.ComfyNode):
    """A sum, with an input of every other kind."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Int.Input("a"),
            io.Int.Input("b"),
            io.Float.Input("scale", default=1.0, min=0.0, max=2.0, optional=True),
            io.Combo.Input("mode", options=["plain", "odd"], optional=True),
            io.Latent.Input("latent", optional=True),
        ]
        return io.Schema(node_id="Add", inputs=inputs, outputs=[io.Int.Output()])

    @classmethod
    def execute(cls, a: int, b: int, **optional) -> io.NodeOutput:
        return io.NodeOutput(a + b)


class Show(io.ComfyNode):
    """Output node that shows a number and the host's hidden values."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Show",
            inputs=[io.Int.Input("number"), io.String.Input("prefix", optional=True)],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, prefix: str | None = None) -> bool | str:
        try:
            current_host().files.check_output(prefix or "a")
        except OutsideFolderError as err:
            return str(err)
        return True

    @classmethod
    def execute(cls, number: int, prefix: str = "") -> io.NodeOutput:
        bar = current_host().events.progress(2, cls.hidden.unique_id)
        bar.update(1)
        current_host().events.raise_if_stopped()
        bar.update(2)
        inference = torch.is_inference_mode_enabled()
        shown = {"number": number, "inference": inference, "id": cls.hidden.unique_id}
        workflow = {"prompt": [cls.hidden.prompt], "info": [cls.hidden.extra_pnginfo]}
        return io.NodeOutput(ui={"shown": (shown,), **workflow})


class Fail(io.ComfyNode):
    """Raises."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Fail", inputs=[io.Int.Input("number")], is_output_node=True)

    @classmethod
    def execute(cls, number: int) -> io.NodeOutput:
        raise KeyError("gone")


@pytest.fixture
def nodes() -> SimpleNamespace:
    """The node classes by name, and `all`."""
    classes = [Number, Add, Show, Fail]
    return SimpleNamespace(**{node.__name__: node for node in classes}, all=classes)


@pytest.fixture
def run(nodes: SimpleNamespace, tmp_path: Path) -> Callable[..., History]:
    """`run(prompt, **options)` runs a workflow with these nodes.

    The folders are models, output and input in `tmp_path`.
    """
    for folder in ("models", "output", "input"):
        (tmp_path / folder).mkdir()

    def run(prompt, **options) -> History:
        places = {name: tmp_path / name for name in ("models", "output")}
        given = {"nodes": nodes.all, **options}
        return run_workflow(prompt, **places, input_dir=tmp_path / "input", **given)

    return run


@pytest.fixture
def opened_test_model(sample_models: Path, tmp_path: Path) -> Iterator[None]:
    """Open the embedded host with the test model on the CPU.

    Free experts and workers in the end.
    """
    folders = Folders(models=sample_models, output=tmp_path, input=tmp_path)
    with embedded_host.opened(folders, device=torch.device("cpu")):
        yield
        embedded_host.memory.worker_registry.close()
        embedded_host.free_experts()


@pytest.fixture
def asked_ram(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that a test asks for, with 2 GB of RAM free and always too little."""
    asked: list[int] = []
    monkeypatch.setattr(errors, "insufficient_ram", lambda size: asked.append(size) or 2 * 10**9)
    return asked


@pytest.fixture(scope="module")
def text():
    """Return CONDITIONING with random embeddings."""
    return [[torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(0)), {}]]
