#!/usr/bin/env bash
# Usage: generate-proto.sh BIN OUT: generates Python from proto/ into OUT, with the tools in BIN.
set -euo pipefail
bin=$(realpath "$1")
out=$(realpath "$2")
cd "$(dirname "$0")/../proto"
PATH="$bin:$PATH" python -m grpc_tools.protoc -I . \
  --python_out="$out" --mypy_out="quiet:$out" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
  commwatch/v1/*.proto
# records.proto and the other message files have no service: an empty module of theirs is not kept.
rm -f "$out"/commwatch/v1/records_pb2_grpc.py*
