"""Batches without computing: servers in memory, a client to kill and restart, seeded mishaps."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from wanstream.batch import backend
from wanstream.batch.errors import NoSuchFileError, UnreachableError
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.opening import Tally
from wanstream.batch.output_store import OutputStore
from wanstream.batch.resume import resume
from wanstream.batch.rows.rows import BatchJob, Row
from wanstream.batch.running.fleet import run_all
from wanstream.batch.running.job_queue import JobQueue
from wanstream.batch.running.runner import Runner
from wanstream.batch.running.stop_request import StopRequest

ROWS = 12
SPEED = 1000.0
"""Runner seconds slept per second in a test with several servers. With one server it does not
sleep."""

Planner = Callable[[Sequence[Row]], list[BatchJob]]


class Killed(BaseException):
    """The client dies here."""


def raising(error: Exception, *parts: str) -> Callable[[Any], None]:
    """Return a function to raise this error for what contains a part, or for everything."""

    def check(what: Any) -> None:
        if not parts or any(part in what for part in parts):
            raise error

    return check


def rows_of(count: int) -> list[Row]:
    return [Row(line=n, position=n, hash=f"hash {n}") for n in range(1, count + 1)]


def plan_of(size: int) -> Planner:
    """Jobs with up to `size` rows. The node `n` saves the file for row n."""

    def job_of(share: tuple[Row, ...]) -> BatchJob:
        prompt: dict[str, Any] = {str(row.position): {"class_type": "Save"} for row in share}
        saves = {row.hash: frozenset([str(row.position)]) if size > 1 else None for row in share}
        return BatchJob(prompt=prompt, rows=share, saves=saves)

    return lambda rows: [job_of(tuple(rows[at : at + size])) for at in range(0, len(rows), size)]


class Server:
    """A server with a queue, a history and an output folder in memory.

    A restart loses the first two.

    Each poll advances the first job in the queue by one step. `called` is called before each call,
    `posting` and `fetching` before these two, and every call fails while the server is `gone`.
    `behaviour` has other values for these and any other attribute.
    """

    window = 2

    def __init__(self, name: str = "there", *, steps: int = 1, **behaviour: Any) -> None:
        self.name = self.address = f"http://{name}"
        self.steps = steps
        self.queue: list[list[Any]] = []
        self.history: dict[str, backend.Ended | backend.JobFailed | backend.Interrupted] = {}
        self.files: dict[str, str] = {}
        self.made: list[str] = []
        self.most = 0
        """Longest queue so far."""
        self.ids: list[str] = []
        self.withdrawn: list[str] = []
        self.bad: Callable[[Mapping[str, Any]], str | None] = lambda prompt: None
        self.deadly: str | None = None
        self.gone = False
        self.called: Callable[[str], None] = lambda call: None
        self.posting: Callable[[Mapping[str, Any]], None] = lambda prompt: None
        self.fetching: Callable[[str], None] = lambda content: None
        assert all(hasattr(self, name) for name in behaviour), behaviour
        vars(self).update(behaviour)

    def check(self) -> None:
        self._enter("check")

    def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
        self._enter("post")
        self.posting(prompt)
        self.ids.append(prompt_id)
        self.queue.append([prompt_id, prompt, 0])
        self.most = max(self.most, len(self.queue))

    def outcome(self, prompt_id: str) -> backend.Outcome:
        self._enter("outcome")
        self._work()
        if prompt_id in self.history:
            return self.history[prompt_id]
        for place, (queued, _, _) in enumerate(self.queue):
            if queued == prompt_id:
                return backend.UnderWay(begun=place == 0)
        return backend.Unknown()

    def fetch(self, file: backend.MadeFile, part: Path) -> None:
        self._enter("fetch")
        if file.filename not in self.files:
            raise NoSuchFileError(f"no {file.filename}")
        part.write_text("half")
        self.fetching(self.files[file.filename])
        part.write_text(self.files[file.filename])

    def withdraw(self, prompt_id: str) -> None:
        self._enter("withdraw")
        self.withdrawn.append(prompt_id)
        self.queue[1:] = [item for item in self.queue[1:] if item[0] != prompt_id]

    def interrupt(self, prompt_id: str) -> None:
        self._enter("interrupt")
        if self.queue and self.queue[0][0] == prompt_id:
            self.queue.pop(0)
            self.history[prompt_id] = backend.Interrupted()

    def release(self, prompt_id: str) -> None: ...

    def halt(self) -> None: ...

    def restart(self) -> None:
        self.queue = []
        self.history = {}

    def _enter(self, call: str) -> None:
        self.called(call)
        if self.gone:
            raise UnreachableError(f"no answer from {self.name}")

    def _work(self) -> None:
        if not self.queue:
            return
        prompt_id, prompt, step = self.queue[0]
        self.queue[0][2] += 1
        if self.deadly in prompt and step > 0:
            self.restart()
        elif step >= self.steps:
            self.queue.pop(0)
            reason = self.bad(prompt)
            failed = reason and backend.JobFailed(reason=reason)
            self.history[prompt_id] = failed or self._save(prompt)

    def _save(self, prompt: Mapping[str, Any]) -> backend.Ended:
        made = []
        for node_id in prompt:
            name = f"out_{len(self.files):05}_.txt"
            self.files[name] = f"row {node_id}"
            self.made.append(node_id)
            made.append(backend.MadeFile(node_id=node_id, filename=name, subfolder=""))
        return backend.Ended(files=tuple(made))


class Reporter:
    """A reporter that records messages."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.jobs: dict[str, str | None] = {}
        self.silent: set[str] = set()
        self.were_silent: set[str] = set()

    @property
    def failures(self) -> list[str]:
        return [told for told in self.told if told.startswith("failed")]

    def having(self, words: str) -> list[str]:
        """Return the messages with these words."""
        return [told for told in self.told if words in told]

    def running(self, backend: str, job: str | None, rows: int) -> None:
        self.jobs[backend] = job

    def done(self, backend: str | None = None) -> None: ...

    def failed(self, row: Row, reason: str, backend: str | None = None) -> None:
        self.told.append(f"failed {row.name or row.position}: {reason}")

    def note(self, text: str) -> None:
        self.told.append(text)

    def excluded(self, backend: str) -> None: ...

    def unresponsive(self, backend: str, unresponsive: bool) -> None:
        (self.silent.add if unresponsive else self.silent.discard)(backend)
        self.were_silent |= self.silent


