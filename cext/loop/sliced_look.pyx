"""Looks for garbage among all objects that are frozen, a fraction of a millisecond at a time.

The problem: the garbage collector looks at all that is frozen (loop/collector.py) or at nothing, and with a thousand
models a look at all stops the process for a tenth of a second. The choice: a look in two parts. First it is found out,
a slice at a time, what can be reached from the modules. What was not reached is garbage, or reached in a way that is not
known here, as from a stack or a variable in C: it is shown to the collector as if it were new, which decides exactly.

    mark    what is reached gets a mark, by its address; repeated until nothing new is found
    show    frozen objects without a mark, with all that they lead to, are moved to the youngest generation

Rules:
 1. Marks decide nothing but what the collector is shown. Between two slices others change everything: what they move may
    get no mark and is shown in vain; an address may be used again and keep its mark, and if garbage lies there, the next
    look finds it.
 2. Between two slices nothing is referred to but the bookmarks. So nothing lives longer because of a look, and no address
    that was kept is taken for an object. What was reached and not yet looked into is found again on the way.
 3. In a slice the interpreter is held and no Python code runs: objects are looked at only as the collector does itself.
 4. The list of frozen objects has no place in Python's interface. How it is linked is tried out at the start, with an
    object of our own (prepare). Where anything is other than expected, there is no look in slices.
 5. The bookmarks are objects of ours in that list, so whatever others do to it, it stays sound. Somebody may thaw
    everything: then it is empty, and the look ends.
 6. What may be garbage is shown with all that it leads to in one slice, however much that is: a part of a cycle is of no
    use.
 7. What is shown a slice before other garbage that refers to it survives the collector's first look, and is then among the
    objects that it looks at once more.
 8. No slice while the collector is in the middle of a look, whose finalizers may let other threads run.
"""

import builtins
import gc
import sys

from cpython.object cimport PyObject, PyTypeObject, Py_TPFLAGS_HEAPTYPE
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc, realloc

from neptrio.loop.address_marks cimport AddressMarks
from neptrio.request.infer_request cimport now_ns

cdef extern from *:
    """
    /* the versions of CPython that this was tested with; without the lock objects are not linked at all */
    #if !defined(Py_GIL_DISABLED) && PY_VERSION_HEX < 0x030e0000
    #define NEPTRIO_LINKED 1
    #else
    #define NEPTRIO_LINKED 0
    #endif

    /* what a type refers to that its traverse function does not visit; one that is not on the heap has none that may
       be called, and the collector does not track it */
    static void neptrio_look_into_type(PyTypeObject* type, visitproc visit, void* look) {
        if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) {
    #if PY_VERSION_HEX >= 0x030c0000
            PyObject* names = PyType_GetDict(type);
    #else
            PyObject* names = type->tp_dict;
            Py_XINCREF(names);
    #endif
            if (names != NULL) {
                visit(names, look);
                Py_DECREF(names);
            }
            if (type->tp_bases != NULL) visit(type->tp_bases, look);
            if (type->tp_mro != NULL) visit(type->tp_mro, look);
        }
    #if PY_VERSION_HEX >= 0x030c0000
        if (type->tp_flags & _Py_TPFLAGS_STATIC_BUILTIN) return;  /* tp_subclasses is a number there */
    #endif
        if (type->tp_subclasses != NULL) visit((PyObject*)type->tp_subclasses, look);
    }
    """
    const bint NEPTRIO_LINKED
    ctypedef int (*visitproc)(PyObject*, void*) noexcept
    void neptrio_look_into_type(PyTypeObject* kind, visitproc visit, void* look) noexcept

cdef extern from "Python.h":
    bint PyObject_GC_IsTracked(PyObject* thing) noexcept
    void PyObject_GC_UnTrack(void* thing) noexcept
    void PyObject_GC_Track(void* thing) noexcept
    bint PyType_Check(PyObject* thing) noexcept
    PyTypeObject* Py_TYPE(PyObject* thing) noexcept
    PyObject* PyThreadState_GetDict() noexcept

# What lies before each object that the collector tracks. The lowest bits of both words are flags.
cdef struct Link:
    uintptr_t next
    uintptr_t previous

cdef enum:
    FLAGS = 3
    CLOCK = 32  # objects between two looks at the clock
    STACK = 16_384  # objects that were reached and are looked into next; others are found again on the way
    SHOWN = 1_000  # objects that are shown at a time, and more only where they lead to each other
    MOST_ROUNDS = 50  # it takes three or four
    REACHED = 1
    LOOKED_INTO = 2

cdef object _bookmark = None  # behind it is what the walk has not come to
cdef object _last = None  # behind it is what was frozen since the look began
cdef Link* _frozen = NULL  # the head of the list of frozen objects


