"""Fixtures: workflows with our nodes on the test model, in the embedded host."""

import shutil

import pytest
from PIL import Image

from wanstream.host.embedded.files import Folders
from wanstream.tests.support.host.embedded import embedded_host, run_workflow
from wanstream.tests.support.host.given_nodes import NODES


@pytest.fixture
def output(tmp_path):
    """The output folder of `run`, which the first file makes."""
    return tmp_path / "output"


@pytest.fixture
def own_loras(tmp_path, sample_models):
    """The test model's folders, with a copy of `loras` for tests to change."""
    models = tmp_path / "models"
    shutil.copytree(sample_models / "loras", models / "loras")
    for folder in sample_models.iterdir():
        if folder.name != "loras":
            (models / folder.name).symlink_to(folder, target_is_directory=True)
    return models


@pytest.fixture
def opened(tmp_path):
    """Open the embedded host on this folder, for models and all files."""
    with embedded_host.opened(Folders(models=tmp_path, output=tmp_path, input=tmp_path)):
        yield tmp_path


@pytest.fixture
def run(tmp_path, sample_models, output):
    """Run a workflow, and close workers and experts at the end.

    `run(workflow, more_nodes=(), **options)` has `example.png` in the input folder. Other `models`
    are an option.
    """
    (tmp_path / "input").mkdir()
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "input" / "example.png")
    places = {"models": sample_models, "output": output, "input_dir": tmp_path / "input"}
    yield lambda nodes, *, more_nodes=(), **options: run_workflow(
        nodes, nodes=[*NODES, *more_nodes], **{**places, **options}
    )
    embedded_host.memory.worker_registry.close()
    embedded_host.free_experts()
