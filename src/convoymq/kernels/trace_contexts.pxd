# (traceparent, tracestate) of the content header payload of n bytes at p, when it is sampled and the
# lower half of its trace id lies below `below`; otherwise None.
cdef object context_of(unsigned char* p, Py_ssize_t n, bytes below)
