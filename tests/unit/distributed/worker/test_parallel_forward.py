"""One worker's share in a group's step."""

import re
from pathlib import Path

import pytest
import torch

from wanstream.block_kernels import ATTENTIONS, INT8_ATTENTION
from wanstream.distributed.worker.groups import ProcessGroups
from wanstream.distributed.worker.parallel_forward import GroupForward, backend_for
from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.schema import Mesh, MeshError
from wanstream.tests.support.distributed.split_jobs import rendezvous
from wanstream.wan import Lane

PAGE = (Path(__file__).parents[4] / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_a_worker_that_has_left_reports_the_loss_of_its_peers():
    """After a lost peer the driver resumes the run, but not after a worker's own error."""
    groups = ProcessGroups(rendezvous(Mesh(cfg=2))[0], torch.device("cpu"))
    groups.leave()
    lane = Lane(latents=torch.zeros(1, 16, 1, 4, 4), text=torch.zeros(1, 1, 4096))
    with pytest.raises(PeerLostError, match="left the rendezvous"):
        with GroupForward(groups).computing([lane, lane]):
            pytest.fail("no lane can be shared")


def _is_supported(attention, mesh):
    backend = INT8_ATTENTION if attention == INT8_ATTENTION else ATTENTIONS[attention].backend
    try:
        backend_for(backend, mesh, torch.device("cuda"), torch.bfloat16)
    except MeshError:
        return False
    return True


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_page_has_what_each_attention_needs_and_supports(attention):
    kernel = ATTENTIONS[attention]
    (row,) = re.findall(rf"^\| `{attention}` \| .* \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    needs, ulysses, ring = row
    assert ("a GPU" in needs) == kernel.cuda_only
    assert ("bf16 or fp16" in needs) == kernel.half_only
    assert ("the package" in needs) == bool(kernel.package)
    assert (ulysses != "no") == _is_supported(attention, Mesh(ulysses=2))
    assert (ring != "no") == _is_supported(attention, Mesh(ring=2))
