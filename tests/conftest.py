"""Tiny random models for all tests: four blocks, two heads, real text width.

Each file is written once per session.
"""

import functools
import gc
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

from wanstream.devices.machine import available_bytes
from wanstream.testing import save_expert_file, save_expert_folder, weights, write_tiny_model
from wanstream.testing.components import save_text_encoder_folders, save_vae_file
from wanstream.testing.tokenizer import VOCABULARY
from wanstream.tests.support.wan.quantised_files import FP8_LAYOUTS, dequantised, save_shards

# A time limit per example would fail on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

pytest_plugins = [
    f"wanstream.tests.support.{package}.fixtures"
    for package in ("offload", "wan", "sampling", "distributed", "host")
] + ["wanstream.tests.support.plan_fixtures", "wanstream.tests.support.accelerator"]

INTEGRATION_MARKS = {"comfy", "browser"}
INTEGRATION_FIXTURES = {"processes"}
SEEN = pytest.StashKey[dict[str, frozenset[str]]]()
CRASHED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Let a crashed process end the run."""
    if config.pluginmanager.hasplugin("xdist"):
        # With a restart, `--dist loadfile` of pytest-xdist 3.8 never ends.
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Note a crashed process."""
    if error:
        node.config.stash[CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with a process that crashed before its first test.

    Without tests that failed, pytest-xdist would report success.
    """
    if CRASHED in session.config.stash and not session.testsfailed:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Limit `-n logical` and `-n auto` to the processes that fit into free RAM.

    Measured for the unit suite with torch 2.13: one process passes with 2.7 GB, two with 3.7 GB.

    Raises pytest.UsageError if not even one fits.
    """
    processors = yield
    free = available_bytes() / 1e9
    if free < 3:
        raise pytest.UsageError(
            f"tests need 3 GB of free RAM, and 1 GB more for each further process: {free:.2f} GB "
            "are free. End other processes, or remove files in /dev/shm"
        )
    return min(processors, int(free) - 2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with servers, browsers and worker processes as `integration`, before `-m` selects.

    Other tests with a Python process have the mark in their file.
    """
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & INTEGRATION_MARKS or INTEGRATION_FIXTURES.intersection(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker("integration")
    config.stash[SEEN] = {
        item.nodeid: frozenset(mark.name for mark in item.iter_markers()) for item in items
    }


def pytest_collection_finish() -> None:
    """Collect garbage less often, and exempt the imported packages and tests.

    These are about two million objects. Traversing them takes a third of a second in every
    collection, explicit or automatic.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> dict[str, frozenset[str]]:
    """The marks of every collected test, with deselected ones included."""
    return request.config.stash[SEEN]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Refuse a new Python process in a unit test: importing torch again takes seconds."""
    if any(item.get_closest_marker(name) for name in ("integration", "slow")):
        return (yield)
    start = subprocess.Popen.__init__

    def refuse_python(self, args, *rest, **options):
        if not isinstance(args, str) and args[0] == sys.executable:
            pytest.fail(f"a unit test starts {args}: mark it with pytest.mark.integration")
        start(self, args, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse_python)
        return (yield)


@pytest.fixture(scope="session")
def make_tiny_expert():
    """`make_tiny_expert(seed=0, **shape)`: a fresh fp32 expert for the caller to change.

    With `dequantised_from=dtype`, the expert has the values of an fp8 file with other tensors in
    `dtype`. Shape: `layers=4, heads=2, in_channels=16 | 36, ffn_dim=512, text_dim=4096`.
    """

    def make(*, seed=0, dequantised_from=None, **shape):
        model = weights.make_expert(weights.TinyShape(**shape), seed=seed)
        return model if dequantised_from is None else dequantised(model, dtype=dequantised_from)

    return make


@pytest.fixture(scope="session")
def tiny_expert_folder(tmp_path_factory):
    """Make a tiny expert's diffusers transformer folder.

    Call `tiny_expert_folder(seed=0, dtype=torch.float32, shards=1, **shape)`. Read only: the whole
    session shares the folder.
    """

    @functools.cache
    def folder(*, seed=0, dtype=torch.float32, shards=1, **shape):
        path = tmp_path_factory.mktemp("expert")
        model = weights.make_expert(weights.TinyShape(**shape), seed=seed)
        if shards > 1:
            save_shards(model, path, dtype=dtype, shards=shards)
        else:
            save_expert_folder(model, path, dtype=dtype)
        return path

    return folder


@pytest.fixture(scope="session")
def tiny_expert_file(tmp_path_factory):
    """Make a tiny expert's single file for ComfyUI.

    Call `tiny_expert_file(seed=0, dtype=torch.float32, prefix="", fp8=None, **shape)`. `fp8` is a
    name from the fixture `fp8_layout`, and then only the other tensors have `dtype`. Read only: the
    whole session shares the file.
    """

    @functools.cache
    def file(*, seed=0, dtype=torch.float32, prefix="", fp8=None, **shape):
        path = tmp_path_factory.mktemp("expert") / "expert.safetensors"
        model = weights.make_expert(weights.TinyShape(**shape), seed=seed)
        layout = None if fp8 is None else FP8_LAYOUTS[fp8]
        save_expert_file(model, path, dtype=dtype, prefix=prefix, quantised=layout)
        return path

    return file


@pytest.fixture(params=FP8_LAYOUTS, scope="session")
def fp8_layout(request: pytest.FixtureRequest) -> str:
    """Every valid fp8_scaled layout in turn, as a name for `tiny_expert_file(fp8=...)`."""
    return request.param


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory):
    """Make a diffusers pipeline folder with the VAE (fp32), text encoder and tokenizer.

    Call `tiny_pipeline(dtype=torch.float32)`. Read only: the whole session shares the folder.
    """

    @functools.cache
    def folder(*, dtype=torch.float32):
        path = tmp_path_factory.mktemp("pipeline")
        weights.make_vae(seed=0).save_pretrained(path / "vae")
        encoder = weights.make_text_encoder(seed=0, vocabulary=len(VOCABULARY))
        save_text_encoder_folders(encoder, path, dtype=dtype)
        return path

    return folder


@pytest.fixture(scope="session")
def wan22_vae(tmp_path_factory):
    """A folder with Wan2.2 5B's tiny VAE. Read only.

    It contains `vae`, as in diffusers, and `wan2.2_vae.safetensors`.
    """
    path = tmp_path_factory.mktemp("wan22")
    vae = weights.make_wan22_vae(seed=0)
    vae.save_pretrained(path / "vae")
    save_vae_file(vae, path / "wan2.2_vae.safetensors")
    return path


@pytest.fixture(scope="session")
def sample_models(tmp_path_factory):
    """A models folder as `wanstream make-test-model` writes it, four blocks deep. Read only."""
    return write_tiny_model(tmp_path_factory.mktemp("models"), layers=4).folder


@pytest.fixture(scope="session")
def full_sample_model(tmp_path_factory):
    """The whole model from `wanstream make-test-model`, as deep as the real one. Read only."""
    return write_tiny_model(tmp_path_factory.mktemp("models"))
