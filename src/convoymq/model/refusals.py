"""The refusals that AMQP clients match on, one constructor per text.

The texts are those of RabbitMQ 4.3, character for character, without the leading code name:
the edge adds it. Keeping them in one place lets the routing tables, the queues and the edges
refuse in the same words.
"""

from __future__ import annotations

from convoymq.model.errors import (
    AccessRefused,
    LimitReached,
    NotAllowed,
    NotFound,
    NotPermitted,
    NotServed,
    PreconditionFailed,
    ResourceLocked,
    Subject,
    SubjectKind,
)

OLDER_NODES = "; some nodes have an older release"
"""Ends a text about what is served only when all nodes have this release."""


def queue_subject(vhost: str, name: str) -> Subject:
    """Name a queue."""
    return Subject(SubjectKind.QUEUE, vhost, name)


def exchange_subject(vhost: str, name: str) -> Subject:
    """Name an exchange."""
    return Subject(SubjectKind.EXCHANGE, vhost, name)


# --- things that are not there -------------------------------------------------------------


def missing(subject: Subject) -> NotFound:
    """No such queue or exchange."""
    return NotFound(f"no {subject}", subject=subject)


def no_previous_queue() -> NotFound:
    """An empty queue name on a channel that declared none."""
    return NotFound("no previously declared queue")


def home_node_down(subject: Subject, node: str, *, durable: bool) -> NotFound:
    """The only node of a classic queue is away."""
    kind = "durable " if durable else ""
    return NotFound(
        f"home node '{node}' of {kind}{subject} is down or inaccessible", subject=subject
    )


def crashed(subject: Subject) -> NotFound:
    """A queue that its home has stopped, or could not open."""
    return NotFound(f"{subject} has crashed and failed to restart", subject=subject)


def timed_out(subject: Subject) -> NotFound:
    """A classic queue that no node serves in time."""
    return NotFound(f"failed to perform operation on {subject} due to timeout", subject=subject)


def commands_lost(subject: Subject) -> NotFound:
    """A classic queue did not get all that a node sent it."""
    return NotFound(f"{subject} has not received all commands of this node", subject=subject)


# --- things that nobody or not this user may do --------------------------------------------


def reserved_name(subject: Subject) -> AccessRefused:
    """A new name that starts with `amq.`."""
    return AccessRefused(
        f"{subject.kind.value} name '{subject.name}' contains reserved prefix 'amq.*'",
        subject=subject,
    )


def managed_queue(subject: Subject) -> AccessRefused:
    """A client declares, deletes, purges, binds or publishes to a queue that is part of something
    else."""
    return AccessRefused(
        f"{subject} is a partition of a topic: publish to the topic, and use its commands",
        subject=subject,
    )


def default_exchange_untouchable() -> AccessRefused:
    """Bind, unbind, declare or delete of the default exchange."""
    return AccessRefused("operation not permitted on the default exchange")


def system_exchange_deletion(subject: Subject) -> AccessRefused:
    """Delete of a predeclared exchange."""
    return AccessRefused(f"deletion of system {subject} not allowed", subject=subject)


def ordered_exchange(subject: Subject) -> PreconditionFailed:
    """Declare of an exchange of an ordered topic without the topic."""
    return PreconditionFailed(
        f"{subject} cannot be declared: an exchange of type 'x-ordered' comes with its topic; "
        "topics are created by 'convoy topics create' or over HTTP",
        subject=subject,
    )


def internal_exchange_publish(subject: Subject) -> AccessRefused:
    """A client publishes to an internal exchange."""
    return AccessRefused(f"cannot publish to internal {subject}", subject=subject)


def permission_missing(permission: str, subject: Subject, user: str) -> AccessRefused:
    """`permission` is `configure`, `write` or `read`."""
    return AccessRefused(
        f"{permission} access to {subject} refused for user '{user}'", subject=subject
    )


def topic_permission_missing(
    permission: str, routing_key: str, subject: Subject, user: str
) -> AccessRefused:
    """The routing key is outside the user's topic permission."""
    return AccessRefused(
        f"{permission} access to topic '{routing_key}' in {subject} refused for user '{user}'",
        subject=subject,
    )


def vhost_protected(name: str) -> str:
    """Returns why a virtual host is not deleted."""
    return f"Refusing to delete virtual host '{name}' because it is protected from deletion"


