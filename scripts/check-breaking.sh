#!/usr/bin/env bash
# Usage: check-breaking.sh BUF: fails when proto/ breaks the wire of the last release, or of main where there is none.
set -euo pipefail
buf=$(realpath "$1")
cd "$(dirname "$0")/.."
against=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || git rev-list --max-parents=0 HEAD | tail -n 1)
if ! git cat-file -e "$against:proto/buf.yaml" 2>/dev/null; then
  # Before the first release the first commit that holds proto/ is the floor.
  against=$(git log --reverse --format=%H -- proto/buf.yaml | head -n 1)
fi
[ -n "$against" ] || { echo "check-breaking: no commit holds proto/ yet" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive "$against" proto | tar -x -C "$work"
"$buf" breaking proto --against "$work/proto"
