#!/usr/bin/env bash
# Usage: check-generated.sh BIN: fails when the committed generated code is not what proto/ generates.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$here/generate-proto.sh" "$1" "$work"
for file in "$work"/commwatch/v1/*; do
  diff -u "$here/../proto/commwatch/v1/$(basename "$file")" "$file" >&2 || {
    echo "generated code differs from proto/: run 'make proto' and commit the result" >&2
    exit 1
  }
done