def prepare():
    """Freezes all objects, and finds the list that they are in. Returns whether looks in slices are possible.

    To be called while the collector is disabled.
    """
    global _bookmark, _last, _frozen
    cdef Link* mine
    cdef Link* young
    cdef Link* frozen
    gc.freeze()
    if not NEPTRIO_LINKED or gc.isenabled():
        return False
    if _frozen is not NULL:
        return True
    last = []
    gc.freeze()
    # from here to the next freeze() nothing else is made, so this is the one object that is not frozen
    bookmark = []
    mine = _link(<PyObject*>bookmark)
    young = _next(mine)
    if young is NULL or _previous(mine) is not young or _next(young) is not mine or _previous(young) is not mine:
        return False
    gc.freeze()
    frozen = _next(mine)
    if frozen is NULL or frozen is young or _previous(frozen) is not mine or _next(young) is not young:
        return False
    if _previous(mine) is not _link(<PyObject*>last) or _next(_link(<PyObject*>last)) is not mine:
        return False
    _bookmark, _last, _frozen = bookmark, last, frozen
    return True


cdef class SlicedLook:
    """One look, at what is frozen when it begins. One thread only; prepare() has returned True."""

    cdef:
        PyObject** stack
        PyObject** shown
        AddressMarks marks
        Py_ssize_t top  # of the stack
        Py_ssize_t found  # how many `shown` holds
        Py_ssize_t room_for_shown
        bint showing  # all is marked
        bint left_some  # in this round: something was reached that was not looked into
        bint ended
        readonly int rounds
        readonly Py_ssize_t objects_reached
        readonly Py_ssize_t objects_shown

    def __cinit__(self):
        self.marks = AddressMarks()
        self.stack = <PyObject**>malloc(STACK * sizeof(PyObject*))
        self.ended = _frozen is NULL or self.stack is NULL or _next(_frozen) is _frozen
        if self.ended:
            return
        _move(_link(<PyObject*>_last), _previous(_frozen))
        self.from_the_start()
        self.mark(<PyObject*>_last, REACHED | LOOKED_INTO)
        self.mark(<PyObject*>_bookmark, REACHED | LOOKED_INTO)

    def __dealloc__(self):
        free(self.stack)
        free(self.shown)

    def step(self, Py_ssize_t most_ns):
        """Goes on for about `most_ns`. Returns whether the look goes on; objects_shown tells what the collector is to see."""
        cdef long long end = now_ns() + most_ns
        if not self.ended and _next(_frozen) is _frozen:
            self.ended = True  # somebody has thawed everything, and the collector will see it
        if self.ended:
            return False
        if self.showing:
            self.show(end)
        else:
            if self.objects_reached == 0:
                self.push_roots()
            self.reach(end)
        return not self.ended

    cdef push_roots(self):
        cdef PyObject* of_thread = PyThreadState_GetDict()  # what is this thread's alone, as trio's run
        cdef dict modules = sys.modules, interpreter = sys.__dict__, builtin = builtins.__dict__
        _reached(<PyObject*>modules, <void*>self)
        _reached(<PyObject*>interpreter, <void*>self)
        _reached(<PyObject*>builtin, <void*>self)
        if of_thread is not NULL:
            _reached(of_thread, <void*>self)

    cdef void from_the_start(self) noexcept:
        _move(_link(<PyObject*>_bookmark), _frozen)
        self.rounds += 1
        self.left_some = False

    cdef void reach(self, long long end) noexcept:
        """Marks what can be reached."""
        cdef Link* at = _next(_link(<PyObject*>_bookmark))
        cdef PyObject* thing
        cdef int steps = 0
        while not self.ended:
            if self.top:
                self.top -= 1
                thing = self.stack[self.top]
                if not self.mark(thing, REACHED | LOOKED_INTO) & LOOKED_INTO:
                    self.objects_reached += 1
                    _look_into(thing, _reached, <void*>self)
            elif at is not _frozen:
                thing = _object(at)
                if self.marks.of(<uintptr_t>thing) == REACHED:
                    self.push(thing)
                at = _next(at)
            else:
                self.showing = not self.left_some or self.rounds >= MOST_ROUNDS
                self.from_the_start()
                if self.showing:
                    return
                at = _next(_link(<PyObject*>_bookmark))
            steps += 1
            if steps % CLOCK == 0 and now_ns() > end:
                break
        self.left_some = self.left_some or self.top > 0
        self.top = 0
        _move(_link(<PyObject*>_bookmark), _previous(at))

    cdef void show(self, long long end) noexcept:
        """Moves what has no mark to the youngest generation."""
        cdef Link* at = _next(_link(<PyObject*>_bookmark))
        cdef Py_ssize_t before = self.objects_shown
        cdef int steps = 0
        while at is not _frozen and at is not _link(<PyObject*>_last):
            # an object may say that the collector is not to touch it now, as a greenlet that has a stack does
            if self.marks.of(<uintptr_t>_object(at)) & REACHED or not PyObject_GC_IsTracked(_object(at)):
                at = _next(at)
            else:
                _move(_link(<PyObject*>_bookmark), _previous(at))
                self.show_all_of(_object(at))
                if self.ended:
                    return
                at = _next(_link(<PyObject*>_bookmark))
            steps += 1
            if self.objects_shown - before >= SHOWN or (steps % CLOCK == 0 and now_ns() > end):
                _move(_link(<PyObject*>_bookmark), _previous(at))
                return
        self.ended = True

    cdef void show_all_of(self, PyObject* thing) noexcept:
        """Moves an object and all without a mark that it leads to."""
        cdef Py_ssize_t i = 0
        self.found = 0
        _found(thing, <void*>self)
        while i < self.found and not self.ended:
            _look_into(self.shown[i], _found, <void*>self)
            i += 1
        if self.ended:
            return
        for i in range(self.found):
            PyObject_GC_UnTrack(<void*>self.shown[i])
            PyObject_GC_Track(<void*>self.shown[i])
        self.objects_shown += self.found

    cdef void push(self, PyObject* thing) noexcept:
        if self.top < STACK:
            self.stack[self.top] = thing
            self.top += 1
        else:
            self.left_some = True

    cdef void push_shown(self, PyObject* thing) noexcept:
        cdef Py_ssize_t room
        cdef PyObject** larger
        if self.found == self.room_for_shown:
            room = 2 * self.room_for_shown + SHOWN
            larger = <PyObject**>realloc(self.shown, room * sizeof(PyObject*))
            if larger is NULL:
                self.ended = True
                return
            self.shown, self.room_for_shown = larger, room
        self.shown[self.found] = thing
        self.found += 1

    cdef int mark(self, PyObject* thing, int marks) noexcept:
        """Adds marks to an object. Returns those that it had; all of them where there is no memory for new ones."""
        cdef int had = self.marks.add(<uintptr_t>thing, marks)
        if had < 0:
            self.ended = True
        return had if had >= 0 else REACHED | LOOKED_INTO


