"""The hot loops of `convoy perf` by AMQP 1.0: frames, credit and outcomes around those of
`perfclient`. A connection has one session, on channel 0, and one link, with handle 0.
"""

import cython
from cython.cimports.convoymq.kernels.bytes import load32, store32
from cython.cimports.convoymq.kernels.perfclient import Consumer, Publisher
from cython.cimports.libc import string
from cython.cimports.libc.stdint import uint32_t, uint64_t

_INPUT = cython.declare(cython.Py_ssize_t, 262144)
_HEAD = cython.declare(cython.Py_ssize_t, 8)
_DISPOSITION = cython.declare(cython.Py_ssize_t, 30)
_FLOW = cython.declare(cython.Py_ssize_t, 41)
_HEADER = cython.declare(cython.int, 0x70)
_DATA = cython.declare(cython.int, 0x75)


@cython.cclass
class Fields:
    """Walks over the fields of a performative, or over sections."""

    @cython.cfunc
    @cython.exceptval(check=False)
    def begin(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        """Begins a described list; returns its code, -1 = it is none."""
        self.p = p
        self.at = 3
        self.end = n
        self.left = 0
        if n < 4 or p[0] != 0 or p[1] != 0x53:
            return -1
        if p[3] == 0x45:
            self.at = 4
        elif p[3] == 0xC0 and n >= 6:
            self.left = p[5]
            self.end = min(n, 5 + p[4])
            self.at = 6
        elif p[3] == 0xD0 and n >= 12:
            self.left = load32(p + 8)
            self.end = min(n, 8 + cython.cast(cython.Py_ssize_t, load32(p + 4)))
            self.at = 12
        else:
            return -1
        return p[2]

    @cython.cfunc
    @cython.exceptval(check=False)
    def size(self, at: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Returns the size of the value at a place; 0 = it is cut off."""
        p: cython.p_uchar = self.p
        left: cython.Py_ssize_t = self.end - at
        found: cython.Py_ssize_t = 0
        if left <= 0:
            return 0
        if p[at] == 0:
            if left < 4 or p[at + 1] != 0x53:
                return 0
            found = self.size(at + 3)
            return found + 3 if found else 0
        kind: cython.int = p[at] >> 4
        if kind == 4:
            found = 1
        elif kind == 5:
            found = 2
        elif kind == 6:
            found = 3
        elif kind == 7:
            found = 5
        elif kind == 8:
            found = 9
        elif kind == 9:
            found = 17
        elif kind & 1 == 0 or kind == 13 or kind == 15 or kind == 11:
            if kind & 1 == 0:
                found = 2 + p[at + 1] if left >= 2 else 0
            else:
                found = 5 + cython.cast(cython.Py_ssize_t, load32(p + at + 1)) if left >= 5 else 0
        return found if 0 < found <= left else 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def next(self) -> cython.p_uchar:
        """Returns the next field; NULL: there is none, or it is null."""
        if self.left <= 0:
            return cython.NULL
        n: cython.Py_ssize_t = self.size(self.at)
        if n == 0:
            self.left = 0
            return cython.NULL
        found: cython.p_uchar = self.p + self.at
        self.at += n
        self.left -= 1
        return cython.NULL if found[0] == 0x40 else found

    @cython.cfunc
    @cython.exceptval(check=False)
    def uint(self, fallback: uint32_t) -> uint32_t:
        """Returns the next field as a number."""
        found: cython.p_uchar = self.next()
        if found == cython.NULL:
            return fallback
        if found[0] == 0x70:
            return load32(found + 1)
        return found[1] if found[0] == 0x52 else 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def flag(self, fallback: cython.bint) -> cython.bint:
        """Returns the next field as a truth value."""
        found: cython.p_uchar = self.next()
        if found == cython.NULL:
            return fallback
        return found[0] == 0x41 or (found[0] == 0x56 and found[1] == 1)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _frame_size(p: cython.p_uchar) -> cython.Py_ssize_t:
    return cython.cast(cython.Py_ssize_t, load32(p))


@cython.cclass
class Publisher10(Publisher):
    """A publisher by AMQP 1.0. `id_at`, `tag_at`: places of delivery-id and -tag in the template;
    `transfers`: of a message."""

    def start(self, fd, template: bytes, stamp_at, number_at, distinct, places: tuple):
        """Starts on a fresh link, without credit; what was not confirmed is sent again."""
        self.connect(fd, template, stamp_at, number_at, distinct)
        self.id_at, self.tag_at, self.transfers, window = places
        self.fields = Fields()
        self.session_limit = window
        self.link_limit = 0
        self.tag_limit = 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def mark(self, p: cython.p_uchar) -> cython.void:
        number: uint32_t = cython.cast(uint32_t, self.next_tag - 1)
        store32(p + self.id_at, number)
        store32(p + self.tag_at, number)

    @cython.cfunc
    def scan(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        self.filled = _scan(self, p, n)
        if self.filled:
            string.memmove(self.input, p + n - self.filled, self.filled)
        return 0

    @cython.cfunc
    def handle(
        self, type: cython.int, p: cython.p_uchar, n: cython.Py_ssize_t, channel: cython.int
    ) -> cython.int:
        if n == 0:
            return 0
        fields: Fields = self.fields
        code: cython.int = fields.begin(p, n)
        if code == 0x15:
            self.settled(fields)
        elif code == 0x13:
            self.flow(fields)
        else:
            return self.other(type, p, n, channel)
        return 0

    @cython.cfunc
    def settled(self, fields: Fields) -> cython.int:
        fields.flag(False)
        first: uint64_t = fields.uint(0)
        last: uint64_t = fields.uint(cython.cast(uint32_t, first))
        fields.flag(False)
        state: cython.p_uchar = fields.next()
        ok: cython.bint = state != cython.NULL and state[0] == 0 and state[2] == 0x24
        if state != cython.NULL and state[2] == 0x26:
            self.returned += last - first + 1
        self.resolve_range(first + 1, last + 1, ok, True)
        return 0

    @cython.cfunc
    def flow(self, fields: Fields) -> cython.int:
        incoming: uint64_t = fields.uint(0)
        self.session_limit = incoming + fields.uint(0)
        fields.next()
        fields.next()
        if fields.next() != cython.NULL:
            count: uint64_t = fields.uint(0)
            self.link_limit = count + fields.uint(0)
        self.tag_limit = min(self.link_limit, self.session_limit // self.transfers) + 1
        return 0


@cython.cclass
class Consumer10(Consumer):
    """A consumer by AMQP 1.0: it grants credit for `window` messages, again with each
    acknowledgement. `modified`: it gives back instead of accepting."""

    def start(self, fd, window, modified=False):
        """Starts on a fresh link, and grants credit."""
        self.connect(fd)
        self.fields = Fields()
        self.window = window
        self.modified = modified
        self.count = 0
        self.first_id = 0
        self.received = 0
        self.whole = True
        self.granted = 0
        self.grant()
        self.flush()

    @cython.cfunc
    def scan(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        self.filled = _scan(self, p, n)
        if self.filled:
            string.memmove(self.input, p + n - self.filled, self.filled)
        return 0

    @cython.cfunc
    def handle(
        self, type: cython.int, p: cython.p_uchar, n: cython.Py_ssize_t, channel: cython.int
    ) -> cython.int:
        if n == 0:
            return 0
        fields: Fields = self.fields
        code: cython.int = fields.begin(p, n)
        if code != 0x14:
            if code == 0x13:
                return 0
            return self.other(type, p, n, channel)
        begin: cython.Py_ssize_t = fields.end
        self.received += 1
        fields.next()
        delivery_id: uint32_t = fields.uint(0)
        fields.next()
        fields.next()
        fields.flag(False)
        more: cython.bint = fields.flag(False)
        if self.whole:
            self.last_tag = delivery_id
            if self.unacked == 0:
                self.first_id = delivery_id
            self.stamped = 0
            self.look(p + begin, n - begin)
        self.whole = not more
        if self.whole:
            self.count += 1
            self.delivered()
            if self.no_ack and 2 * (self.granted - self.count) <= self.window:
                self.grant()
        return 0

    @cython.cfunc
    def look(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        """Finds what the header says, and the begin of the body."""
        sections: Fields = self.fields
        at: cython.Py_ssize_t = 0
        size: cython.Py_ssize_t
        self.redelivered_now = False
        while n - at >= 4 and p[at] == 0 and p[at + 1] == 0x53:
            if p[at + 2] == _DATA:
                at += 5 if p[at + 3] == 0xA0 else 8
                size = min(n - at, 16)
                if size > 0:
                    string.memcpy(cython.address(self.stamp[0]), p + at, size)
                    self.stamped = size
                return 0
            if p[at + 2] == _HEADER and sections.begin(p + at, n - at) == _HEADER:
                sections.next()
                sections.next()
                sections.next()
                self.redelivered_now = not sections.flag(False)
            sections.p = p
            sections.end = n
            size = sections.size(at)
            if size == 0:
                break
            at += size
        self.bad += 1
        return 0

    @cython.cfunc
    def grant(self) -> cython.int:
        """Grants credit for as many messages as the window has, and opens the session's."""
        if not self.room(_FLOW):
            return 0
        p: cython.p_uchar = self.output + self.out_to
        string.memcpy(p, b"\0\0\0\x29\x02\0\0\0\0\x53\x13\xc0\x1c\x07", 14)
        p[14] = 0x70
        store32(p + 15, cython.cast(uint32_t, self.received))
        p[19] = 0x70
        store32(p + 20, 0x7FFFFFFF)
        p[24] = 0x43
        p[25] = 0x70
        store32(p + 26, 0x7FFFFFFF)
        p[30] = 0x43
        p[31] = 0x70
        store32(p + 32, cython.cast(uint32_t, self.count))
        p[36] = 0x70
        store32(p + 37, self.window)
        self.granted = self.count + self.window
        self.out_to += _FLOW
        return 0

    @cython.cfunc
    def ack(self) -> cython.int:
        if not self.room(_DISPOSITION + 3 + _FLOW):
            return 0
        p: cython.p_uchar = self.output + self.out_to
        string.memcpy(p, b"\0\0\0\x1e\x02\0\0\0\0\x53\x15\xc0\x11\x05\x41\x70", 16)
        store32(p + 16, self.first_id)
        p[20] = 0x70
        store32(p + 21, cython.cast(uint32_t, self.last_tag))
        if self.modified:
            # With delivery-failed.
            string.memcpy(p + 25, b"\x41\0\x53\x27\xc0\x02\x01\x41", 8)
            p[3] += 3
            p[12] += 3
            self.out_to += 3
        else:
            string.memcpy(p + 25, b"\x41\0\x53\x24\x45", 5)
        self.out_to += _DISPOSITION
        self.unacked = 0
        return self.grant()


@cython.cfunc
def _scan(worker: object, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Handles the whole frames of n bytes, and returns how many bytes are left."""
    consumer: Consumer10 = None
    publisher: Publisher10 = None
    if isinstance(worker, Consumer10):
        consumer = worker
    else:
        publisher = worker
    at: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t
    skip: cython.Py_ssize_t
    while n - at >= _HEAD:
        size = _frame_size(p + at)
        skip = 4 * cython.cast(cython.Py_ssize_t, p[at + 4])
        if size > _INPUT or skip < _HEAD or skip > size:
            worker.bad += 1
            worker.closed = True
            return 0
        if n - at < size:
            break
        if consumer is not None:
            consumer.handle(p[at + 5], p + at + skip, size - skip, 0)
        else:
            publisher.handle(p[at + 5], p + at + skip, size - skip, 0)
        at += size
    return n - at
