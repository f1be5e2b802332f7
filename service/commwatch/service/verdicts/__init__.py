"""Answers about stored runs: what a name means, what a run did, how two runs differ, and whether that fails."""

from commwatch.service.verdicts.comparing import Verdict, compare_refs, gate
from commwatch.service.verdicts.live import evaluate
from commwatch.service.verdicts.reading import RunReport, StepCounts, load_steady, show
from commwatch.service.verdicts.refs import AmbiguousRefError, NoRunError, RefError, UnknownRefError, resolve

__all__ = [
    "AmbiguousRefError",
    "NoRunError",
    "RefError",
    "RunReport",
    "StepCounts",
    "UnknownRefError",
    "Verdict",
    "compare_refs",
    "evaluate",
    "gate",
    "load_steady",
    "resolve",
    "show",
]