cdef int _reached(PyObject* thing, void* look) noexcept:
    """Something refers to the object: it gets a mark, and is looked into later."""
    if PyObject_GC_IsTracked(thing):
        if not (<SlicedLook>look).mark(thing, REACHED) & REACHED:
            (<SlicedLook>look).push(thing)
    elif PyType_Check(thing):  # it is in no list, so it could not be found again
        if not (<SlicedLook>look).mark(thing, REACHED | LOOKED_INTO) & LOOKED_INTO:
            neptrio_look_into_type(<PyTypeObject*>thing, _reached, look)
    return 0


cdef int _found(PyObject* thing, void* look) noexcept:
    """Something that is to be shown refers to the object: it is shown, too, if it has no mark."""
    if PyObject_GC_IsTracked(thing):
        if not (<SlicedLook>look).mark(thing, REACHED) & REACHED:
            (<SlicedLook>look).push_shown(thing)
    return 0


cdef void _look_into(PyObject* thing, visitproc visit, void* look) noexcept:
    """Calls `visit` with each object that one refers to which the collector tracks."""
    cdef PyTypeObject* kind = Py_TYPE(thing)
    if kind.tp_traverse is not NULL:
        kind.tp_traverse(thing, visit, look)
    if PyType_Check(thing):
        neptrio_look_into_type(<PyTypeObject*>thing, visit, look)
    visit(<PyObject*>kind, look)


cdef inline Link* _link(PyObject* thing) noexcept:
    return <Link*>thing - 1


cdef inline PyObject* _object(Link* link) noexcept:
    return <PyObject*>(link + 1)


cdef inline Link* _next(Link* link) noexcept:
    return <Link*>(link.next & ~<uintptr_t>FLAGS)


cdef inline Link* _previous(Link* link) noexcept:
    return <Link*>(link.previous & ~<uintptr_t>FLAGS)


cdef void _join(Link* before, Link* after) noexcept:
    before.next = (before.next & FLAGS) | <uintptr_t>after
    after.previous = (after.previous & FLAGS) | <uintptr_t>before


cdef void _move(Link* link, Link* behind) noexcept:
    """Moves a bookmark behind another link of its list."""
    if behind is link:
        return
    _join(_previous(link), _next(link))
    _join(link, _next(behind))
    _join(behind, link)
