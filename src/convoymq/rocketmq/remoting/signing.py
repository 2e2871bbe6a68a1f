"""Signatures of requests, as RocketMQ's ACL 1.0 has them."""

from __future__ import annotations

import base64
import hashlib
import hmac

from convoymq.rocketmq.remoting.command import Command


def signature(command: Command, secret: bytes) -> str:
    """Returns the signature of a request."""
    digest = hmac.new(secret, digestmod=hashlib.sha1)
    for name, value in sorted(command.fields.items()):
        if name != "Signature":
            digest.update(value.encode())
    digest.update(command.body)
    return base64.b64encode(digest.digest()).decode()


class Signer:
    """Signs requests for an account."""

    def __init__(self, name: str, secret: str) -> None:
        self._name = name
        self._secret = secret.encode()

    def __call__(self, command: Command) -> None:
        """Adds the account's name and the signature to a request."""
        command.fields = {**command.fields, "AccessKey": self._name}
        command.fields["Signature"] = signature(command, self._secret)
