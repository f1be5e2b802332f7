"""Phase and module on real gloo ranks, of what the fake process group cannot run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.ranks import PROGRAMS, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("attribution")
    run_ranks(PROGRAMS / "attribution.py", [str(out)], 2)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_ddp_reduces_for_the_wrapped_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["ddp"] == {
            "rows": [["backward", "all_reduce", "(root)", 1], ["forward", "broadcast", "(root)", 4]],
            "counted": 5,  # by gloo itself
        }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_send_activations_forward_and_gradients_backward(found: list[dict[str, Any]], schedule: str) -> None:
    first, last = (rank[schedule] for rank in found)
    assert first == {"equal": True, "rows": [["backward", "recv", "(root)", 4], ["forward", "send", "(root)", 4]]}
    assert last == {"equal": True, "rows": [["backward", "send", "(root)", 4], ["forward", "recv", "(root)", 4]]}


def test_distributed_checkpoints_are_their_own_phase(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["checkpoint"]["phases"] == ["checkpoint"]
        assert rank["checkpoint"]["calls"] > 0
