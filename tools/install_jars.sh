#!/bin/sh
# Puts jars from Maven Central, with those that they need, into a directory: for tests and benchmarks
# beside other systems. What is there is kept. Java and Maven come from Debian's (or Ubuntu's) packages
# where they are missing.
#
#   tools/install_jars.sh build/rocketmq org.apache.rocketmq:rocketmq-client:5.3.3 …
set -eu

jars=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
if [ "$(cat "$jars/artifacts" 2>/dev/null)" = "$*" ]; then
    echo "The jars of $jars are there already."
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
    echo '<groupId>convoymq</groupId><artifactId>jars</artifactId><version>1</version><dependencies>'
    for each in "$@"; do
        version=${each##*:}
        name=${each%:*}
        echo "<dependency><groupId>${name%:*}</groupId><artifactId>${name#*:}</artifactId>"
        echo "<version>$version</version></dependency>"
    done
    echo '</dependencies></project>'
} >"$project/pom.xml"
mvn -q -B -f "$project/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
    -DoutputDirectory="$here/$jars"
echo "$*" >"$jars/artifacts"
echo "$jars has $*."
