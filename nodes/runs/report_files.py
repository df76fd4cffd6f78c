"""Owns the files of a benchmark's report on disk: each appears whole under its name or not at all."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import TracebackType

from PIL import Image

from ...bench import Report, csv_document, html_document, json_document, report_chart
from ...host import OutputFile, ui
from ...host import io as host_io

logger = logging.getLogger("wanstream.nodes")


class ReportFileError(OSError):
    """A file of the report could not be written; `errno` is that of the failed call."""


class ReportFiles:
    """JSON, CSV, HTML and PNG of one report, beside each other in the output folder; use with `with` around the runs.

    The JSON is written after every run, so that a full disk is noticed early and a benchmark that was killed leaves
    what it had measured. One that was stopped, or failed, leaves all four of that. All methods raise ReportFileError.
    """

    def __init__(self, place: OutputFile) -> None:
        self._place = place
        self._kept: Report | None = None

    def keep(self, report: Report) -> None:
        """Write what is known so far, in place of what was known before."""
        self._write(".json", _bytes(json_document(report)))
        self._kept = report

    def finish(self, report: Report) -> Image.Image:
        """Write all four and return the chart."""
        chart = report_chart(report)
        pixels = io.BytesIO()
        chart.save(pixels, "PNG")
        self.keep(report)
        self._write(".csv", _bytes(csv_document(report)))
        self._write(".html", _bytes(html_document(report, pixels.getvalue())))
        self._write(".png", pixels.getvalue())
        return chart

    def __enter__(self) -> ReportFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ReportFileError) or self._kept is None or not self._kept.done:
            return
        try:
            self.finish(self._kept)
        except ReportFileError as err:  # what ended the benchmark is the error to show
            logger.warning("the report of what was measured until then is not whole: %s", err)

    def traces(self) -> Path:
        """The folder for traces of these runs; not made here."""
        return self._place.path.with_name(f"{self._place.path.stem}traces")

    def picture(self) -> ui.SavedResult:
        """Where the host's page finds the chart."""
        name = Path(self._place.filename).with_suffix(".png").name
        return ui.SavedResult(name, self._place.subfolder, host_io.FolderType.output)

    def _write(self, suffix: str, content: bytes) -> None:
        path = self._place.path.with_suffix(suffix)
        unfinished = path.with_name(path.name + ".part")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except OSError as err:
            raise ReportFileError(err.errno, f"{path} could not be written: {err.strerror}. {self._left()}") from err
        finally:
            unfinished.unlink(missing_ok=True)

    def _left(self) -> str:
        """What a user still has, and what to do."""
        written = self._place.path.with_suffix(".json")
        if written.exists():
            return f"All runs before are in {written}: make room on the disk and queue again for the rest"
        return "Nothing was written: make room on the disk and queue again"


def _bytes(text: str) -> bytes:
    """UTF-8; what has no place in it, as in names of files that are in another encoding, becomes a question mark."""
    return text.encode(errors="replace")