def login_refused(mechanism: str) -> AccessRefused:
    """Wrong user or password; the text never says which."""
    return AccessRefused(
        f"Login was refused using authentication mechanism {mechanism}. "
        "For details see the broker logfile."
    )


def exclusive_consumer(subject: Subject) -> AccessRefused:
    """Another consumer holds the queue, or an exclusive one comes too late."""
    return AccessRefused(f"{subject} in exclusive use", subject=subject)


def filter_of_single_active(subject: Subject) -> PreconditionFailed:
    """Others of its consumers would get what this one leaves."""
    return PreconditionFailed(
        f"{subject} has a single active consumer, which cannot have a filter", subject=subject
    )


# --- locks ---------------------------------------------------------------------------------


def exclusive_queue(subject: Subject) -> ResourceLocked:
    """The queue belongs to another connection, or the exclusive flag differs."""
    return ResourceLocked(
        f"cannot obtain exclusive access to locked {subject}. It could be originally declared on "
        "another connection or the exclusive property value does not match that of the original "
        "declaration.",
        subject=subject,
    )


def get_on_single_active_consumer(subject: Subject, queue_type: str) -> ResourceLocked:
    """basic.get from a queue that serves one active consumer."""
    return ResourceLocked(
        f"cannot obtain access to locked {subject}. basic.get operations are not supported by "
        f"{queue_type} queues with single active consumer",
        subject=subject,
    )


# --- preconditions -------------------------------------------------------------------------


def inequivalent(key: str, subject: Subject, received: str, current: str) -> PreconditionFailed:
    """A redeclare that differs. `received` and `current` come quoted, or are `none`."""
    return PreconditionFailed(
        f"inequivalent arg '{key}' for {subject}: received {received} but current is {current}",
        subject=subject,
    )


def invalid_argument(key: str, subject: Subject, reason: str) -> PreconditionFailed:
    """An argument with an unacceptable value; `reason` is an Erlang term as clients know it."""
    return PreconditionFailed(f"invalid arg '{key}' for {subject}: {reason}", subject=subject)


def foreign_argument(key: str, subject: Subject, queue_type: str) -> PreconditionFailed:
    """An argument that belongs to another queue type."""
    return PreconditionFailed(
        f"invalid arg '{key}' for {subject} of queue type rabbit_{queue_type}_queue",
        subject=subject,
    )


def unserved_argument(
    key: str,
    subject: Subject,
    queue_type: str,
    *,
    served_by: str | None = None,
    early: bool = False,
) -> PreconditionFailed:
    """An argument that RabbitMQ knows and this broker does not serve yet.

    Args:
        served_by: a type without replication that does.
        early: it is not served before all nodes have this release.
    """
    reason = OLDER_NODES if early else ""
    hint = f"; queues with x-queue-type '{served_by}' serve it and are not replicated"
    return PreconditionFailed(
        f"invalid arg '{key}' for {subject}: not served yet by {queue_type} queues{reason}"
        + (hint if served_by is not None else ""),
        subject=subject,
    )


def invalid_order_key(reason: str) -> PreconditionFailed:
    """A message to a topic has no order key that it could have. Closes a channel."""
    return PreconditionFailed(f"invalid message: {reason}")


def partition_publish(subject: Subject) -> AccessRefused:
    """A client publishes to a partition instead of its topic."""
    return AccessRefused(
        f"cannot publish to a partition: {subject}; publish to the exchange of its topic",
        subject=subject,
    )


def unserved_property(
    name: str, subject: Subject, queue_type: str, *, early: bool = False
) -> PreconditionFailed:
    """A message asks for something by a property that the queue does not do. Closes a channel.

    Args:
        early: it does not before all nodes have this release.
    """
    reason = OLDER_NODES if early else ""
    kind = "header" if name.startswith("x-") else "property"
    return PreconditionFailed(
        f"message {kind} '{name}' is not served by {queue_type} queues: {subject}{reason}",
        subject=subject,
    )


def segment_too_large(subject: Subject) -> PreconditionFailed:
    """A segment size above what is allowed."""
    return PreconditionFailed(
        "Exceeded max value for x-stream-max-segment-size-bytes", subject=subject
    )


def invalid_property(name: str, subject: Subject) -> PreconditionFailed:
    """`name` is `exclusive-owner`, `non-durable` or `auto-delete`."""
    return PreconditionFailed(f"invalid property '{name}' for {subject}", subject=subject)


