"""What a rank knows of its environment once it ran: mesh, device, backend, compile mode and the model's modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commwatch.agent.recorder import torch_private, wire
from commwatch.agent.recorder.observer import Observer
from commwatch.agent.recorder.ranges import Sink
from commwatch.v1 import records_pb2


def backend_text() -> str:
    """Backend of the default group, with the version where the backend has one: ``gloo``, ``nccl 2.27.5``."""
    if not dist.is_initialized():
        return ""
    name = str(dist.get_backend())
    if "nccl" in name and torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        version = nccl.version()
        return f"{name} {'.'.join(str(part) for part in version)}"
    return name


class FactsReporter:
    """Sends Facts when they changed."""

    def __init__(self, observer: Observer, sink: Sink) -> None:
        self._observer = observer
        self._sink = sink
        self._modules_hash = b""
        self._modules_version = -1
        self._backend = ""
        self._sent: bytes | None = None

    def report(self) -> None:
        """Send the facts if they are not those sent last."""
        names = self._observer.names
        if names.version != self._modules_version:
            self._modules_version = names.version
            self._modules_hash = self._sink.define(wire.MODULES, wire.modules(names.inventory()))
        self._backend = backend_text() or self._backend  # groups may be gone when the process ends
        message = records_pb2.Facts(
            mesh=[records_pb2.MeshDimension(name=name, size=size) for name, size in self._observer.groups.mesh],
            device_type="+".join(sorted(self._observer.device_types)),
            backend=self._backend,
            compile_mode="compile" if torch_private.compiled_frames() else "eager",
            modules_hash=self._modules_hash,
        )
        content = message.SerializeToString(deterministic=True)
        if content != self._sent and self._sink.append(message):
            self._sent = content