class SlowDisk(OutputStore):
    """A store with slow syncs, so no server makes all rows before another one starts."""

    def check_file(self, path: Path) -> KeptFile:
        time.sleep(0.01)
        return super().check_file(path)


class Mishaps:
    """Mishaps at calls chosen by a seed, with a limit that lets every run end."""

    def __init__(self, seed: int, count: int, share: float) -> None:
        self.random = random.Random(seed)
        self.left = count
        self._share = share
        self._lock = threading.Lock()
        self.happened: list[str] = []

    def next(self, *kinds: str) -> str:
        """Return the mishap that happens now, among these kinds, or empty for none."""
        with self._lock:
            if not self.left or self.random.random() > self._share:
                return ""
            self.left -= 1
            self.happened.append(self.random.choice(kinds))
            return self.happened[-1]


class Bench:
    """A client to start again and again on one folder. `limits` are the runners'."""

    def __init__(self, folder, *servers, rows=ROWS, size=1, **limits):
        self.folder = folder
        self.servers = [*servers]
        self._store_type = SlowDisk if len(servers) > 1 else OutputStore
        self.rows = rows_of(rows) if isinstance(rows, int) else rows
        self.planner: Planner = plan_of(size)
        self.reporter = Reporter()
        self.stop = StopRequest()
        self.limits: dict[str, Any] = limits
        self.max_failures: int | None = None
        self.unreachable: set[str] = set()
        """Servers that do not respond at the start, by name."""
        self.slept: list[float] = []
        self.wait: Callable[[], None] = lambda: time.sleep(0.001)

    def run(self, journal: Journal | None = None, store: OutputStore | None = None) -> JobQueue:
        store = store or self._store_type(self.folder)
        with journal or Journal(self.folder / "journal.sqlite", workflow="w") as journal:
            resume(journal, store, self.rows)
            given: dict[str, Any] = {"planner": self.planner, "reporter": self.reporter}
            given |= {"stop": self.stop, "backends": self.servers, "silent": self.unreachable}
            tally = Tally(max_failures=self.max_failures)
            queue = JobQueue(journal=journal, tally=tally, **given)
            queue.enter(self.rows)
            own = {"queue": queue, "store": store, "sleep": self._sleep, **self.limits}
            runners = [Runner(backend=server, **own) for server in self.servers]
            run_all(runners, queue, self.wait)
            return queue

    def complete(self, *missing: int) -> JobQueue:
        """Run. Every row but these has its file then."""
        queue = self.run()
        self.check({row.position for row in self.rows}.difference(missing))
        return queue

    def run_through(self, mishaps: Mishaps) -> None:
        """Start the client again after each kill, until no row is left."""
        for _ in range(mishaps.left + 1):
            with suppress(Killed):
                self.run()
                break
            time.sleep(0.01)  # the killed client's other threads end

    def states(self) -> list[State]:
        with Journal(self.folder / "journal.sqlite", workflow="w") as journal:
            return [entry.state for entry in journal.entries.values()]

    def made(self) -> list[str]:
        return [made for server in self.servers for made in server.made]

    def check(self, done: Iterable[int]) -> None:
        """These rows have one file each, the right one.

        There is nothing else, and the journal says the same.
        """
        contents = {f"{number:05}.txt": f"row {number}" for number in done}
        assert {path.name: path.read_text() for path in self.folder.glob("*.txt")} == contents
        with Journal(self.folder / "journal.sqlite", workflow="w") as journal:
            entries = [each for each in journal.entries.values() if each.state is State.done]
        kept = {file.name: (file.size, file.sha256) for each in entries for file in each.files}
        texts = contents.items()
        assert kept == {
            name: (len(text), sha256(text.encode()).hexdigest()) for name, text in texts
        }
        assert list((self.folder / ".wanstream" / "parts").iterdir()) == []

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.servers) > 1:
            time.sleep(seconds / SPEED)
