"""The texts of refusals, character for character: clients match on them."""

from __future__ import annotations

import pytest

from convoymq.edges.amqp091.errors import reply_for
from convoymq.model import refusals as r
from convoymq.model.errors import Refused

QUEUE = r.queue_subject("/", "q")
EXCHANGE = r.exchange_subject("v", "x")
Q = "queue 'q' in vhost '/'"
X = "exchange 'x' in vhost 'v'"

TEXTS: list[tuple[Refused, int, str]] = [
    (r.missing(QUEUE), 404, f"no {Q}"),
    (r.missing(EXCHANGE), 404, f"no {X}"),
    (r.no_previous_queue(), 404, "no previously declared queue"),
    (r.home_node_down(QUEUE, "n1", durable=True), 404,
     f"home node 'n1' of durable {Q} is down or inaccessible"),
    (r.home_node_down(QUEUE, "n1", durable=False), 404,
     f"home node 'n1' of {Q} is down or inaccessible"),
    (r.timed_out(QUEUE), 404, f"failed to perform operation on {Q} due to timeout"),
    (r.permission_missing("write", EXCHANGE, "u"), 403,
     f"write access to {X} refused for user 'u'"),
    (r.topic_permission_missing("write", "a.b", EXCHANGE, "u"), 403,
     f"write access to topic 'a.b' in {X} refused for user 'u'"),
    (r.login_refused("PLAIN"), 403,
     "Login was refused using authentication mechanism PLAIN. For details see the broker logfile."),
    (r.exclusive_consumer(QUEUE), 403, f"{Q} in exclusive use"),
    (r.get_on_single_active_consumer(QUEUE, "quorum"), 405,
     f"cannot obtain access to locked {Q}. basic.get operations are not supported by quorum queues "
     "with single active consumer"),
    (r.in_use(QUEUE), 406, f"{Q} in use"),
    (r.not_empty(QUEUE), 406, f"{Q} not empty"),
    (r.unknown_delivery_tag(9), 406, "unknown delivery tag 9"),
    (r.wrong_user_id("x", "y"), 406,
     "user_id property set to 'x' but authenticated user was 'y'"),
    (r.invalid_expiration("abc", "no_integer"), 406, "invalid expiration 'abc': no_integer"),
    (r.message_too_big(17, 16), 406, "message size 17 is larger than configured max size 16"),
    (r.mode_switch("confirm", "tx"), 406, "cannot switch from confirm to tx mode"),
    (r.mode_switch("tx", "confirm"), 406, "cannot switch from tx to confirm mode"),
    (r.not_transactional(), 406, "channel is not transactional"),
    (r.reply_consumer(r.REPLY_ALREADY_SET), 406, "reply consumer already set"),
    (r.consumer_tag_in_use("t"), 530, "attempt to reuse consumer tag 't'"),
    (r.too_many_consumers(3), 530, "reached maximum (3) of consumers per channel"),
    (r.too_many_channels(2048, 2047), 530,
     "number of channels opened (2048) has reached the negotiated channel_max (2047)"),
    (r.channel_reserved(65535), 530, "channel number 65535 is reserved"),
    (r.tune_too_low("frame_max", 4096, 8192), 530,
     "negotiated frame_max = 4096 is lower than the minimum allowed value (8192)"),
    (r.tune_too_high("channel_max", 65535, 2047), 530,
     "negotiated channel_max = 65535 is higher than the maximum allowed value (2047)"),
    (r.vhost_missing("v"), 530, "vhost v not found"),
    (r.vhost_refused("v", "u"), 530, "access to vhost 'v' refused for user 'u'"),
    (r.immediate_publish(), 540, "immediate=true"),
    (r.prefetch_size(10), 540, "prefetch_size!=0 (10)"),
    (r.recover_without_requeue(), 540, "requeue=false"),
    (r.channel_flow_off(), 540, "active=false"),
    (r.conditional_delete("if-unused", QUEUE), 540,
     f"cannot delete {Q}. queue.delete operations with if-unused flag set are not supported by "
     "quorum queues"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "text"), TEXTS, ids=[text[:40] for _, _, text in TEXTS])
def test_texts_and_codes(error: Refused, code: int, text: str) -> None:
    assert error.text == text
    assert reply_for(error).code == code
