#!/bin/sh
# Puts the jars of RocketMQ's broker, tools and client into build/rocketmq.
set -eu

group=org.apache.rocketmq:rocketmq version=5.3.3
exec "$(dirname "$0")/install_jars.sh" build/rocketmq \
    $group-namesrv:$version $group-broker:$version $group-tools:$version $group-client:$version
