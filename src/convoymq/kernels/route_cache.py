"""A channel's memory of where exchanges and routing keys lead: a hash table of their bytes."""

import cython
from cython.cimports.convoymq.kernels import cext
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint64_t

_ROUTES_MAX = cython.declare(cython.Py_ssize_t, 4096)


@cython.cclass
class RouteCacheVersion:
    def __init__(self):
        self.value = 1

    def bump(self):
        self.value += 1


@cython.cclass
class RouteCount:
    pass


@cython.cfunc
@cython.exceptval(check=False)
def drop_routes(cache: cython.pointer(RouteCache)) -> cython.void:
    i: cython.Py_ssize_t
    if cache.routes == cython.NULL:
        return
    routes: cython.pointer(Route) = cache.routes
    mask: cython.Py_ssize_t = cache.mask
    cache.routes = cython.NULL
    cache.mask = 0
    cache.used = 0
    for i in range(mask + 1):
        if routes[i].key != cython.NULL:
            stdlib.free(routes[i].key)
            cext.Py_DECREF_raw(routes[i].targets)
            cext.Py_DECREF_raw(routes[i].count)
    stdlib.free(routes)


@cython.cfunc
@cython.exceptval(-1)
def add_route(
    cache: cython.pointer(RouteCache),
    hash: uint64_t,
    key: cython.p_uchar,
    n: cython.Py_ssize_t,
    targets: tuple,
    count: RouteCount,
) -> cython.int:
    route: cython.pointer(Route)
    if cache.used >= _ROUTES_MAX:
        drop_routes(cache)
    if cache.routes == cython.NULL or cache.used * 2 >= cache.mask + 1:
        old: cython.pointer(Route) = cache.routes
        old_size: cython.Py_ssize_t = cache.mask + 1 if old != cython.NULL else 0
        size: cython.Py_ssize_t = max(16, old_size * 2)
        made: cython.p_void = stdlib.calloc(size, cython.sizeof(Route))
        if made == cython.NULL:
            raise MemoryError
        cache.routes = cython.cast(cython.pointer(Route), made)
        cache.mask = size - 1
        i: cython.Py_ssize_t
        for i in range(old_size):
            if old[i].key != cython.NULL:
                route = find_route(cache, old[i].hash, old[i].key, old[i].key_length)
                route[0] = old[i]
        stdlib.free(old)
    route = find_route(cache, hash, key, n)
    if route.key != cython.NULL:
        return 0
    copy: cython.p_void = stdlib.malloc(n)
    if copy == cython.NULL:
        raise MemoryError
    string.memcpy(copy, key, n)
    route.hash = hash
    route.key = cython.cast(cython.p_uchar, copy)
    route.key_length = n
    route.targets = cython.cast(cython.pointer(cext.PyObject), targets)
    cext.Py_INCREF_raw(route.targets)
    route.count = cython.cast(cython.pointer(cext.PyObject), count)
    cext.Py_INCREF_raw(route.count)
    route.messages = cython.NULL if count is None else cython.address(count.messages)
    cache.used += 1
    return 0
