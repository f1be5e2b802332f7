"""What packaging relies on: one namespace from four folders, and a wheel that holds all of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("agent", "service", "migrations", "proto")


@pytest.mark.parametrize("source", SOURCES)
def test_namespace_folders_hold_no_init(source: str) -> None:
    assert not (ROOT / source / "__init__.py").exists()
    assert not (ROOT / source / "commwatch" / "__init__.py").exists()


@pytest.mark.parametrize(
    "package",
    [
        "agent/commwatch/agent",
        "service/commwatch/service",
        "service/commwatch/client",
        "migrations/commwatch/migrations",
        "proto/commwatch/v1",
    ],
)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_the_wheel_holds_every_package_and_the_example_job(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "commwatch/agent/autoload.py",
        "commwatch/agent/examples/tensor_parallel/model.py",
        "commwatch/agent/examples/tensor_parallel/train.py",
        "commwatch/client/http.py",
        "commwatch/migrations/env.py",
        "commwatch/service/cli/demo.py",
        "commwatch/v1/ingest_pb2.py",
        "commwatch/v1/ingest_pb2_grpc.py",
    }
    assert expected <= names
    assert any(name.startswith("commwatch/migrations/versions/0001") for name in names)
    assert "commwatch/__init__.py" not in names
    metadata = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "commwatch = commwatch.service.cli:main" in text
    assert "commwatch = commwatch.agent.autoload:autoload" in text


def test_importing_the_agent_imports_neither_torch_nor_grpc() -> None:
    program = (
        "import sys, commwatch.agent, commwatch.agent.settings, commwatch.agent.spool.writer, commwatch.agent.cli;"
        "print(sorted({'torch', 'grpc', 'sqlalchemy'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.strip() == "[]"


def test_the_agents_front_door() -> None:
    import commwatch.agent

    assert commwatch.agent.__all__ == ["record", "step"]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = commwatch.agent.nothing
