#!/usr/bin/env bash
# What `make test-metrics` needs, from Debian; what is there stays. The service is not started.
set -euo pipefail
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
command -v prometheus >/dev/null || { $sudo apt-get update -q && $sudo apt-get install -q -y --no-install-recommends prometheus; }
