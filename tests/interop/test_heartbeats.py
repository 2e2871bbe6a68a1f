"""Heartbeats with a real client and a silent one."""

from __future__ import annotations

import pika  # type: ignore[import-untyped]
from pika import spec

from tests.clusters import Cluster
from tests.interop.helpers import eventually
from tests.raw_amqp import RawPeer

INTERVAL_S = 1
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"


def test_an_idle_client_with_heartbeats_stays(cluster: Cluster) -> None:
    parameters = pika.URLParameters(cluster.uris[0])
    parameters.heartbeat = INTERVAL_S
    connection = pika.BlockingConnection(parameters)
    assert connection._impl.params.heartbeat == INTERVAL_S
    connection.process_data_events(4 * INTERVAL_S)
    connection.channel().queue_declare("", exclusive=True)
    connection.close()


def test_a_silent_client_is_dropped_and_its_queue_goes(peer: RawPeer, cluster: Cluster) -> None:
    peer.start()
    peer.start_ok()
    peer.expect(spec.Connection.Tune)
    tune = spec.Connection.TuneOk(channel_max=10, frame_max=131072, heartbeat=INTERVAL_S)
    peer.send(0, tune)
    peer.call(0, spec.Connection.Open(virtual_host="/"), spec.Connection.OpenOk)
    peer.open_channel(1)
    queue = "interop-heartbeats"
    peer.call(1, spec.Queue.Declare(queue=queue, exclusive=True), spec.Queue.DeclareOk)
    assert peer.wait_closed().count(HEARTBEAT) >= 1
    eventually(lambda: passive_declare(cluster, queue) == 404)


def passive_declare(cluster: Cluster, queue: str) -> int:
    """The reply code; 405 as long as somebody's exclusive queue has the name."""
    with RawPeer(cluster.uris[0]) as other:
        other.handshake().open_channel(1)
        other.send(1, spec.Queue.Declare(queue=queue, passive=True))
        return int(other.expect(spec.Channel.Close).reply_code)
