# C declarations of non-blocking socket input and output.

cdef extern from "sys/types.h" nogil:
    pass

cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int fd, void* buffer, size_t length, int flags)
    ssize_t send(int fd, const void* buffer, size_t length, int flags)
    int MSG_DONTWAIT
    int MSG_NOSIGNAL

cdef extern from "errno.h" nogil:
    int errno
    int EAGAIN
    int EWOULDBLOCK
    int EINTR