def server_named_queue(queue_type: str) -> PreconditionFailed:
    """An empty name for a type that needs one."""
    return PreconditionFailed(
        f"Cannot declare a server-named queue for type rabbit_{queue_type}_queue"
    )


def unknown_exchange_type(exchange_type: str) -> PreconditionFailed:
    """No such exchange type."""
    return PreconditionFailed(f"unknown exchange type '{exchange_type}'")


def unknown_delayed_type() -> PreconditionFailed:
    """`x-delayed-type` of an exchange is missing, or names no type by which one can choose."""
    return PreconditionFailed(
        "Invalid argument, 'x-delayed-type' must be an existing exchange type"
    )


def invalid_delay(header: str, reason: str) -> PreconditionFailed:
    """A header that says when a message is to be delivered. Closes a channel."""
    return PreconditionFailed(f"invalid message: header '{header}' {reason}")


def unserved_exchange_type(exchange_type: str) -> NotServed:
    """An exchange that a newer release declared is used."""
    return NotServed(f"exchanges of type '{exchange_type}' are not served by this release")


def unserved_queue_type(subject: Subject, queue_type: str) -> NotServed:
    """A queue that a newer release declared is used."""
    return NotServed(
        f"{subject} has the type '{queue_type}', which this release does not serve",
        subject=subject,
    )


def invalid_argument_type(key: str, subject: Subject, type_name: str) -> PreconditionFailed:
    """An exchange argument that is not a string."""
    return PreconditionFailed(
        f"invalid type '{type_name}' for arg '{key}' in {subject}", subject=subject
    )


def too_many_wildcards(binding_key: str, count: int, count_max: int) -> PreconditionFailed:
    """A topic binding key with more `#` words than allowed."""
    return PreconditionFailed(
        f"Topic binding key '{binding_key}' uses {count} '#' wildcards, "
        f"at most {count_max} are allowed"
    )


def invalid_match_value(term: str) -> PreconditionFailed:
    """`x-match` has an unknown value; `term` is that value as an Erlang term."""
    return PreconditionFailed(
        f"Invalid x-match field value {term}; expected all, any, all-with-x, or any-with-x"
    )


def invalid_match_type(type_name: str, term: str) -> PreconditionFailed:
    """`x-match` is not a string."""
    return PreconditionFailed(
        f"Invalid x-match field type {type_name} (value {term}); expected longstr"
    )


def exclusive_hash_arguments() -> PreconditionFailed:
    """An `x-consistent-hash` exchange with two things to hash."""
    return PreconditionFailed("hash-header and hash-property are mutually exclusive")


def unsupported_hash_property(name: str) -> PreconditionFailed:
    """`hash-property` names a property that is not hashed."""
    return PreconditionFailed(f"Unsupported property: {name}")


def binding_weight_not_integer(binding_key: str) -> PreconditionFailed:
    """A binding key of an `x-consistent-hash` exchange that is no number."""
    return PreconditionFailed(f'The binding key must be an integer: <<"{binding_key}">>')


def binding_weight_not_positive() -> PreconditionFailed:
    """A weight of zero or less."""
    return PreconditionFailed("The binding key must be greater than 0")


def binding_weight_too_large(binding_key: str, weight_max: int) -> PreconditionFailed:
    """A weight above the limit, which RabbitMQ does not have."""
    return PreconditionFailed(
        f"The binding key must be at most {weight_max}, as a weight: {binding_key}"
    )


def binding_key_not_empty(binding_key: str) -> PreconditionFailed:
    """A binding key where none is allowed."""
    return PreconditionFailed(f"Non empty binding '{binding_key}' key not permitted")


def destination_not_found() -> PreconditionFailed:
    """The destination of a binding is not a queue, where it has to be one."""
    return PreconditionFailed("Destination not found")


def unserved_destination_type(queue_type: str) -> PreconditionFailed:
    """A queue of that type cannot be bound to the exchange."""
    return PreconditionFailed(
        f"Queue type rabbit_{queue_type}_queue not valid for this exchange type"
    )


def consumer_without_prefetch(subject: Subject) -> PreconditionFailed:
    """basic.consume from a stream on a channel without basic.qos."""
    return PreconditionFailed(
        f"consumer prefetch count is not set for stream {subject}", subject=subject
    )


def queue_limit_reached(name: str, vhost: str, limit: int) -> LimitReached:
    """A virtual host has as many queues as it may have."""
    return LimitReached(
        f"cannot declare queue '{name}': queue limit in vhost '{vhost}' ({limit}) is reached",
        subject=queue_subject(vhost, name),
    )


