#!/usr/bin/env bash
# Builds a wheel and tries it where nothing of this clone is to be seen: a fresh environment, an empty
# home, a PATH without compilers. Leaves the wheel in build/wheels.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root/build/wheels"
CONVOY_PLAIN_LEVEL=-O2 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$root/build/wheels" "$root"
wheel=$(ls -t "$root"/build/wheels/convoymq-*.whl | head -1)
"$python" -m venv "$work/env"
mkdir "$work/bin" "$work/home"
for tool in sh bash env uname ldd ip; do
    found=$(command -v "$tool") && ln -s "$found" "$work/bin/$tool"
done
"$work/env/bin/python" -m pip install --quiet "$wheel" pika
cp "$root/tools/try_wheel.py" "$work"
cd "$work"
env -i PATH="$work/env/bin:$work/bin" HOME="$work/home" TMPDIR="${TMPDIR:-/tmp}" \
    "$work/env/bin/python" try_wheel.py
echo "$wheel"
