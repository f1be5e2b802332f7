"""The script of this process and the folder its lines are shown relative to. No subprocess, no git."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MAX_PARENTS = 64
MAX_NAME_CHARS = 1000
MAX_WORKLOAD_CHARS = 200


@dataclass(frozen=True, slots=True)
class Script:
    """``name`` is relative to ``root``: the git checkout that holds the script, else the script's folder.

    ``workload`` is the default name of the workload: the file's name without its ending, or the module after ``-m``.
    """

    name: str
    workload: str
    root: Path


def script_of(modules: Mapping[str, ModuleType]) -> Script:
    """The script that runs as ``__main__``; an interactive session is called ``interactive``."""
    main = modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not file or file == "<stdin>":
        return Script("", "interactive", Path.cwd())
    path = Path(file).resolve()
    root = checkout_of(path.parent) or path.parent
    return Script(_text(str(path.relative_to(root)))[-MAX_NAME_CHARS:], _workload(main, path), root)


def _workload(main: ModuleType | None, path: Path) -> str:
    spec = getattr(main, "__spec__", None)
    name = spec.name.removesuffix("__main__").removesuffix(".") if spec is not None else ""
    if not name:  # a file, or a folder or archive that holds __main__.py
        name = path.parent.name if path.name == "__main__.py" else path.stem
    return _text(name)[:MAX_WORKLOAD_CHARS] or "unnamed"


def _text(name: str) -> str:
    """File names may hold bytes that are no text."""
    return "".join(char if char.isprintable() else "?" for char in name)


def checkout_of(folder: Path) -> Path | None:
    """The nearest folder at or above ``folder`` that holds ``.git``; None outside of a checkout."""
    for candidate in [folder, *folder.parents][:MAX_PARENTS]:
        if (candidate / ".git").exists():
            return candidate
    return None
