/* Moves the chunks of running streams from targets to clients without waking Python for each of them.
 *
 * A forwarding is a pair of sockets and the bytes that went through. What passes here is only the plain case: a read that is
 * one or more whole HTTP chunks, each a whole server-sent event, in which the engine neither ends nor gives up, and
 * that the client takes at once. Anything else stops the forwarding and goes back to Python as the bytes that were read, so
 * that every decision is made in one place (lb/proxy/resumable_relay.py). lb/proxy/fast_path.py says what the kinds of news mean.
 *
 * Sockets are non-blocking and belong to the event loop; a forwarding must be stopped before either is closed. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES (256 * 1024)
#define BATCH 128
#define MAX_SIZE_DIGITS 7

enum { NEWS_DATA = 0, NEWS_UNSENT = 1, NEWS_FULL = 2, NEWS_ENDED = 3 };

typedef struct {
    PyObject_HEAD
    int epoll;
    char *buffer;
} FastPath;

typedef struct {
    PyObject_HEAD
    FastPath *fast_path;      /* NULL while stopped */
    PyObject *owner; /* who hears the news */
    int from, to;
    char *kept; /* what went through, with its framing */
    size_t kept_bytes, kept_room, limit;
    unsigned long long chunks, bytes;
    int heard;
} Forwarding;

static PyTypeObject ForwardingType;

/* --- what may pass */

static int hex_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* How many chunks the bytes are if all of them are plain; 0 if not. `heard` is set if there is a data event. */
static unsigned plain_chunks(const char *data, size_t size, int *heard) {
    const char *at = data, *end = data + size;
    unsigned chunks = 0;
    while (at < end) {
        size_t length = 0;
        int digits = 0, digit;
        while (at < end && digits <= MAX_SIZE_DIGITS && (digit = hex_of(*at)) >= 0) {
            length = length * 16 + (size_t)digit;
            at++, digits++;
        }
        if (!digits || digits > MAX_SIZE_DIGITS || length < 2) return 0; /* the last chunk among them */
        if ((size_t)(end - at) < 2 + length + 2 || at[0] != '\r' || at[1] != '\n') return 0;
        const char *payload = at + 2;
        at = payload + length;
        if (at[0] != '\r' || at[1] != '\n' || at[-1] != '\n' || at[-2] != '\n') return 0;
        at += 2;
        chunks++;
        if (memmem(payload, length, "data: [DONE]", 12) || memmem(payload, length, "data: {\"error\"", 14) ||
            memmem(payload, length, "\"finish_reason\":\"abort\"", 23))
            return 0;
        if (!*heard) *heard = (length >= 4 && !memcmp(payload, "data", 4)) || memmem(payload, length, "\ndata", 5) != NULL;
    }
    return chunks;
}

static int keep(Forwarding *forwarding, const char *data, size_t size) {
    size_t wanted = forwarding->kept_bytes + size;
    if (wanted > forwarding->kept_room) {
        size_t room = forwarding->kept_room ? forwarding->kept_room : 1024;
        while (room < wanted) room *= 2;
        char *larger = realloc(forwarding->kept, room);
        if (!larger) return 0;
        forwarding->kept = larger;
        forwarding->kept_room = room;
    }
    memcpy(forwarding->kept + forwarding->kept_bytes, data, size);
    forwarding->kept_bytes = wanted;
    return 1;
}

/* --- forwardings */

static void forwarding_halt(Forwarding *forwarding) {
    if (!forwarding->fast_path) return;
    epoll_ctl(forwarding->fast_path->epoll, EPOLL_CTL_DEL, forwarding->from, NULL);
    Py_CLEAR(forwarding->fast_path);
    Py_DECREF(forwarding); /* the reference that epoll has had */
}

static PyObject *forwarding_stop(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    Py_INCREF(forwarding);
    forwarding_halt(forwarding);
    Py_DECREF(forwarding);
    Py_RETURN_NONE;
}

static PyObject *forwarding_take(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    PyObject *kept = PyBytes_FromStringAndSize(forwarding->kept, (Py_ssize_t)forwarding->kept_bytes);
    if (kept) {
        forwarding->kept_bytes = 0;
        free(forwarding->kept);
        forwarding->kept = NULL;
        forwarding->kept_room = 0;
    }
    return kept;
}

static PyObject *forwarding_pulse(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    int heard = forwarding->heard;
    forwarding->heard = 0;
    return PyBool_FromLong(heard);
}

static PyObject *forwarding_counts(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    PyObject *counts = Py_BuildValue("(KK)", forwarding->chunks, forwarding->bytes);
    forwarding->chunks = forwarding->bytes = 0;
    return counts;
}

static int forwarding_traverse(Forwarding *forwarding, visitproc visit, void *arg) {
    Py_VISIT(forwarding->fast_path);
    Py_VISIT(forwarding->owner);
    return 0;
}

static int forwarding_clear(Forwarding *forwarding) {
    Py_CLEAR(forwarding->owner);
    return 0;
}

static void forwarding_dealloc(Forwarding *forwarding) {
    PyObject_GC_UnTrack(forwarding);
    Py_CLEAR(forwarding->owner);
    Py_CLEAR(forwarding->fast_path);
    free(forwarding->kept);
    Py_TYPE(forwarding)->tp_free((PyObject *)forwarding);
}

