#!/bin/sh
# Installs Debian's (or Ubuntu's) MariaDB and sysbench for `make demo-cdc`, and keeps the system
# service from starting: the demo starts a server of its own, on loopback.
set -eu

needed=10.11
check_version() {
    # What the demo refuses is told here already: "mariadbd  Ver 10.5.29-MariaDB-...".
    version=$("$1" --no-defaults --version | sed -n 's/.*Ver \([0-9.]*\)-MariaDB.*/\1/p')
    if [ -z "$version" ] ||
        [ "$(printf '%s\n' "$needed" "$version" | sort -V | head -n 1)" != "$needed" ]; then
        echo "$1 is ${version:-no MariaDB}: the demo needs MariaDB $needed or newer." >&2
        exit 1
    fi
}

server=$(PATH="$PATH:/usr/sbin" command -v mariadbd || true)
if [ -n "$server" ]; then
    check_version "$server"
    if command -v sysbench >/dev/null; then
        echo "MariaDB and sysbench are installed already."
        exit 0
    fi
fi
if ! command -v apt-get >/dev/null; then
    echo "No apt-get here. Install MariaDB $needed or newer and sysbench by your system's own means." >&2
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
check_version "$(PATH="$PATH:/usr/sbin" command -v mariadbd)"
echo "MariaDB and sysbench are installed; the system service stays off."
