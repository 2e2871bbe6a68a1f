"""How errors appear to an AMQP client."""

from __future__ import annotations

import pytest

from convoymq.edges.amqp091 import _spec
from convoymq.edges.amqp091.errors import REPLIES, Scope, reply_for
from convoymq.model import errors, refusals
from convoymq.model.errors import BrokerError


@pytest.mark.parametrize(
    ("error", "code", "scope"),
    [
        (errors.AccessRefused("t"), 403, Scope.CHANNEL),
        (errors.NotFound("t"), 404, Scope.CHANNEL),
        (errors.ResourceLocked("t"), 405, Scope.CHANNEL),
        (errors.PreconditionFailed("t"), 406, Scope.CHANNEL),
        (errors.FrameFault("t"), 501, Scope.CONNECTION),
        (errors.SyntaxFault("t"), 502, Scope.CONNECTION),
        (errors.CommandFault("t"), 503, Scope.CONNECTION),
        (errors.ChannelFault("t"), 504, Scope.CONNECTION),
        (errors.UnexpectedFrame("t"), 505, Scope.CONNECTION),
        (errors.ResourceExhausted("t"), 506, Scope.CONNECTION),
        (errors.NotAllowed("t"), 530, Scope.CONNECTION),
        (errors.NotServed("t"), 540, Scope.CONNECTION),
        (errors.ForcedClosure("t"), 320, Scope.CONNECTION),
        (errors.Unavailable("t"), 541, Scope.CONNECTION),
        (errors.StorageFault("t"), 541, Scope.CONNECTION),
        (errors.Misuse("t"), 541, Scope.CONNECTION),
    ],
)
def test_each_class_has_its_code(error: BrokerError, code: int, scope: Scope) -> None:
    reply = reply_for(error)
    assert (reply.code, reply.scope) == (code, scope)
    assert reply.text == f"{REPLIES[code][0]} - t"


def test_names_agree_with_the_generated_codes() -> None:
    for code, (name, _) in REPLIES.items():
        assert getattr(_spec, name) == code


def test_the_text_is_cut_at_a_character() -> None:
    reply = reply_for(refusals.missing(refusals.queue_subject("/", "ä" * 120)))
    assert reply.text.startswith("NOT_FOUND - no queue 'ää")
    assert 254 <= len(reply.text.encode()) <= 255
    assert reply_for(errors.NotFound("x" * 300)).text.endswith("x")
