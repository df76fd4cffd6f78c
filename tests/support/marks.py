"""Marks of tests in more than one folder."""

import sys

import pytest
import torch

FORKED = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="clients are forked, and limited"),
    # Python warns about a fork with threads, but a client uses no threads from the test run.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]
"""Marks of tests with forked clients."""

NO_CLASS = "torch before 2.8 has no class for errors of a device"
needs_device_errors = pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason=NO_CLASS)
