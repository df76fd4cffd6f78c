"""Benchmark reports: figures, tables, a chart, documents, and the machine they were measured on."""

from __future__ import annotations

from .chart import report_chart
from .documents import csv_document, html_document, json_document, summary
from .figures import Spread, held_bytes, steady_s
from .machine_info import hardware, hardware_name, machine_words, versions
from .report import Report, Trial, Variant
from .report_tables import run_table
from .results import Result, newest_results, usual_device
from .table import Table

__all__ = [
    "Report",
    "Result",
    "Spread",
    "Table",
    "Trial",
    "Variant",
    "csv_document",
    "hardware",
    "hardware_name",
    "held_bytes",
    "html_document",
    "json_document",
    "machine_words",
    "newest_results",
    "report_chart",
    "run_table",
    "steady_s",
    "summary",
    "usual_device",
    "versions",
]
