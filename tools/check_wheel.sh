#!/usr/bin/env bash
# Builds the wheels of convoymq and convoymq-client and tries both where nothing of this clone is to be
# seen: fresh environments, an empty home, a PATH without compilers. Leaves the wheels in build/wheels.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root/build/wheels" "$work/bin" "$work/home"
rm -f "$root"/build/wheels/convoymq*.whl
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$root/build/wheels" "$root" "$root/packages/client"
"$python" -m venv "$work/env"
"$python" -m venv "$work/client"
"$work/env/bin/python" -m pip install --quiet "$root"/build/wheels/convoymq-*.whl pika
"$work/client/bin/python" -m pip install --quiet "$root"/build/wheels/convoymq_client-*.whl
"$work/client/bin/python" -m pip list --format freeze
for tool in sh bash env uname ldd ip; do
    found=$(command -v "$tool") && ln -s "$found" "$work/bin/$tool"
done
cp "$root/tools/try_wheel.py" "$root/tools/try_client.py" "$work"
cd "$work"
env -i PATH="$work/env/bin:$work/bin" HOME="$work/home" TMPDIR="${TMPDIR:-/tmp}" \
    "$work/env/bin/python" try_wheel.py "$work/client/bin/python"
ls -l "$root"/build/wheels/*.whl