def cluster_queue_limit_reached(vhost: str, name: str, limit: int) -> LimitReached:
    """The cluster has as many queues as it may have."""
    return LimitReached(
        f"cannot declare queue '{name}': queue limit in cluster ({limit}) is reached",
        subject=queue_subject(vhost, name),
    )


def partition_limit_reached(topic: str, vhost: str, limit: int) -> PreconditionFailed:
    """A virtual host has no room for partitions of a topic: they count as queues."""
    return PreconditionFailed(
        f"cannot create partitions of topic '{topic}': queue limit in vhost '{vhost}' ({limit}) "
        "is reached",
    )


def cluster_partition_limit_reached(vhost: str, topic: str, limit: int) -> PreconditionFailed:
    """The cluster has no room for partitions of a topic: they count as queues."""
    return PreconditionFailed(
        f"cannot create partitions of topic '{topic}' in vhost '{vhost}': queue limit in cluster "
        f"({limit}) is reached",
    )


def cluster_exchange_limit_reached(vhost: str, name: str, limit: int) -> LimitReached:
    """The cluster has as many exchanges as it may have."""
    subject = exchange_subject(vhost, name)
    return LimitReached(
        f"cannot declare {subject}: exchange limit of {limit} is reached", subject=subject
    )


def in_use(subject: Subject) -> PreconditionFailed:
    """Delete with if-unused of something in use."""
    return PreconditionFailed(f"{subject} in use", subject=subject)


def not_empty(subject: Subject) -> PreconditionFailed:
    """Delete with if-empty of a queue that holds messages."""
    return PreconditionFailed(f"{subject} not empty", subject=subject)


def unknown_delivery_tag(tag: int) -> PreconditionFailed:
    """A tag that was never given out, or is settled already."""
    return PreconditionFailed(f"unknown delivery tag {tag}")


def wrong_user_id(user_id: str, user: str) -> PreconditionFailed:
    """The user-id property names somebody else."""
    return PreconditionFailed(
        f"user_id property set to '{user_id}' but authenticated user was '{user}'"
    )


def invalid_expiration(value: str, reason: str) -> PreconditionFailed:
    """The expiration property is not a number of milliseconds in range."""
    return PreconditionFailed(f"invalid expiration '{value}': {reason}")


def message_too_big(size: int, size_max: int) -> PreconditionFailed:
    """A body above `max_message_size`."""
    return PreconditionFailed(f"message size {size} is larger than configured max size {size_max}")


def invalid_copy_header(header: str, type_name: str) -> PreconditionFailed:
    """CC or BCC is not an array of strings."""
    return PreconditionFailed(
        f'invalid message: {{unacceptable_type_in_header,"{header}",{type_name}}}'
    )


def mode_switch(current: str, wanted: str) -> PreconditionFailed:
    """tx on a confirming channel, or the reverse; both are `tx` or `confirm`."""
    return PreconditionFailed(f"cannot switch from {current} to {wanted} mode")


def not_transactional() -> PreconditionFailed:
    """tx.commit or tx.rollback without tx.select."""
    return PreconditionFailed("channel is not transactional")


def partial_commit() -> PreconditionFailed:
    """tx.commit of publishes of which a queue refused some."""
    return PreconditionFailed("partial tx completion")


def reply_consumer(text: str) -> PreconditionFailed:
    """`text` is one of the three complaints about the direct reply-to pseudo queue."""
    return PreconditionFailed(text)


REPLY_CANNOT_ACKNOWLEDGE = "reply consumer cannot acknowledge"
REPLY_ALREADY_SET = "reply consumer already set"
REPLY_CONSUMER_MISSING = "fast reply consumer does not exist"


# --- rules of the connection ---------------------------------------------------------------


def consumer_tag_in_use(tag: str) -> NotAllowed:
    """A consumer tag twice on one channel."""
    return NotAllowed(f"attempt to reuse consumer tag '{tag}'")


def too_many_consumers(limit: int) -> NotAllowed:
    """The channel has as many consumers as it may."""
    return NotAllowed(f"reached maximum ({limit}) of consumers per channel")


def too_many_channels(opened: int, limit: int) -> NotAllowed:
    """More channels than tune-ok agreed on."""
    return NotAllowed(
        f"number of channels opened ({opened}) has reached the negotiated channel_max ({limit})"
    )


