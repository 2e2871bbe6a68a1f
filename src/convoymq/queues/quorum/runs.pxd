# Types of the compiled build; runs.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

@cython.locals(missing=Py_ssize_t)
cdef room_for(object words, Py_ssize_t end, Py_ssize_t needed)

cdef class PackedRuns:
    cdef bint _marked
    cdef Py_ssize_t _stride, _head, _end
    cdef object _words
    cdef public int64_t messages, size
    @cython.locals(head=Py_ssize_t)
    cdef _tidy(self)

cdef class Fifo(PackedRuns):
    cdef public bint counted
    @cython.locals(
        words=object, end=Py_ssize_t, stride=Py_ssize_t, at=Py_ssize_t,
        counts=uint64_t, place=uint64_t, amount=uint64_t,
    )
    cpdef push(
        self, uint64_t index, uint64_t offset, uint64_t first, uint64_t count, uint64_t size,
        uint64_t acquired_count, uint64_t failed_delivery_count, uint64_t mark=*
    )
    @cython.locals(
        words=object, at=Py_ssize_t, index=uint64_t, place=uint64_t, amount=uint64_t, count=uint64_t,
        size=uint64_t, acquired_count=uint64_t, failed_delivery_count=uint64_t, counts=uint64_t, part=uint64_t,
        mark=uint64_t,
    )
    cpdef tuple take(self, uint64_t limit)
    @cython.locals(
        words=object, stride=Py_ssize_t, low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t,
        at=Py_ssize_t, place=uint64_t, last=uint64_t, made=list, listed=int64_t,
    )
    cpdef list runs_from(
        self, uint64_t index, uint64_t offset, uint64_t record, int64_t limit, Py_ssize_t runs_max
    )
    @cython.locals(
        words=object, at=Py_ssize_t, entry=uint64_t, place=uint64_t, last=uint64_t, found=list,
    )
    cpdef list runs_after(
        self, uint64_t index, uint64_t offset, uint64_t record, Py_ssize_t runs_max
    )
    @cython.locals(words=object, place=uint64_t, amount=uint64_t, counts=uint64_t)
    cdef tuple _run(self, Py_ssize_t at)

cdef class Tail(Fifo):
    cdef object _groups
    cpdef requeue(
        self, uint64_t entered, uint64_t index, uint64_t offset, uint64_t first, uint64_t count,
        uint64_t size, uint64_t acquired_count, uint64_t failed_delivery_count, uint64_t mark=*
    )
    @cython.locals(before=uint64_t)
    cpdef uint64_t ahead(self, uint64_t left) except? 0
    @cython.locals(run=tuple, group=list)
    cpdef tuple take(self, uint64_t limit)

cdef class CheckedOut(PackedRuns):
    @cython.locals(
        words=object, end=Py_ssize_t, at=Py_ssize_t, counts=uint64_t, place=uint64_t,
        amount=uint64_t, held=uint64_t,
    )
    cpdef add(
        self, uint64_t message_id, uint64_t index, uint64_t offset, uint64_t first, uint64_t count,
        uint64_t size, uint64_t acquired_count, uint64_t failed_delivery_count, uint64_t mark=*
    )
    @cython.locals(run=tuple, taken=uint64_t, moved=uint64_t, again=uint64_t)
    cpdef tuple take_from(
        self, Fifo source, uint64_t message_id, uint64_t limit, uint64_t runs_max
    )
    @cython.locals(
        words=object, at=Py_ssize_t, made=list, run_id=uint64_t, place=uint64_t, amount=uint64_t,
        counts=uint64_t, count=uint64_t, size=uint64_t, skip=uint64_t, kept=uint64_t,
        part=uint64_t,
    )
    cpdef list between(self, uint64_t first_id, uint64_t end_id, Py_ssize_t runs_max)
    @cython.locals(
        words=object, at=Py_ssize_t, end=Py_ssize_t, messages=uint64_t, dropped=uint64_t,
        run_id=uint64_t, amount=uint64_t, count=uint64_t, size=uint64_t, part=uint64_t,
        part_size=uint64_t,
    )
    cpdef tuple drop_oldest(self, uint64_t last_id)
    @cython.locals(
        words=object, head=Py_ssize_t, low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t,
        at=Py_ssize_t, stride=Py_ssize_t,
    )
    cdef Py_ssize_t _find(self, uint64_t message_id) except -1
    @cython.locals(
        words=object, start=Py_ssize_t, at=Py_ssize_t, end=Py_ssize_t, spare=Py_ssize_t,
        i=Py_ssize_t, removed=list, kept=list, run_id=uint64_t, index=uint64_t, place=uint64_t,
        amount=uint64_t, counts=uint64_t, count=uint64_t, size=uint64_t, part=uint64_t,
        part_size=uint64_t, right=uint64_t, taken=uint64_t,
        marked=bint, mark=uint64_t,
    )
    cpdef list remove(self, uint64_t first_id, uint64_t last_id)
    cpdef uint64_t first_index(self) except? 0
