"""What a node does before it talks to anybody: its limits, its logs."""

from __future__ import annotations

import ssl
from pathlib import Path

from convoymq.model.config import load
from convoymq.node import (
    client_tls,
    free_disk_bytes,
    machine_memory_bytes,
    memory_limit,
    resident_bytes,
)


def test_the_memory_limit_is_a_share_or_a_size() -> None:
    whole = machine_memory_bytes()
    assert memory_limit(load(flags={"vm_memory_high_watermark.relative": "0.5"})) == whole // 2
    assert memory_limit(load(flags={"vm_memory_high_watermark.absolute": "1GiB"})) == 1 << 30
    assert 1 << 20 < resident_bytes() < whole


def test_room_on_disk_is_that_of_the_directory(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path) > 0


def test_client_tls_follows_the_options(tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    flags = {
        "listeners.ssl.default": "5671",
        "ssl_options.certfile": str(tmp_path / "cert.pem"),
        "ssl_options.keyfile": str(tmp_path / "key.pem"),
        "ssl_options.cacertfile": str(tmp_path / "ca.pem"),
    }
    assert client_tls(load(flags=flags)).verify_mode == ssl.CERT_NONE
    flags |= {"ssl_options.verify": "verify_peer"}
    assert client_tls(load(flags=flags)).verify_mode == ssl.CERT_OPTIONAL
    flags |= {"ssl_options.fail_if_no_peer_cert": "true"}
    assert client_tls(load(flags=flags)).verify_mode == ssl.CERT_REQUIRED
