"""``commwatch doctor`` runs the self-test that each rank runs, in a process like a rank's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commwatch.agent.cli.doctor import Finding, examine


def self_test_of(environ: dict[str, str]) -> Finding:
    (found,) = [finding for finding in examine(environ) if finding.name == "self-test"]
    return found


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
    return {**clean, "COMMWATCH_SPOOL_DIR": str(tmp_path / "spool")}


def test_it_shows_that_interposition_works(environ: dict[str, str]) -> None:
    found = self_test_of(environ)
    assert (found.ok, found.text) == (True, "a call through the dispatcher was seen once and came through unchanged")


def test_it_shows_what_is_wrong_and_where_to_look(environ: dict[str, str], tmp_path: Path) -> None:
    """Something in this environment keeps the kernels from being put in place."""
    (tmp_path / "sitecustomize.py").write_text(
        "from commwatch.agent.recorder import interpose\ninterpose.add = lambda sink: None\n"
    )
    found = self_test_of({**environ, "PYTHONPATH": str(tmp_path)})
    assert (found.ok, found.text) == (False, "a call through the dispatcher was not seen")
    assert "torch.library.Library" in found.advice


def test_it_says_what_a_torch_cannot_give(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ndel torch._C._autograd._get_sequence_nr\n")
    (torch,) = [found for found in examine({**environ, "PYTHONPATH": str(tmp_path)}) if found.name == "torch"]
    assert torch.ok
    assert "without torch._C._autograd._get_sequence_nr collectives in backward have no module" in torch.text


def test_it_says_that_a_torch_has_no_op_level(environ: dict[str, str], tmp_path: Path) -> None:
    """As with torch 2.9, whose module is not there."""
    (tmp_path / "sitecustomize.py").write_text(
        "from commwatch.agent.debug import torch_private\ntorch_private._module = None\n"
    )
    (torch,) = [found for found in examine({**environ, "PYTHONPATH": str(tmp_path)}) if found.name == "torch"]
    assert torch.ok
    assert "without torch.utils._debug_mode collectives are recorded but no step is captured op by op" in torch.text


def test_it_refuses_a_torch_that_cannot_be_recorded_in_one_line(environ: dict[str, str], tmp_path: Path) -> None:
    """As torch 2.8, whose ops cannot be handed on without the GIL."""
    (tmp_path / "sitecustomize.py").write_text(
        "from commwatch.agent.recorder import torch_private\n"
        "name = 'OperatorHandle.redispatch_boxed (torch >= 2.9)'\n"
        "assert name in torch_private.PROBES\n"
        "torch_private.PROBES[name] = lambda: False\n"
    )
    (torch,) = [found for found in examine({**environ, "PYTHONPATH": str(tmp_path)}) if found.name == "torch"]
    assert not torch.ok
    assert torch.text.endswith(" lacks OperatorHandle.redispatch_boxed (torch >= 2.9)")
    assert torch.advice == "use torch >= 2.9"
