"""``make bench``: every row, or those named on the command line."""

from __future__ import annotations

import sys

from tests.bench import import_time, op_records, per_collective, step_time

ROWS = {
    "step": step_time.rows,
    "collective": per_collective.rows,
    "ops": op_records.rows,
    "import": import_time.rows,
}


def main() -> int:
    chosen = sys.argv[1:] or list(ROWS)
    unknown = [name for name in chosen if name not in ROWS]
    if unknown:
        print(f"unknown rows: {', '.join(unknown)}; there are: {', '.join(ROWS)}")
        return 2
    for name in chosen:
        for line in ROWS[name]():
            print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
