"""One torch thread in this process, for comparing tests with worker processes."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Use one thread here as in the workers.

    Sums over another number of threads end in other bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
