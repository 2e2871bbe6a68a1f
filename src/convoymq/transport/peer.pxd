# Types of the compiled build; peer.py is complete without them.
from libc.stdint cimport int64_t

cdef class Peer:
    cdef public int node
    cdef public object address, hello, watch, outward, outward_process, inward
    cdef public int64_t incarnation, frames_out
    cdef public bint up, formed, leaves, gone, dirty, told_full
    cdef public double half_since, told_clock, full_since
    cdef public list totals
    cdef public object out_id, in_id, relay_out_id, relay_in_id
    cdef public int64_t largest, taken, told, relay_sent, relay_taken, relay_in, relay_told
