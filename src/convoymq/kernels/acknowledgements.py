"""The map from a channel's delivery tags to message ids, and the ranges that are settled.

Neighbouring deliveries of a consumer are one run. What a client settles is gathered as ranges, and
handed to the queues once for each read of the socket.
"""

import cython
from cython.cimports.convoymq.kernels.channel_codec import (
    DISCARD,
    KINDS,
    RETURN,
    RETURN_FAILED,
    SETTLE,
    ChannelCodec,
    ConsumerDeliveries,
    Run,
)
from cython.cimports.convoymq.kernels.ranges import Ranges, add_range
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint64_t

# Stands where a list is due that nothing is put into.
_NOTHING = cython.declare(list, [])


@cython.cfunc
def _take_ranges(r: cython.pointer(Ranges)) -> list:
    """Returns the ranges as (first, last, first, last, …), ascending and merged; empties `r`."""
    flat: list = [r.pairs[i] for i in range(2 * r.count)]
    if r.unsorted:
        pairs = sorted(zip(flat[::2], flat[1::2], strict=True))
        flat = []
        n: cython.Py_ssize_t = 0
        for first, last in pairs:
            if n and first == flat[n - 1] + 1:
                flat[n - 1] = last
            else:
                flat += (first, last)
                n += 2
    r.count = 0
    r.unsorted = False
    if r.capacity > 1024:
        stdlib.free(r.pairs)
        r.pairs = cython.NULL
        r.capacity = 0
    return flat


@cython.cfunc
@cython.exceptval(-1)
def note_outcome(
    consumer: ConsumerDeliveries, kind: cython.int, first: uint64_t, last: uint64_t
) -> cython.int:
    ranges: cython.pointer(Ranges) = cython.address(consumer.kinds[kind])
    if (
        (kind == RETURN or kind == RETURN_FAILED)
        and ranges.count
        and first <= ranges.pairs[2 * ranges.count - 1]
    ):
        # The order of returns is the order of redelivery: it must not be sorted away.
        _flush_kind(consumer, kind)
    add_range(ranges, first, last)
    if not consumer.dirty:
        consumer.dirty = True
        consumer.codec.dirty_consumers.append(consumer)
        if len(consumer.codec.dirty_consumers) == 1:
            consumer.codec.buffer.dirty_codecs.append(consumer.codec)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _flush_kind(consumer: ConsumerDeliveries, kind: cython.int) -> cython.int:
    if consumer.kinds[kind].count == 0:
        return 0
    pairs: list = _take_ranges(cython.address(consumer.kinds[kind]))
    client = consumer.client
    if consumer.codec.spans is not None:
        consumer.codec.spans.settled(client, consumer.number, pairs, kind)
    if kind == SETTLE:
        client.settle(consumer.number, pairs)
    elif kind == DISCARD:
        client.discard(consumer.number, pairs)
    else:
        client.return_(consumer.number, pairs, failed=kind == RETURN_FAILED)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def insert_run(
    codec: ChannelCodec,
    tag: uint64_t,
    count: uint64_t,
    first_id: uint64_t,
    consumer: ConsumerDeliveries,
) -> cython.int:
    runs: cython.pointer(Run) = codec.runs
    at: cython.Py_ssize_t = codec.runs_end
    codec.unacked += count
    consumer.unacked += count
    if at == codec.runs_capacity:
        used: cython.Py_ssize_t = at - codec.runs_head
        if codec.runs_head > 0 and used <= codec.runs_capacity // 2:
            string.memmove(runs, runs + codec.runs_head, used * cython.sizeof(Run))
        else:
            capacity: cython.Py_ssize_t = max(16, codec.runs_capacity * 2)
            grown: cython.p_void = stdlib.malloc(capacity * cython.sizeof(Run))
            if grown == cython.NULL:
                raise MemoryError
            if used:
                string.memcpy(grown, runs + codec.runs_head, used * cython.sizeof(Run))
            stdlib.free(runs)
            runs = cython.cast(cython.pointer(Run), grown)
            codec.runs = runs
            codec.runs_capacity = capacity
        codec.runs_head = 0
        codec.runs_end = used
        at = used
    while at > codec.runs_head and runs[at - 1].tag > tag:
        runs[at] = runs[at - 1]
        at -= 1
    runs[at].tag = tag
    runs[at].count = count
    runs[at].first_id = first_id
    runs[at].consumer = consumer.index
    codec.runs_end += 1
    return 0


@cython.cfunc
@cython.exceptval(check=False)
def _find_run(codec: ChannelCodec, tag: uint64_t) -> cython.Py_ssize_t:
    low: cython.Py_ssize_t = codec.runs_head
    high: cython.Py_ssize_t = codec.runs_end
    if low < high and tag < codec.runs[low].tag + codec.runs[low].count:
        return low if tag >= codec.runs[low].tag else -1
    while low < high:
        middle: cython.Py_ssize_t = (low + high) >> 1
        if codec.runs[middle].tag + codec.runs[middle].count <= tag:
            low = middle + 1
        else:
            high = middle
    if low == codec.runs_end or codec.runs[low].tag > tag:
        return -1
    return low


