"""The torch these tests run on, for what differs between the releases that ``docs/compatibility.md`` lists."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""(major, minor)."""

HAS_DEBUG_MODE = find_spec("torch.utils._debug_mode") is not None
needs_debug_mode = pytest.mark.skipif(not HAS_DEBUG_MODE, reason="torch 2.9 has no DebugMode, which captures stand on")
