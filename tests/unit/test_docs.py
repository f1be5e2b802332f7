"""Documentation that would not be true fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commwatch.service.cli import AGENT_COMMANDS, SERVICE_COMMANDS
from commwatch.service.settings import markdown_rows

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/adr/*.md")])


def test_every_setting_of_the_service_is_documented() -> None:
    page = (ROOT / "docs" / "service-settings.md").read_text()
    assert page.endswith("\n".join(markdown_rows()) + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [name for name in (*AGENT_COMMANDS, *SERVICE_COMMANDS) if name not in readme]
    assert missing == []


def test_the_readmes_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))
    assert {"demo", "test", "check", "proto", "bench"} <= named
    assert [target for target in sorted(named) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_limits_in_the_readme_are_those_of_the_code() -> None:
    readme = (ROOT / "README.md").read_text()
    from commwatch.agent.recorder import observer, ranges, recorder

    assert f"| ranges of one pattern and rank | {ranges.PRECISE_RANGES} of consecutive steps |" in readme
    assert f"| patterns of one rank | {ranges.MAX_PATTERNS:,} | windows of {ranges.WINDOW_STEPS} steps" in readme
    assert f"| calls of one step | {recorder.MAX_CALLS_PER_STEP:,} |" in readme
    assert f"| distinct calls, lines for each | {observer.MAX_IDENTITIES:,}; {observer.MAX_LINES} |" in readme
