#!/usr/bin/env bash
# install_browser.sh BIN: what `make test-page` needs; what is there stays.
# Chromium from Debian, Playwright from PyPI into the environment of BIN, axe-core from npm into build/page.
set -euo pipefail
bin=${1:?directory of the environment\'s commands}
axe=4.14.1
sudo=$([ "$(id -u)" = 0 ] || echo sudo)

command -v chromium >/dev/null || { $sudo apt-get update -q && $sudo apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core; }
"$bin/python" -c 'import playwright' 2>/dev/null || "$bin/python" -m pip install --quiet 'playwright>=1.50'
mkdir -p build/page
if [ ! -f "build/page/axe-$axe.js" ]; then
  command -v npm >/dev/null || { $sudo apt-get install -q -y --no-install-recommends npm; }
  npm install --silent --no-save --prefix build/page "axe-core@$axe"
  cp build/page/node_modules/axe-core/axe.min.js "build/page/axe-$axe.js"
fi
