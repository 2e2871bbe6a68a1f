#!/bin/sh
# Installs Debian's (or Ubuntu's) RabbitMQ for the benchmarks and the interop tests, and keeps its
# system service from starting: the benchmarks start nodes of their own, on loopback.
set -eu

if [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]; then
    echo "RabbitMQ is installed already."
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "No apt-get here. Install RabbitMQ by your system's own means; the benchmarks look for" >&2
    echo "/usr/lib/rabbitmq/bin/rabbitmq-server and epmd." >&2
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
apt-get install -y -q --no-install-recommends rabbitmq-server
if command -v systemctl >/dev/null && [ -d /run/systemd/system ]; then
    systemctl disable --now rabbitmq-server
fi
echo "RabbitMQ is installed; its system service stays off."
