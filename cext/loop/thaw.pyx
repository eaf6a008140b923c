"""Finds what belongs to some objects, and shows it to the garbage collector once more as if it were new.

The problem: a model's Python code that ran in the server's process leaves cycles, because a class, and every module with a
function, refers to itself. The collector finds them only where it looks at the generation that they are in, and that one
holds every model of the server (loop/collector.py). The choice: the objects of the one model are taken out of it and put into
the youngest generation. A look at that one takes as long as the model is large, however many others there are.

Rules:
 1. That an object is moved to another generation changes nothing but when it is looked at: what is referred to from
    elsewhere stays alive.
 2. What is reached from the given objects belongs to them, but for what leads to everything: modules and classes of other
    packages, the dictionaries of such modules, and objects of the server, its loop and the log (FOREIGN).
 3. If there are more than `most`, nothing is moved: a part of a cycle is of no use.
 4. What the collector does not track, as a tuple of numbers, refers to nothing that could refer back.
 5. Others get the interpreter every SLICE objects, but not while objects are moved: a look of the collector between two of
    them would move the first on.
"""

import sys
from cpython.dict cimport PyDict_CheckExact
from cpython.module cimport PyModule_Check, PyModule_GetDict
from cpython.type cimport PyType_Check
from gc import get_referents

cdef extern from "Python.h":
    bint PyObject_GC_IsTracked(object thing) noexcept
    void PyObject_GC_UnTrack(void* thing) noexcept
    void PyObject_GC_Track(void* thing) noexcept

cdef enum:
    SLICE = 256

_namespace = type.__dict__["__dict__"].__get__

# packages whose objects lead to everything
FOREIGN = frozenset(("neptrio", "triton_python_backend_utils", "trio", "logging", "asyncio", "threading", "concurrent"))


def thaw(list roots not None, str package not None, Py_ssize_t most):
    """Shows the roots and what belongs to them to the collector's next look at the youngest objects.

    `package`: the name of the package that modules and classes have which belong to them. Returns how many objects there
    are, -1 if they are more than `most` and none was moved. Refers to none of them when it returns.
    """
    cdef set seen = set()
    cdef list found = []
    cdef dict kinds = {}
    cdef Py_ssize_t at = 0
    seen.add(id(sys.modules))
    for thing in roots:
        if PyObject_GC_IsTracked(thing) and id(thing) not in seen:
            found.append(thing)
        seen.add(id(thing))
    while at < len(found):
        for thing in get_referents(found[at]):
            if not PyObject_GC_IsTracked(thing) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if _belongs(thing, package, kinds):
                found.append(thing)
        at += 1
        if at % SLICE == 0:
            with nogil:
                pass
        if len(found) > most:
            return -1
    for thing in found:
        PyObject_GC_UnTrack(<void*>thing)
        PyObject_GC_Track(<void*>thing)
    return len(found)


cdef bint _belongs(object thing, str package, dict kinds) except -1:
    # not by isinstance(), which may ask the object
    if PyModule_Check(thing):
        return _inside((<object>PyModule_GetDict(thing)).get("__name__"), package)
    if PyType_Check(thing):
        return _inside(_module_of(thing), package)
    if PyDict_CheckExact(thing) and "__builtins__" in <dict>thing:  # a module's, or one of exec()
        return _inside((<dict>thing).get("__name__"), package)
    kind = type(thing)
    known = kinds.get(kind)
    if known is None:
        module = _module_of(kind)
        known = not (isinstance(module, str) and module.partition(".")[0] in FOREIGN)
        kinds[kind] = known
    return known


cdef object _module_of(object kind):
    return _namespace(kind).get("__module__")


cdef bint _inside(object name, str package) except -1:
    return isinstance(name, str) and (name == package or name.startswith(package + "."))
