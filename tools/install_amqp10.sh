#!/bin/sh
# Puts clients of AMQP 1.0 into build/amqp10 and the environment, for `make test-amqp10`. A client
# that cannot be had here is named, and its tests are skipped.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
made=$here/build/amqp10
python=${1:-$here/.venv/bin/python}

try() { # WHAT COMMAND…
    what=$1
    shift
    "$@" || echo "Skipped: $what. This fails: $*" >&2
}

rhea() {
    mkdir -p "$made/rhea" && cd "$made/rhea" && echo '{"private": true}' >package.json &&
        npm install --no-audit --no-fund --loglevel=error rhea@3.0.5
}

go_amqp() {
    mkdir -p "$made/go" && cd "$made/go" && cp "$here/tests/interop/amqp10/clients/go/main.go" . &&
        { [ -f go.mod ] || go mod init client; } && go get github.com/Azure/go-amqp@v1.7.0 &&
        go build -o client .
}

# Proton is compiled.
try "Qpid Proton and RabbitMQ's Python client" \
    "$python" -m pip install --quiet python-qpid-proton rabbitmq-amqp-python-client
try "RabbitMQ's Java client" "$here/tools/install_jars.sh" build/amqp10/rabbitmq \
    com.rabbitmq.client:amqp-client:1.5.0
try "Qpid JMS" "$here/tools/install_jars.sh" build/amqp10/jms \
    org.apache.qpid:qpid-jms-client:2.10.0 org.slf4j:slf4j-nop:2.0.17
(try "rhea" rhea)
(try "go-amqp" go_amqp)