@cython.cfunc
@cython.exceptval(-2)
def take_tags(
    codec: ChannelCodec, tag: uint64_t, multiple: cython.bint, taken: list, kind: cython.int
) -> cython.int:
    if multiple and tag == 0:
        if codec.runs_head == codec.runs_end:
            return 0
        tag = codec.runs[codec.runs_end - 1].tag + codec.runs[codec.runs_end - 1].count - 1
    at: cython.Py_ssize_t = _find_run(codec, tag)
    if at < 0:
        return -1
    run: cython.pointer(Run)
    count: uint64_t
    if multiple:
        while codec.runs_head <= at:
            run = codec.runs + codec.runs_head
            count = min(run.count, tag - run.tag + 1)
            _take_run(codec, run, run.tag, count, taken, kind)
            if count == run.count:
                codec.runs_head += 1
            else:
                run.tag += count
                run.first_id += count
                run.count -= count
                break
    else:
        run = codec.runs + at
        _take_run(codec, run, tag, 1, taken, kind)
        before: uint64_t = tag - run.tag
        after: uint64_t = run.count - before - 1
        if before == 0 and after == 0:
            if at == codec.runs_head:
                codec.runs_head += 1
            else:
                string.memmove(run, run + 1, (codec.runs_end - at - 1) * cython.sizeof(Run))
                codec.runs_end -= 1
        elif before == 0:
            run.tag += 1
            run.first_id += 1
            run.count = after
        else:
            first_id: uint64_t = run.first_id + before + 1
            consumer: ConsumerDeliveries = codec.consumers[run.consumer]
            run.count = before
            if after:
                # The counters already say so: the rest of the run only moves into one of its own.
                codec.unacked -= after
                consumer.unacked -= after
                _split_run(codec, at + 1, tag + 1, after, first_id, consumer)
    if codec.runs_head == codec.runs_end:
        codec.runs_head = 0
        codec.runs_end = 0
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _split_run(
    codec: ChannelCodec,
    at: cython.Py_ssize_t,
    tag: uint64_t,
    count: uint64_t,
    first_id: uint64_t,
    consumer: ConsumerDeliveries,
) -> cython.int:
    if at == codec.runs_end or codec.runs_end == codec.runs_capacity:
        return insert_run(codec, tag, count, first_id, consumer)
    run: cython.pointer(Run) = codec.runs + at
    string.memmove(run + 1, run, (codec.runs_end - at) * cython.sizeof(Run))
    run.tag = tag
    run.count = count
    run.first_id = first_id
    run.consumer = consumer.index
    codec.runs_end += 1
    codec.unacked += count
    consumer.unacked += count
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _take_run(
    codec: ChannelCodec,
    run: cython.pointer(Run),
    tag: uint64_t,
    count: uint64_t,
    taken: list,
    kind: cython.int,
) -> cython.int:
    consumer: ConsumerDeliveries = codec.consumers[run.consumer]
    first_id: uint64_t = run.first_id + (tag - run.tag)
    codec.unacked -= count
    consumer.unacked -= count
    if kind < 0:
        taken.append((tag, count, consumer, first_id))
        return 0
    codec.acknowledged += count
    return note_outcome(consumer, kind, first_id, first_id + count - 1)


@cython.cfunc
@cython.exceptval(-2)
def acknowledge_tag(
    codec: ChannelCodec, kind: cython.int, tag: uint64_t, multiple: cython.bint
) -> cython.int:
    return take_tags(codec, tag, multiple, _NOTHING, kind)


@cython.cfunc
@cython.exceptval(-1)
def flush_consumer(consumer: ConsumerDeliveries) -> cython.int:
    kind: cython.int
    if not consumer.dirty:
        return 0
    consumer.dirty = False
    for kind in range(KINDS):
        _flush_kind(consumer, kind)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def flush_codec(codec: ChannelCodec) -> cython.int:
    kept: list = []
    dirty: list = codec.dirty_consumers
    if not dirty:
        return 0
    codec.dirty_consumers = []
    for item in dirty:
        consumer: ConsumerDeliveries = item
        if consumer.no_ack and codec.buffer.corked:
            # The client does not read: without settling the queue hands out no more.
            kept.append(consumer)
        else:
            flush_consumer(consumer)
    if kept:
        codec.dirty_consumers += kept
        if codec not in codec.buffer.dirty_codecs:
            codec.buffer.dirty_codecs.append(codec)
    codec.owner.on_settled()
    return 0
