# A property inside a content header payload.
cdef struct Span:
    Py_ssize_t at
    Py_ssize_t n

cdef enum:
    # One for each bit of the property flags.
    SPANS = 16
