"""Answers about stored runs: what a name means, what a run did, how two runs differ, and whether that fails."""

from commwatch.service.verdicts.comparing import Verdict, compare_refs, gate
from commwatch.service.verdicts.explaining import (
    AmbiguousSiteError,
    Explanation,
    UnknownCaptureError,
    UnknownSiteError,
    captured_step,
    explain,
)
from commwatch.service.verdicts.live import evaluate
from commwatch.service.verdicts.reading import RunReport, StepCounts, load_steady, show
from commwatch.service.verdicts.refs import AmbiguousRefError, NoRunError, RefError, UnknownRefError, resolve

__all__ = [
    "AmbiguousRefError",
    "AmbiguousSiteError",
    "Explanation",
    "NoRunError",
    "RefError",
    "RunReport",
    "StepCounts",
    "UnknownCaptureError",
    "UnknownRefError",
    "UnknownSiteError",
    "Verdict",
    "captured_step",
    "compare_refs",
    "evaluate",
    "explain",
    "gate",
    "load_steady",
    "resolve",
    "show",
]
