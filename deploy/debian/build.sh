#!/bin/sh
# Builds build/convoymq_VERSION_ARCH.deb for the Debian or Ubuntu release of this machine, as root,
# since the environment in /opt/convoymq is made where it will be. Needs python3-venv, python3-dev, gcc.
set -eu
cd "$(dirname "$0")/../.."
if [ -e /opt/convoymq ]; then
    echo "build.sh: /opt/convoymq exists: build on a machine, or in a clean root, without it" >&2
    exit 1
fi
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/convoymq/__init__.py | sed 's/\.dev/~dev/')
arch=$(dpkg --print-architecture)
python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
tree=$(mktemp -d)
trap 'rm -rf "$tree" /opt/convoymq' EXIT
python3 -m venv /opt/convoymq
/opt/convoymq/bin/pip install --quiet --no-cache-dir .
/opt/convoymq/bin/pip uninstall --quiet --yes pip

mkdir -p "$tree/DEBIAN" "$tree/opt" "$tree/usr/bin" "$tree/usr/share/doc/convoymq" "$tree/etc/convoymq"
cp -a /opt/convoymq "$tree/opt/"
ln -s /opt/convoymq/bin/convoy "$tree/usr/bin/convoy"
install -D -m 644 deploy/systemd/convoy.service "$tree/usr/lib/systemd/system/convoy.service"
install -D -m 644 deploy/systemd/convoymq.sysusers "$tree/usr/lib/sysusers.d/convoymq.conf"
install -m 640 deploy/debian/convoy.conf "$tree/etc/convoymq/convoy.conf"
install -m 644 LICENSE "$tree/usr/share/doc/convoymq/copyright"
install -m 755 deploy/debian/postinst deploy/debian/prerm "$tree/DEBIAN/"
echo /etc/convoymq/convoy.conf > "$tree/DEBIAN/conffiles"
cat > "$tree/DEBIAN/control" <<CONTROL
Package: convoymq
Version: $version
Architecture: $arch
Maintainer: ConvoyMQ developers <convoymq@localhost>
Depends: python3 (>= $python), python3 (<< ${python%.*}.$((${python#*.} + 1))), systemd | systemd-standalone-sysusers
Section: net
Priority: optional
Homepage: https://github.com/convoymq/convoymq
Description: replicated message broker
 Quorum queues, classic and mirrored queues, streams and ordered topics for
 clients of AMQP 0-9-1, AMQP 1.0 and RocketMQ.
CONTROL
mkdir -p build
dpkg-deb --build --root-owner-group "$tree" "build/convoymq_${version}_${arch}.deb"
