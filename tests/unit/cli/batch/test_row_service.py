"""A row service's folders, and blocks shared with other services of the machine."""

import os
import sys

import pytest

from wanstream.cli.batch import row_service as row_service_module
from wanstream.cli.batch.row_service import TEMPORARY, RowService
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.distributed.local_actor import MARK, row_service


def test_folders_of_killed_processes_are_removed(options, tmp_path):
    service = row_service(options, tmp_path / "elsewhere")()
    temporary = tmp_path / "temporary"
    gone = 4_194_305  # above Linux's largest process id
    names = [f"{TEMPORARY}{os.getpid()}-x", f"{TEMPORARY}x-y"]
    names += [f"wanstream-batch-another.machine-{gone}-x"]  # in a folder shared by machines
    kept = {temporary / name for name in names}
    for folder in (*kept, temporary / f"{TEMPORARY}{gone}-x"):
        (folder / "output").mkdir(parents=True)
    own = service._own_folder()
    assert set(temporary.iterdir()) == {own, *kept}
    service.stop()
    assert not own.exists()


def test_services_of_one_machine_share_the_blocks_in_ram(options, tmp_path, monkeypatch):
    opened: list[bool] = []

    def open_pair(ref, *, shared):
        opened.append(shared)
        raise InterruptedError

    monkeypatch.setattr(row_service_module, "open_pair", open_pair)
    ref = ExpertsRef(high_noise=tmp_path / "high", low_noise=tmp_path / "low")
    folders = {"models": str(options.local.models), "input": "", "marked": ""}
    for processes in (1, 2):
        service = RowService("cpu", processes, strict=False, **folders)
        with pytest.raises(InterruptedError):
            service._host._experts.get(ref)
    assert opened == [False, sys.platform != "win32"], "one alone does not share"


def test_folders_of_another_machine_are_those_of_the_path_map(options, workflow, tmp_path):
    """A folder of the same name without the mark is not shared."""
    (tmp_path / "made").mkdir()
    service = row_service(options, tmp_path / "made")()
    assert service._output_folder().is_relative_to(tmp_path / "temporary")
    service.stop()
    (tmp_path / "made" / MARK).mkdir()
    named = {"models": "models", "input": "input", "marked": f"made/{MARK}"}
    folders = {name: f"/home/me/{path}" for name, path in named.items()}
    maps = [("/home/me", str(tmp_path / "not mounted")), ("/home/me", str(tmp_path))]
    service = RowService("cpu", 1, strict=False, **folders, path_map=maps)
    assert service.faults(workflow, {}) == []
    assert (service._models, service._input) == (tmp_path / "models", tmp_path / "input")
    assert service._output_folder() == tmp_path / "made"
    service.stop()
