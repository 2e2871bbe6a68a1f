#!/bin/sh
# Installs Debian's (or Ubuntu's) MariaDB and sysbench for `make demo-cdc`, and keeps the system
# service from starting: the demo starts a server of its own, on loopback.
set -eu

if { [ -x /usr/sbin/mariadbd ] || command -v mariadbd >/dev/null; } &&
    command -v sysbench >/dev/null; then
    echo "MariaDB and sysbench are installed already."
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "No apt-get here. Install MariaDB 10.11 or newer and sysbench by your system's own means." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    exec sudo "$0" "$@"
fi

policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    # Package scripts ask this file whether they may start services; 101 means no.
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends mariadb-server sysbench
if command -v systemctl >/dev/null && [ -d /run/systemd/system ]; then
    systemctl disable --now mariadb
fi
echo "MariaDB and sysbench are installed; the system service stays off."
