"""The command `wanstream` in a process that need not import anything again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from wanstream.cli import main
from wanstream.tests.faults.stage import forked


class ForkedCommand:
    """`main(arguments)` in a forked process.

    Args:
        arguments: arguments for `wanstream`.
        temporary: folder for temporary files.
        largest_file: limit in bytes for any file, in place of a full disk.
    """

    def __init__(self, arguments, temporary, *, largest_file=None) -> None:
        reads, writes = os.pipe()
        # A pipe too: the size limit would apply to a file. Results are shorter than a pipe.
        reads_stdout, stdout = os.pipe()

        def work() -> int:
            os.close(reads)
            os.dup2(stdout, 1)
            os.dup2(writes, 2)
            # It lacks any torch threads in this process.
            torch.set_num_threads(1)
            if largest_file is not None:
                import resource

                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return main(arguments)

        self._pid = forked(work, Path(os.devnull), temporary=temporary)
        os.close(writes)
        os.close(stdout)
        self._stdout = os.fdopen(reads_stdout, encoding="utf-8", errors="replace", newline="")
        self._stderr = os.fdopen(reads, encoding="utf-8", errors="replace", newline="")

    def wait_for(self, text: str) -> None:
        """Read stderr up to `text`. Bars end their lines with carriage returns."""
        said = ""
        while text not in said:
            piece = self._stderr.read(1)
            assert piece, (said, self.end())
            said += piece

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def end(self) -> tuple[int, str, str]:
        """Return the exit code, negative for a signal, then stdout, then the rest of stderr."""
        with self._stderr, self._stdout:
            rest = self._stderr.read()
            printed = self._stdout.read()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]), printed, rest
