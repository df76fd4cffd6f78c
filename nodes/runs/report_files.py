"""Files of a benchmark's report, each written atomically."""

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
    """JSON, CSV, HTML and PNG of one report in the output folder; a context manager around the runs.

    The JSON is written after every run: a full disk is noticed early, and the measurements survive a killed process.
    A benchmark that was stopped or failed writes all four files. All methods raise ReportFileError.
    """

    def __init__(self, place: OutputFile) -> None:
        self._place = place
        self._saved: Report | None = None

    def save(self, report: Report) -> None:
        """Write the JSON of the report so far over the one before."""
        self._write(".json", _bytes(json_document(report)))
        self._saved = report

    def finish(self, report: Report) -> Image.Image:
        """Write all four files and return the chart."""
        chart = report_chart(report)
        pixels = io.BytesIO()
        chart.save(pixels, "PNG")
        self.save(report)
        self._write(".csv", _bytes(csv_document(report)))
        self._write(".html", _bytes(html_document(report, pixels.getvalue())))
        self._write(".png", pixels.getvalue())
        return chart

    def __enter__(self) -> ReportFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ReportFileError) or self._saved is None or not self._saved.done:
            return
        try:
            self.finish(self._saved)
        except ReportFileError as err:  # not raised: the error that ended the benchmark must be shown
            logger.warning("the report of the runs so far is incomplete: %s", err)

    def traces(self) -> Path:
        """Return the path of the folder for traces of these runs, which is not created here."""
        return self._place.path.with_name(f"{self._place.path.stem}traces")

    def chart_preview(self) -> ui.SavedResult:
        """Return the chart's file as the host's page refers to it."""
        name = Path(self._place.filename).with_suffix(".png").name
        return ui.SavedResult(name, self._place.subfolder, host_io.FolderType.output)

    def _write(self, suffix: str, content: bytes) -> None:
        path = self._place.path.with_suffix(suffix)
        unfinished = path.with_name(path.name + ".part")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except OSError as err:
            raise ReportFileError(err.errno, f"{path} could not be written: {err.strerror}. {self._remedy()}") from err
        finally:
            unfinished.unlink(missing_ok=True)

    def _remedy(self) -> str:
        """Return the end of an error message: the files that exist, and the way out."""
        written = self._place.path.with_suffix(".json")
        if written.exists():
            return f"All runs before are in {written}: make room on the disk and queue again for the rest"
        return "Nothing was written: make room on the disk and queue again"


def _bytes(text: str) -> bytes:
    """Encode as UTF-8; lone surrogates, as in file names of another encoding, become question marks."""
    return text.encode(errors="replace")