static PyMethodDef forwarding_methods[] = {
    {"stop", (PyCFunction)forwarding_stop, METH_NOARGS, "Nothing passes any longer."},
    {"take", (PyCFunction)forwarding_take, METH_NOARGS, "What has gone through since the last call, framing included."},
    {"pulse", (PyCFunction)forwarding_pulse, METH_NOARGS, "Whether a data event has passed since the last call."},
    {"counts", (PyCFunction)forwarding_counts, METH_NOARGS, "Chunks and bytes that have passed since the last call."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ForwardingType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lb.proxy._fast_path.Forwarding",
    .tp_basicsize = sizeof(Forwarding),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_dealloc = (destructor)forwarding_dealloc,
    .tp_traverse = (traverseproc)forwarding_traverse,
    .tp_clear = (inquiry)forwarding_clear,
    .tp_methods = forwarding_methods,
};

/* --- the fast_path */

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "FastPath takes no arguments");
        return NULL;
    }
    FastPath *fast_path = (FastPath *)type->tp_alloc(type, 0);
    if (!fast_path) return NULL;
    fast_path->epoll = epoll_create1(EPOLL_CLOEXEC);
    fast_path->buffer = malloc(READ_BYTES);
    if (fast_path->epoll < 0 || !fast_path->buffer) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(fast_path);
        return NULL;
    }
    return (PyObject *)fast_path;
}

static void fast_path_dealloc(FastPath *fast_path) {
    if (fast_path->epoll >= 0) close(fast_path->epoll);
    free(fast_path->buffer);
    Py_TYPE(fast_path)->tp_free((PyObject *)fast_path);
}

static PyObject *fast_path_fileno(FastPath *fast_path, PyObject *Py_UNUSED(none)) { return PyLong_FromLong(fast_path->epoll); }

static PyObject *fast_path_lane(FastPath *fast_path, PyObject *args) {
    int from, to;
    Py_ssize_t limit;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "iinO", &from, &to, &limit, &owner)) return NULL;
    Forwarding *forwarding = PyObject_GC_New(Forwarding, &ForwardingType);
    if (!forwarding) return NULL;
    memset((char *)forwarding + sizeof(PyObject), 0, sizeof(Forwarding) - sizeof(PyObject));
    forwarding->from = from;
    forwarding->to = to;
    forwarding->limit = (size_t)limit;
    forwarding->owner = Py_NewRef(owner);
    PyObject_GC_Track(forwarding);
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = forwarding};
    if (epoll_ctl(fast_path->epoll, EPOLL_CTL_ADD, from, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(forwarding);
        return NULL;
    }
    forwarding->fast_path = (FastPath *)Py_NewRef(fast_path);
    Py_INCREF(forwarding); /* epoll's; dropped by forwarding_halt */
    return (PyObject *)forwarding;
}

static int tell(PyObject *news, Forwarding *forwarding, int kind, const char *data, size_t size) {
    PyObject *item = Py_BuildValue("(Oiy#)", forwarding->owner, kind, data, (Py_ssize_t)size);
    forwarding_halt(forwarding);
    if (!item) return 0;
    int failed = PyList_Append(news, item);
    Py_DECREF(item);
    return !failed;
}

/* One read of one forwarding; 0 on an exception. */
static int move(FastPath *fast_path, Forwarding *forwarding, PyObject *news) {
    ssize_t got = recv(forwarding->from, fast_path->buffer, READ_BYTES, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    if (got <= 0) return tell(news, forwarding, NEWS_ENDED, got < 0 ? "reset" : "", got < 0 ? 5 : 0);
    const char *data = fast_path->buffer;
    size_t size = (size_t)got;
    unsigned chunks = plain_chunks(data, size, &forwarding->heard);
    if (!chunks) return tell(news, forwarding, NEWS_DATA, data, size);
    if (!keep(forwarding, data, size)) {
        PyErr_NoMemory();
        return 0;
    }
    forwarding->chunks += chunks;
    forwarding->bytes += size;
    ssize_t sent = send(forwarding->to, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) sent = 0; /* whatever the reason, the event loop will meet it as well */
    if ((size_t)sent < size) return tell(news, forwarding, NEWS_UNSENT, data + sent, size - (size_t)sent);
    if (forwarding->kept_bytes > forwarding->limit) return tell(news, forwarding, NEWS_FULL, "", 0);
    return 1;
}

static PyObject *fast_path_run(FastPath *fast_path, PyObject *Py_UNUSED(none)) {
    struct epoll_event events[BATCH];
    int count = epoll_wait(fast_path->epoll, events, BATCH, 0);
    if (count < 0 && errno != EINTR) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *news = PyList_New(0);
    if (!news) return NULL;
    /* Making news runs Python's memory management, and what that runs may stop forwardings: each stays ours until the end. */
    for (int i = 0; i < count; i++) Py_INCREF((PyObject *)events[i].data.ptr);
    int sound = 1;
    for (int i = 0; i < count; i++) {
        Forwarding *forwarding = events[i].data.ptr;
        if (sound && forwarding->fast_path) sound = move(fast_path, forwarding, news);
        Py_DECREF(forwarding);
    }
    if (!sound) Py_CLEAR(news);
    return news;
}

static PyMethodDef fast_path_methods[] = {
    {"fileno", (PyCFunction)fast_path_fileno, METH_NOARGS, "Readable when a forwarding has something to move."},
    {"forwarding", (PyCFunction)fast_path_lane, METH_VARARGS, "Open a forwarding: (from fd, to fd, limit of kept bytes, owner)."},
    {"run", (PyCFunction)fast_path_run, METH_NOARGS, "Move what there is. [(owner, kind, data)] of forwardings that have stopped."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject FastPathType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lb.proxy._fast_path.FastPath",
    .tp_basicsize = sizeof(FastPath),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = fast_path_new,
    .tp_dealloc = (destructor)fast_path_dealloc,
    .tp_methods = fast_path_methods,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "lb.proxy._fast_path", .m_size = -1};

PyMODINIT_FUNC PyInit__fast_path(void) {
    if (PyType_Ready(&FastPathType) < 0 || PyType_Ready(&ForwardingType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    if (PyModule_AddObjectRef(made, "FastPath", (PyObject *)&FastPathType) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
