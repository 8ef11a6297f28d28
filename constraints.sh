#!/usr/bin/env bash
# Write constraints.txt: the newest versions that satisfy pyproject.toml, all extras, with markers where
# they differ by Python (3.10 and up) or platform. Resolved from nothing, not from what is installed here.
set -euo pipefail
cd "$(dirname "$0")"

uv_version=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
"$scratch/venv/bin/uv" pip compile --quiet --no-config --universal --python-version 3.10 --all-extras \
    --no-annotate --no-header --output-file "$scratch/pins.txt" pyproject.toml
{
    echo "# Every version that the Makefile installs, also indirectly. Written by \`make pins\`; do not edit."
    cat "$scratch/pins.txt"
} > "$scratch/constraints.txt"
mv "$scratch/constraints.txt" constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) pins"
