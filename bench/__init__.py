"""Benchmark reports: figures, tables, a chart, documents, and a machine description."""

from .chart import report_chart
from .documents import csv_document, html_document, json_document, summary
from .figures import Spread, memory_bytes
from .ranking import Rank, ranking
from .report import Report, Table, Trial, Variant
from .report_tables import run_table
from .results import Result, describe_machine, hardware, processor_name, versions
from .trial_matrix import (
    MAX_PAUSE_S,
    MAX_PREFETCH,
    MAX_RUNS,
    MAX_STEPS,
    Policy,
    Setting,
    TrialMatrix,
    TrialTimes,
    policy_name,
    run_trials,
)

__all__ = [
    "MAX_PAUSE_S",
    "MAX_PREFETCH",
    "MAX_RUNS",
    "MAX_STEPS",
    "Policy",
    "Rank",
    "Report",
    "Result",
    "Setting",
    "Spread",
    "Table",
    "Trial",
    "TrialMatrix",
    "TrialTimes",
    "Variant",
    "csv_document",
    "describe_machine",
    "hardware",
    "html_document",
    "json_document",
    "memory_bytes",
    "policy_name",
    "processor_name",
    "ranking",
    "report_chart",
    "run_table",
    "run_trials",
    "summary",
    "versions",
]
