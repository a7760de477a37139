/* The type PackedEvents: what a stream has sent, packed (`_event_delta.h`), as Python holds it. lb/stream/kept_events.py says what its
 * methods do. */
#ifndef PACKED_EVENTS_H
#define PACKED_EVENTS_H
#include <Python.h>

#include "_event_delta.h"

typedef struct {
    PyObject_HEAD
    EventDelta delta;
    PyObject *only; /* bytes that are all that is kept, as they are: their owner has them too, and many streams are silent after them */
} PackedEvents;

static PyTypeObject PackedEventsType;

/* All of a stream as an object, which owns it from now on. */
static PyObject *packed_events_of(EventDelta *delta) {
    PackedEvents *packed = PyObject_New(PackedEvents, &PackedEventsType);
    if (!packed) return NULL;
    packed->delta = *delta;
    packed->only = NULL;
    *delta = (EventDelta){0};
    return (PyObject *)packed;
}

/* The last `size` of the bytes that were packed in `block` and those after it, which are `raw` bytes. */
static PyObject *unpacked(const Block *block, size_t raw, size_t size) {
    if (size == raw) {
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)raw);
        if (!bytes || blocks_unpack(block, PyBytes_AS_STRING(bytes))) return bytes;
        Py_DECREF(bytes);
    } else {
        char *all = malloc(raw);
        if (!all) return PyErr_NoMemory();
        PyObject *bytes = NULL;
        int sound = blocks_unpack(block, all);
        if (sound) bytes = PyBytes_FromStringAndSize(all + raw - size, (Py_ssize_t)size);
        free(all);
        if (sound) return bytes;
    }
    PyErr_SetString(PyExc_SystemError, "packed events are damaged");
    return NULL;
}

/* All that was packed, which is dropped then. */
static PyObject *unpacked_all(EventDelta *delta) {
    if (!delta_flush(delta)) return PyErr_NoMemory();
    PyObject *bytes = unpacked(delta->first, delta->raw_bytes, delta->raw_bytes);
    if (bytes) delta_free(delta);
    return bytes;
}

static PyObject *packed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "PackedEvents takes no arguments");
        return NULL;
    }
    return type->tp_alloc(type, 0);
}

/* Pack what was kept as it is; 0 if there is no memory. */
static int pack_only(PackedEvents *packed) {
    PyObject *only = packed->only;
    if (!only) return 1;
    if (!delta_add(&packed->delta, PyBytes_AS_STRING(only), (size_t)PyBytes_GET_SIZE(only))) return 0;
    Py_CLEAR(packed->only);
    return 1;
}

static void packed_dealloc(PackedEvents *packed) {
    Py_CLEAR(packed->only);
    delta_free(&packed->delta);
    Py_TYPE(packed)->tp_free((PyObject *)packed);
}

static PyObject *packed_add(PackedEvents *packed, PyObject *data) {
    if (!packed->only && !packed->delta.first && PyBytes_CheckExact(data) && PyBytes_GET_SIZE(data)) {
        packed->only = Py_NewRef(data);
        Py_RETURN_NONE;
    }
    if (!pack_only(packed)) return PyErr_NoMemory();
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
    int added = delta_add(&packed->delta, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    if (!added) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *packed_join(PackedEvents *packed, PyObject *other) {
    if (Py_TYPE(other) != &PackedEventsType || (PyObject *)packed == other) {
        PyErr_SetString(PyExc_TypeError, "only another PackedEvents can be joined");
        return NULL;
    }
    PackedEvents *from = (PackedEvents *)other;
    if (!pack_only(packed) || !pack_only(from) || !delta_join(&packed->delta, &from->delta)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *packed_pop(PackedEvents *packed, PyObject *Py_UNUSED(none)) {
    if (packed->only) {
        PyObject *only = packed->only;
        packed->only = NULL;
        return only;
    }
    EventDelta *delta = &packed->delta;
    if (!delta->first) return PyBytes_FromStringAndSize(NULL, 0);
    if (!delta_flush(delta)) return PyErr_NoMemory();
    Block *block = delta_pop(delta);
    block->next = NULL;
    PyObject *bytes = unpacked(block, block->raw, block->raw);
    free(block);
    return bytes;
}

static PyObject *packed_tail(PackedEvents *packed, PyObject *given) {
    EventDelta *delta = &packed->delta;
    Py_ssize_t wanted = PyLong_AsSsize_t(given);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    if (!pack_only(packed)) return PyErr_NoMemory();
    if (wanted <= 0 || !delta->first) return PyBytes_FromStringAndSize(NULL, 0);
    if (!delta_flush(delta)) return PyErr_NoMemory();
    size_t size = (size_t)wanted < delta->raw_bytes ? (size_t)wanted : delta->raw_bytes, raw = delta->raw_bytes;
    const Block *block = delta->first;
    for (; raw - block->raw >= size && block->next; block = block->next) raw -= block->raw;
    return unpacked(block, raw, size);
}

static PyObject *packed_clear(PackedEvents *packed, PyObject *Py_UNUSED(none)) {
    Py_CLEAR(packed->only);
    delta_free(&packed->delta);
    Py_RETURN_NONE;
}

static PyObject *packed_raw_bytes(PackedEvents *packed, void *Py_UNUSED(none)) {
    return PyLong_FromSize_t(packed->only ? (size_t)PyBytes_GET_SIZE(packed->only) : packed->delta.raw_bytes);
}

static PyObject *packed_held_bytes(PackedEvents *packed, void *Py_UNUSED(none)) {
    size_t only = packed->only ? (size_t)PyBytes_GET_SIZE(packed->only) + PyBytes_Type.tp_basicsize : 0;
    return PyLong_FromSize_t(only + packed->delta.held_bytes);
}

static PyMethodDef packed_methods[] = {
    {"add", (PyCFunction)packed_add, METH_O, "Keep the next bytes of the stream."},
    {"join", (PyCFunction)packed_join, METH_O, "Keep what another one has kept, which has nothing afterwards."},
    {"pop", (PyCFunction)packed_pop, METH_NOARGS, "Return the oldest bytes as they came, and drop them; b\"\" if nothing is kept."},
    {"tail", (PyCFunction)packed_tail, METH_O, "Return so many of the last bytes as they came, or all if there are fewer."},
    {"clear", (PyCFunction)packed_clear, METH_NOARGS, "Drop everything."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef packed_fields[] = {
    {"raw_bytes", (getter)packed_raw_bytes, NULL, "How many bytes are kept, as they came.", NULL},
    {"held_bytes", (getter)packed_held_bytes, NULL, "How many bytes of memory that takes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject PackedEventsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lb.proxy._fast_path.PackedEvents",
    .tp_basicsize = sizeof(PackedEvents),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = packed_new,
    .tp_dealloc = (destructor)packed_dealloc,
    .tp_methods = packed_methods,
    .tp_getset = packed_fields,
};

#endif
