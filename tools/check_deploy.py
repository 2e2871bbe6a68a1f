"""Carries out what `deploy/` describes, in a clean root instead of Docker and Kubernetes.

    image   every step of the Dockerfile, then three nodes by compose.yaml from the image's files:
            as its user, in its file system, which they cannot write; a message through two of them
    deb     the Debian package is built, installed into a root without compilers, and its node runs
    chart   helm lint and helm template, and the rendered objects against Kubernetes' own schemas

Needs root and mmdebstrap; `chart` needs helm and kubernetes-validate on the PATH.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pika
import yaml

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
USER = 10001
PATIENCE_S = 300
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def say(text: str) -> None:
    print(f"check_deploy: {text}", flush=True)


class CleanRoot:
    """A root directory with a minimal Debian."""

    def __init__(self, path: Path, base: Path) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["tar", "-xf", base, "-C", path, "--exclude=./dev/*"], check=True)
        (path / "dev/shm").mkdir(parents=True, exist_ok=True)
        for device in ("null", "zero", "urandom", "random"):
            subprocess.run(["cp", "-a", f"/dev/{device}", path / "dev"], check=True)
        shutil.copy("/etc/resolv.conf", path / "etc/resolv.conf")
        self.environment = {
            "PATH": SYSTEM_PATH,
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        if certificates:
            # A machine's own authorities, under a name that no package of the root takes.
            shutil.copy(certificates, path / "machine-certificates.crt")
            self.environment["PIP_CERT"] = "/machine-certificates.crt"

    def command(self, *words: str, user: int = 0, read_only: bool = False) -> list[str]:
        """Returns a command that runs in this root, with /proc and /dev/shm of its own."""
        root = shlex.quote(str(self.path))
        binds = f"mount --bind {root} {root} && mount -t proc proc {root}/proc"
        binds += f" && mount -t tmpfs tmpfs {root}/dev/shm"
        if read_only:
            binds += f" && mount --bind {root}/var/lib/convoymq {root}/var/lib/convoymq"
            binds += f" && mount -o remount,bind,ro {root}"
        inner = f'{binds} && exec /usr/sbin/chroot --userspec={user}:{user} {root} "$@"'
        return ["unshare", "--mount", "sh", "-c", inner, "sh", *words]

    def run(self, script: str) -> None:
        subprocess.run(self.command("sh", "-ec", script), check=True, env=self.environment)

    def copy_sources(self) -> None:
        """Puts the repository's files to /src, as `COPY . /src` does."""
        target = self.path / "src"
        target.mkdir(exist_ok=True)
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(
            ["tar", "-c", "--null", "-T", "-", "-f", target / "all.tar"],
            cwd=ROOT, check=True, input=names.stdout,
        )  # fmt: skip
        subprocess.run(["tar", "-xf", "all.tar"], cwd=target, check=True)
        (target / "all.tar").unlink()


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    for line in dockerfile.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def built_image(work: Path, base: Path) -> tuple[CleanRoot, dict[str, str], str]:
    """Carries out the Dockerfile; returns its last stage, its environment and its health check."""
    stages: dict[str, CleanRoot] = {}
    root: CleanRoot | None = None
    environment: dict[str, str] = {}
    health = ""
    for word, rest in instructions((DEPLOY / "docker/Dockerfile").read_text()):
        say(f"{word} {rest}")
        if word == "FROM":
            name = rest.rpartition(" AS ")[2] if " AS " in rest else "image"
            root = stages[name] = CleanRoot(work / name, base)
            continue
        assert root is not None
        if word == "RUN":
            root.run(rest)
        elif word == "COPY" and (found := re.fullmatch(r"--from=(\w+) (\S+) (\S+)", rest)):
            source = stages[found[1]].path / found[2][1:]
            subprocess.run(["cp", "-a", source, root.path / found[3][1:]], check=True)
        elif word == "COPY" and rest == ". /src":
            root.copy_sources()
        elif word == "COPY":
            source_name, target_name = rest.split()
            target = root.path / target_name[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source_name, target)
            target.chmod(0o644)
        elif word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "HEALTHCHECK":
            health = rest.partition(" CMD ")[2]
    assert root is not None
    return root, environment, health