def channel_reserved(number: int) -> NotAllowed:
    """A channel number that records use as a mark."""
    return NotAllowed(f"channel number {number} is reserved")


def tune_too_low(key: str, value: int, minimum: int) -> NotAllowed:
    """A tune-ok value below the minimum; `key` is `frame_max` or `channel_max`."""
    return NotAllowed(
        f"negotiated {key} = {value} is lower than the minimum allowed value ({minimum})"
    )


def tune_too_high(key: str, value: int, maximum: int) -> NotAllowed:
    """A tune-ok value above what the server offered."""
    return NotAllowed(
        f"negotiated {key} = {value} is higher than the maximum allowed value ({maximum})"
    )


def vhost_missing(vhost: str) -> NotAllowed:
    """connection.open of an unknown virtual host."""
    return NotAllowed(f"vhost {vhost} not found")


def vhost_connections_exceeded(vhost: str, user: str, limit: int) -> NotAllowed:
    """A virtual host has as many connections as it may have."""
    return NotAllowed(
        f"access to vhost '{vhost}' refused for user '{user}': connection limit ({limit}) is "
        "reached"
    )


def user_connections_exceeded(user: str, limit: int) -> NotAllowed:
    """A user has as many connections as it may have."""
    return NotAllowed(
        f"Connection refused for user '{user}': user connection limit ({limit}) is reached"
    )


def user_channels_exceeded(user: str, limit: int) -> NotAllowed:
    """A user has as many channels as it may have."""
    return NotAllowed(
        f"number of channels opened for user '{user}' has reached the maximum allowed user limit "
        f"of ({limit})"
    )


def vhost_refused(vhost: str, user: str) -> NotAllowed:
    """connection.open of a virtual host that the user may not enter."""
    return NotAllowed(f"access to vhost '{vhost}' refused for user '{user}'")


def acknowledgement_late(channel: int, timeout_ms: int) -> PreconditionFailed:
    """A delivery stayed unacknowledged for longer than `consumer_timeout`."""
    return PreconditionFailed(
        f"delivery acknowledgement on channel {channel} timed out. Timeout value used: "
        f"{timeout_ms} ms. This timeout value can be configured, see consumers doc guide to learn "
        "more"
    )


def feature_not_permitted(name: str) -> NotPermitted:
    """A deprecated feature that this node's configuration switches off. Closes a connection."""
    return NotPermitted(
        f"Feature `{name}` is deprecated.\nIts use is not permitted per the configuration "
        "(overriding the default, which is permitted):\n"
        f'    "deprecated_features.permit.{name} = false"'
    )


# --- what is not served --------------------------------------------------------------------


def immediate_publish() -> NotServed:
    """basic.publish with the immediate bit."""
    return NotServed("immediate=true")


def prefetch_size(size: int) -> NotServed:
    """basic.qos with a limit in bytes."""
    return NotServed(f"prefetch_size!=0 ({size})")


def recover_without_requeue() -> NotServed:
    """basic.recover with requeue=false."""
    return NotServed("requeue=false")


def channel_flow_off() -> NotServed:
    """channel.flow with active=false."""
    return NotServed("active=false")


def conditional_delete(flag: str, subject: Subject) -> NotServed:
    """queue.delete of a quorum queue with `if-unused` or `if-empty`, in strict mode."""
    return NotServed(
        f"cannot delete {subject}. queue.delete operations with {flag} flag set are not supported "
        "by quorum queues",
        subject=subject,
    )


def get_from_stream(subject: Subject) -> NotServed:
    """basic.get from a stream."""
    return NotServed(f"basic.get not supported by stream queues {subject}", subject=subject)


def purge_of_stream(subject: Subject) -> NotServed:
    """queue.purge of a stream."""
    return NotServed(f"queue.purge not supported by stream queues {subject}", subject=subject)


def no_ack_from_stream(subject: Subject) -> NotServed:
    """basic.consume from a stream with no_ack."""
    return NotServed(
        f"automatic acknowledgement not supported by stream {subject}", subject=subject
    )


def unserved_by_group(what: str, subject: Subject) -> PreconditionFailed:
    """A request for what groups of ordered topics do not do."""
    return PreconditionFailed(
        f"{what} not supported by groups of topics {subject}", subject=subject
    )


def global_qos_unserved(subject: Subject) -> NotServed:
    """basic.consume on a channel with a shared prefetch, from a queue that does not serve it."""
    return NotServed(f"{subject} does not support global qos", subject=subject)
