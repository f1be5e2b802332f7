"""A picture of what a command printed."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 102


def save(path: Path, command: str, output: str) -> None:
    """Write an SVG that shows the command and its output. Raises OSError."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ commwatch {command}", style="bold"))
    for line in output.splitlines():
        style = {"alert": "bold red", "warn": "yellow", "regre": "bold red"}.get(line[:5].strip(), "")
        console.print(Text(line, style=style))
    # The default format loads a font from elsewhere.
    code_format = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    code_format = code_format.replace("Fira Code", "DejaVu Sans Mono")
    path.write_text(console.export_svg(title="commwatch", code_format=code_format))