@contextmanager
def running(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
        if code:
            raise SystemExit(f"check_deploy: a node ended with {code} after SIGTERM")
    finally:
        if process.poll() is None:
            process.kill()


def until_open(host: str, port: int = 5672) -> None:
    ends = time.monotonic() + PATIENCE_S
    check = f"</dev/tcp/{host}/{port}"
    while subprocess.run(["bash", "-c", check], stderr=subprocess.DEVNULL, check=False).returncode:
        if time.monotonic() > ends:
            raise SystemExit(f"check_deploy: nothing listens on {host}:{port}")
        time.sleep(0.2)


def connection(host: str, user: str, password: str) -> pika.BlockingConnection:
    credentials = pika.PlainCredentials(user, password)
    return pika.BlockingConnection(pika.ConnectionParameters(host, credentials=credentials))


def send_through(first: str, second: str, user: str, password: str) -> None:
    """Publishes on one node what is fetched from another."""
    with closing(connection(first, user, password)) as made:
        channel = made.channel()
        channel.confirm_delivery()
        channel.queue_declare("parcels", durable=True)
        channel.basic_publish("", "parcels", b"a parcel")
    with closing(connection(second, user, password)) as made:
        _, _, body = made.channel().basic_get("parcels", auto_ack=True)
    if body != b"a parcel":
        raise SystemExit(f"check_deploy: got {body!r}")


def check_image(work: Path, base: Path) -> None:
    root, environment, health = built_image(work, base)
    size = subprocess.run(["du", "-sm", root.path], check=True, capture_output=True, text=True)
    say(f"image: {size.stdout.split()[0]} MB")
    compose = (DEPLOY / "docker/compose.yaml").read_text()
    compose = re.sub(r"\$\{(\w+):[?-]([^}]*)\}", lambda found: f"value-of-{found[1]}", compose)
    services = yaml.safe_load(compose)["services"]
    with open(root.path / "etc/hosts", "a") as hosts:
        hosts.writelines(f"127.0.0.{k} {name}\n" for k, name in enumerate(services, 1))
    data = root.path / "var/lib/convoymq"
    with ExitStack() as stack:
        for k, (name, service) in enumerate(services.items(), 1):
            assert service["read_only"]
            own = {
                **environment,
                **service["environment"],
                # Containers have addresses of their own; here each node has one of loopback's.
                "CONVOY_LISTENERS_TCP_DEFAULT": f"127.0.0.{k}:5672",
                "CONVOY_MANAGEMENT_TCP_PORT": f"127.0.0.{k}:15672",
                "CONVOY_PROMETHEUS_TCP_PORT": f"127.0.0.{k}:15692",
                "CONVOY_CLUSTER_LISTEN": f"127.0.0.{k}:25672",
                "CONVOY_DATA_DIR": f"/var/lib/convoymq/{name}",
            }
            (data / name).mkdir(mode=0o700)
            os.chown(data / name, USER, USER)
            command = root.command("convoy", "node", user=USER, read_only=True)
            stack.enter_context(running(command, own))
        until_open("127.0.0.3")
        subprocess.run(root.command("sh", "-c", health, user=USER), check=True, env=environment)
        send_through("127.0.0.1", "127.0.0.3", "value-of-CONVOY_DEFAULT_USER",
                     "value-of-CONVOY_DEFAULT_PASS")  # fmt: skip
    say("image: three nodes by compose.yaml passed a message on, and ended in order")


def check_deb(work: Path, base: Path) -> None:
    builder = CleanRoot(work / "builder", base)
    builder.copy_sources()
    packages = "dpkg-dev gcc libc6-dev python3-dev python3-venv"
    builder.run(f"apt-get update -q && apt-get install -qy --no-install-recommends {packages}")
    builder.run("sh /src/deploy/debian/build.sh")
    (package,) = (builder.path / "src/build").glob("convoymq_*.deb")
    root = CleanRoot(work / "installed", base)
    shutil.copy(package, root.path / "tmp")
    root.run(
        f"apt-get update -q && apt-get install -qy --no-install-recommends /tmp/{package.name}"
    )
    unit = (root.path / "usr/lib/systemd/system/convoy.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    owner = (root.path / "var/lib/convoymq").stat().st_uid
    environment = {"PATH": SYSTEM_PATH, "CONVOY_DATA_DIR": "/var/lib/convoymq"}
    with running(root.command(*start.split(), user=owner, read_only=True), environment):
        until_open("127.0.0.1")
        send_through("127.0.0.1", "127.0.0.1", "guest", "guest")
    root.run("apt-get purge -qy convoymq")
    say(f"deb: {package.name} installed, its node passed a message on, and it was removed")


def check_chart() -> None:
    chart = DEPLOY / "helm/convoymq"
    subprocess.run(["helm", "lint", "--strict", "--quiet", chart], check=True)
    for settings in (
        "",
        "replicas=1",
        "existingSecret=mine,podAntiAffinity=soft",
        "podAntiAffinity=none",
    ):
        rendered = subprocess.run(
            ["helm", "template", "mq", chart, "--kube-version", "1.33.0", "--set", settings],
            check=True, capture_output=True,
        )  # fmt: skip
        with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
            file.write(rendered.stdout)
            file.flush()
            subprocess.run(["kubernetes-validate", "--strict", "--quiet", file.name], check=True)
    say("chart: lint, template and schemas passed")


def main() -> None:
    checks = ("image", "deb", "chart")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checks", nargs="*", choices=[*checks, []], help="all, if none is named")
    parser.add_argument("--base", type=Path, help="a tar file of `mmdebstrap --variant=minbase`")
    chosen = parser.parse_args()
    wanted = chosen.checks or checks
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        base = chosen.base or work / "base.tar"
        if chosen.base is None and {"image", "deb"} & set(wanted):
            subprocess.run(
                ["mmdebstrap", "--quiet", "--variant=minbase", "trixie", base], check=True
            )
        if "image" in wanted:
            check_image(work, base)
        if "deb" in wanted:
            check_deb(work, base)
        if "chart" in wanted:
            check_chart()


if __name__ == "__main__":
    sys.exit(main())
