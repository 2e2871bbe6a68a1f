"""HELLO: how two nodes make sure of each other before a link stands. Sans-IO.

Field a of the frame is the step; bodies are msgpack maps:

1. dialler: who it is (see `Hello`)
2. acceptor: nonce
3. dialler: proof("dial")
4. acceptor: who it is, with proof("accept"); known, the addresses of other nodes; the link stands
9. either: refused = text, code

proof(role) = HMAC-SHA-256(secret, role and everything that was sent before): it cannot be replayed,
because both nonces are in it, nor reflected, because the role is. Fields that one side does not
know are covered as well, so a newer release may add some. The dialler proves itself first: who does
not know the secret learns nothing that was made with it, and nothing of the acceptor.

While a secret is replaced, acceptors take either of two, and answer with the dialler's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from convoymq.kernels.link_frames import FRAME_HELLO, HEADER_SIZE, frame, frame_header
from convoymq.model.errors import BrokerError
from convoymq.replication.versions import Supports
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.processes import ProcessId

LINK_VERSIONS = (3, 3)
"""Oldest and newest link protocol that this release speaks."""
NONCE_SIZE = 32
INSTANCE_SIZE = 16
TEXT_MAX = 200

CODE_SELF = "self"
CODE_DUPLICATE = "duplicate"
CODE_NUMBER_IN_USE = "number_in_use"
CODE_OLDER = "older_incarnation"
CODE_CLUSTER = "cluster"
CODE_VERSION = "version"
CODE_FORGOTTEN = "forgotten"
CODE_SECRET = "secret"
CODE_MALFORMED = "malformed"


class LinkRefused(BrokerError):
    """One side does not accept the other: name, version, secret or identity is wrong.

    Args:
        code: one of the CODE_ constants.
        told: the other side said so.
    """

    def __init__(self, text: str, code: str = CODE_MALFORMED, *, told: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.told = told


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    """HELLO of another node, decoded."""

    node: int
    directory: str
    incarnation: int
    instance: str
    """32 hex digits made by the running process."""
    cluster_id: str
    candidate: str
    formed: bool
    """True if it has data of the cluster."""
    release: str
    supports: Supports
    address: str
    process: ProcessId


class OwnHello(TypedDict):
    """HELLO of this node, as it is sent."""

    version: int
    cluster: str
    node: int
    directory: str
    incarnation: int
    instance: str
    cluster_id: str
    candidate: str
    formed: bool
    release: str
    supports: dict[str, list[int]]
    address: str
    process: list[str | int]


@dataclass(slots=True, kw_only=True)
class Hello:
    """HELLO of this node in steps 1 and 4."""

    cluster: str
    """The cluster's name."""
    identity: NodeIdentity
    address: str
    formed: bool
    release: str = ""
    supports: Supports = field(default_factory=dict)
    process: ProcessId = field(default_factory=ProcessId)
    instance: str = ""

    def to_builtins(self) -> OwnHello:
        """Returns the map that goes on the wire."""
        identity = self.identity
        return {
            "version": LINK_VERSIONS[1],
            "cluster": self.cluster,
            "node": identity.node,
            "directory": identity.directory,
            "incarnation": identity.incarnation,
            "instance": self.instance,
            "cluster_id": identity.cluster,
            "candidate": identity.candidate,
            "formed": self.formed,
            "release": self.release,
            "supports": {k: list(v) for k, v in {**self.supports, "link": LINK_VERSIONS}.items()},
            "address": self.address,
            "process": [self.process.machine, self.process.pid, self.process.started],
        }


def read_hello(body: Mapping[str, object], own: OwnHello) -> PeerHello:
    """Checks what another node says of itself against what this one says.

    Raises:
        LinkRefused: it is malformed, or the two cannot be of one cluster.
    """
    node = body.get("node")
    if not isinstance(node, int) or not 1 <= node <= 255:
        raise LinkRefused("malformed HELLO")
    _check_versions(node, body, own)
    if body.get("cluster") != own["cluster"]:
        raise LinkRefused(
            f"cluster {body.get('cluster')!r} instead of {own['cluster']!r}", CODE_CLUSTER
        )
    incarnation, supports, process = (body.get(k) for k in ("incarnation", "supports", "process"))
    texts = [body.get(k) for k in ("directory", "instance", "cluster_id", "candidate")]
    told = [body.get(k) for k in ("release", "address")]
    if (
        not isinstance(incarnation, int)
        or not 0 < incarnation < 1 << 32
        or not all(isinstance(text, str) and len(text) <= 64 for text in texts)
        or not all(isinstance(text, str) and len(text) <= TEXT_MAX for text in told)
        or not isinstance(supports, dict)
        or not all(isinstance(k, str) and _is_range(v) for k, v in supports.items())
        or not isinstance(process, list)
        or [type(each) for each in process] != [str, int, int]
    ):
        raise LinkRefused("malformed HELLO")
    found = PeerHello(
        node=node,
        directory=str(texts[0]),
        incarnation=incarnation,
        instance=str(texts[1]),
        cluster_id=str(texts[2]),
        candidate=str(texts[3]),
        formed=bool(body.get("formed")),
        release=str(told[0]),
        supports={k: (v[0], v[1]) for k, v in supports.items()},
        address=str(told[1]),
        process=ProcessId(*process),
    )
    if found.cluster_id and own["cluster_id"] and found.cluster_id != own["cluster_id"]:
        raise LinkRefused(
            f"node {node} is of cluster {found.cluster_id}, this one of {own['cluster_id']}",
            CODE_CLUSTER,
        )
    return found


def _is_range(value: object) -> bool:
    return isinstance(value, list) and [type(v) for v in value] == [int, int]


