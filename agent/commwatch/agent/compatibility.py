"""What works on which torch: the table of the documentation, of the releases the tests ran on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commwatch.agent.recorder.features import EVERY, reduced
from commwatch.agent.recorder.torch_private import MINIMUM_TORCH


@dataclass(frozen=True, slots=True)
class Release:
    """A release of torch. ``lacking`` names, by feature, the APIs it does not have; ``notes`` are known differences."""

    torch: str
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_NO_DEBUG_MODE = ("torch.utils._debug_mode",)

RELEASES = (
    Release(
        "2.9.1",
        {"op level": _NO_DEBUG_MODE, "`DebugMode`": _NO_DEBUG_MODE},
        (
            "Captures are refused with the reason, those that are asked for at run time too.",
            "`aot_eager`, a backend for debugging: collectives of a region belong to the module that was compiled.",
            "Where a function was compiled, its modules' names begin with the model's class (`aot_eager`: no module).",
            "`torch.compile` compiles a region anew below `CommDebugMode`, and its collectives count.",
            "`CommDebugMode` counts as torch's does; tables differ in FSDP's own ops and in empty headings.",
            "A mesh whose process group was destroyed may name groups of the next world in the same process.",
        ),
    ),
    Release("2.13.0"),
    Release(
        "2.14.1",
        notes=(
            "torch's own `CommDebugMode` no longer fails at modules that are called twice; ours counts the same there.",
            "`DebugMode.save_logs` and `load_logs`, new in torch 2.14, work with ours.",
            "Compare logs that were loaded with logs that were loaded: a running mode's are records of another type.",
        ),
    ),
)
"""Every release the tests are run on, oldest first."""


def measured() -> dict[str, tuple[str, ...]]:
    """What the torch of this process lacks, by feature. Loads DTensor."""
    return {feature.name: tuple(absent) for feature, absent in reduced(EVERY)}


def as_markdown() -> str:
    """``docs/compatibility.md``, whole."""
    lines = [
        "# Which torch",
        "",
        f"commwatch records on torch {MINIMUM_TORCH} and later. It looks for each private API it needs: without one",
        "it goes without what needs it, and a job says so in one line at its start; without what all recording needs,",
        "it records nothing and says that. `commwatch doctor` says the same of the torch at hand. These releases are",
        "tested, each in an environment of its own (`make test-torch`):",
        "",
        f"| | {' | '.join(release.torch for release in RELEASES)} | without it |",
        f"|---|{'---|' * len(RELEASES)}---|",
    ]
    for feature in EVERY:
        cells = ["no" if feature.name in release.lacking else "yes" for release in RELEASES]
        lines.append(f"| {feature.name} | {' | '.join(cells)} | {feature.without} |")
    for release in RELEASES:
        notes = [f"No {name}: this torch lacks `{'`, `'.join(absent)}`." for name, absent in release.lacking.items()]
        notes += release.notes
        if notes:
            lines += ["", f"## torch {release.torch}", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"
