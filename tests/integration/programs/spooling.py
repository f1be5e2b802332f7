"""A rank without torch: writes frames to a spool as its standard input says, one answer a line."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from commwatch.agent.spool.page import Numbers
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2, records_pb2

RUN_ID = "01938ddd-0000-7000-8000-000000000001"
PATTERN = ingest_pb2.DEFINITION_KIND_PATTERN


def main() -> None:
    hello = ingest_pb2.Hello(
        agent_version="0.1.0",
        project="default",
        workload="spooling",
        run_id=RUN_ID,
        world_size=1,
        reporting_ranks=1,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        torch_version="2.13.0",
        started_unix_ns=1_800_000_000_000_000_000,
        script="spooling.py",
    )
    folder = Path(sys.argv[1]) / RUN_ID / "0-0"
    spool = SpoolWriter(folder, hello, int(sys.argv[2]))
    pattern = records_pb2.Pattern(calls=[records_pb2.Call(phase="forward", kind="all_reduce", raw_op="c10d::x")])
    pattern.order.append(0)
    key, step = spool.define(PATTERN, pattern.SerializeToString()), 0
    lines = records_pb2.Lines(pattern_hash=key, calls=[records_pb2.CallLines()])
    lines_key = spool.define(ingest_pb2.DEFINITION_KIND_LINES, lines.SerializeToString())
    shapes = records_pb2.Shapes(pattern_hash=key, shapes=[records_pb2.CallShapes(bytes_in=4, bytes_out=4)], order=[0])
    shapes_key = spool.define(ingest_pb2.DEFINITION_KIND_SHAPES, shapes.SerializeToString())
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "append":
            for _ in range(int(rest)):
                step += 1
                spool.append(
                    records_pb2.StepRange(
                        number=step,
                        first_step=step,
                        last_step=step,
                        steps=1,
                        pattern_hash=key,
                        shapes_hash=shapes_key,
                        lines_hash=lines_key,
                    )
                )
                spool.publish(Numbers(range_number=step, last_step=step, range_steps=1, steps=step, calls=step))
        elif word == "forward":
            from commwatch.agent.forwarder.start import start_forwarder

            start_forwarder(folder, Path(rest), os.environ, describe_only=False)
        elif word == "close":
            spool.close(*rest.split(","))
        elif word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "end":
            return
        print("done", flush=True)


main()
