#!/bin/sh
# Puts the jars of RocketMQ's broker, tools and client into build/rocketmq, for `make test-rocketmq`.
# What is there is kept. Java and Maven come from Debian's (or Ubuntu's) packages where they are
# missing.
set -eu

version=5.3.3
here=$(cd "$(dirname "$0")/.." && pwd)
jars=$here/build/rocketmq
if ls "$jars"/rocketmq-broker-$version.jar >/dev/null 2>&1; then
    echo "RocketMQ's jars are there already."
    exit 0
fi
if ! command -v javac >/dev/null || ! command -v mvn >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "No apt-get here. Install a JDK (17) and Maven by your system's own means." >&2
        exit 1
    fi
    sudo=
    [ "$(id -u)" -eq 0 ] || sudo=sudo
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get update -q
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        default-jdk-headless maven
fi
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
{
    echo '<project><modelVersion>4.0.0</modelVersion>'
    echo '<groupId>convoymq</groupId><artifactId>rocketmq</artifactId><version>1</version><dependencies>'
    for artifact in namesrv broker tools client; do
        echo "<dependency><groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-$artifact</artifactId>"
        echo "<version>$version</version></dependency>"
    done
    echo '</dependencies></project>'
} >"$project/pom.xml"
mvn -q -B -f "$project/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
    -DoutputDirectory="$jars"
echo "RocketMQ $version is in $jars."