def _check_versions(node: int, body: Mapping[str, object], own: OwnHello) -> None:
    supports = body.get("supports")
    told = supports.get("link") if isinstance(supports, dict) else None
    version = body.get("version")
    if not isinstance(version, int):
        raise LinkRefused("malformed HELLO")
    oldest, newest = told if told is not None and _is_range(told) else (version, version)
    least, most = own["supports"]["link"]
    if newest >= least and oldest <= most:
        return
    release = body.get("release")
    runs = f"ConvoyMQ {release[:TEXT_MAX]}" if isinstance(release, str) else "an older ConvoyMQ"
    speaks = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    needs = f"{least} or later" if newest < least else f"{most} or earlier"
    raise LinkRefused(
        f"node {node} runs {runs} (link protocol {speaks}), "
        f"this node {own['release']} needs {needs}",
        CODE_VERSION,
    )


class Handshake:
    """One side of HELLO: frames in, frames out, then `done`."""

    def __init__(
        self,
        dialler: bool,
        secrets: Sequence[bytes],
        hello: Hello,
        known: Callable[[], list[str]] = list,
        nonce: bytes | None = None,
    ) -> None:
        self.dialler = dialler
        self.done = False
        self.peer: PeerHello | None = None
        """The other side; proven only when `done`. A dialler knows it only then."""
        self.known: list[Any] = []
        """Addresses of other nodes that the acceptor told."""
        self._secrets = secrets
        """The first one proves; an acceptor goes on with the one that the dialler has."""
        self._known = known
        self._expected = 2 if dialler else 1
        self.identity = hello.identity
        self._nonce = nonce or os.urandom(NONCE_SIZE)
        self._own = hello.to_builtins()
        self._first: dict[str, object] = {}
        """Step 1."""
        self._challenge = b""
        """The acceptor's nonce."""

    def begin(self) -> bytes:
        """Returns the dialler's first frame."""
        assert self.dialler
        self._first = {**self._own, "nonce": self._nonce}
        return _hello(1, self._first)

    @property
    def connection(self) -> int:
        """Returns a number of the connection that both sides know."""
        nonce = self._first["nonce"]
        assert isinstance(nonce, bytes)
        return int.from_bytes(nonce[:8], "little")

    def receive(self, data: bytes) -> bytes | None:
        """Takes the peer's next frame and returns the answer, if there is one.

        Raises:
            LinkRefused: the peer refuses, or must be refused (see `refusal`).
        """
        step, body = _read_frame(data)
        if step == 9:
            text, code = str(body.get("refused", ""))[:500], str(body.get("code", ""))[:50]
            raise LinkRefused(f"refused by the other side: {text}", code, told=True)
        if step != self._expected:
            raise LinkRefused(f"HELLO step {step} where {self._expected} was due")
        if step == 1:
            self._read_nonce(body)
            self.peer = read_hello(body, self._own)
            self._first, self._challenge = body, self._nonce
            self._expected = 3
            return _hello(2, {"nonce": self._nonce})
        if step == 2:
            self._challenge = self._read_nonce(body)
            self._expected = 4
            return _hello(3, {"proof": self._proof("dial")})
        if step == 3:
            self._check("dial", body.get("proof"))
            self.done = True
            told = {**self._own, "known": self._known()}
            return _hello(4, {**told, "proof": self._proof("accept", told)})
        proof = body.pop("proof", None)
        found = read_hello(body, self._own)
        self._check("accept", proof, body)
        self.peer = found
        known = body.get("known")
        self.known = known[:255] if isinstance(known, list) else []
        self.done = True
        return None

    def _read_nonce(self, body: dict[str, object]) -> bytes:
        nonce = body.get("nonce")
        if not isinstance(nonce, bytes) or len(nonce) != NONCE_SIZE:
            raise LinkRefused("malformed HELLO")
        if nonce == self._nonce:
            raise LinkRefused("HELLO repeats our own nonce")
        return nonce

    def _proof(self, role: str, *more: object) -> bytes:
        return self._digest(self._secrets[0], role, *more)

    def _digest(self, secret: bytes, role: str, *more: object) -> bytes:
        try:
            facts = msgspec.msgpack.encode(
                [role, self._first, self._challenge, *more], order="deterministic"
            )
        except TypeError as error:
            raise LinkRefused(f"malformed HELLO: {error}") from None
        return hmac.digest(secret, facts, hashlib.sha256)

    def _check(self, role: str, proof: object, *more: object) -> None:
        secrets = self._secrets[:1] if self.dialler else self._secrets
        for secret in secrets:
            wanted = self._digest(secret, role, *more)
            if isinstance(proof, bytes) and hmac.compare_digest(proof, wanted):
                self._secrets = (secret,)
                return
        raise LinkRefused("the cluster secret is not the same", CODE_SECRET)


def refusal(text: str, code: str = CODE_MALFORMED) -> bytes:
    """Returns the frame that tells the other side why it is refused."""
    return _hello(9, {"refused": text, "code": code})


def _hello(step: int, body: dict[str, object]) -> bytes:
    return frame(FRAME_HELLO, 0, 0, step, 0, 0, 0, msgspec.msgpack.encode(body))


def _read_frame(data: bytes) -> tuple[int, dict[str, object]]:
    try:
        _, kind, _, _, step, _, _, _ = frame_header(data)
        body = msgspec.msgpack.decode(data[HEADER_SIZE:], type=dict[str, Any])
    except (ValueError, msgspec.DecodeError) as error:
        raise LinkRefused(f"malformed HELLO: {error}") from None
    if kind != FRAME_HELLO:
        raise LinkRefused(f"frame type {kind} before HELLO was done")
    return step, body
