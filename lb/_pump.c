/* Moves the chunks of running streams from targets to clients without waking Python for each of them.
 *
 * A lane is a pair of sockets and the bytes that went through. What passes here is only the plain case: a read that is
 * one or more whole HTTP chunks, each a whole server-sent event, in which the engine neither ends nor gives up, and
 * that the client takes at once. Anything else stops the lane and goes back to Python as the bytes that were read, so
 * that every decision is made in one place (lb/survival.py). lb/pump.py says what the kinds of news mean.
 *
 * Sockets are non-blocking and belong to the event loop; a lane must be stopped before either is closed. */
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
} Pump;

typedef struct {
    PyObject_HEAD
    Pump *pump;      /* NULL while stopped */
    PyObject *owner; /* who hears the news */
    int from, to;
    char *kept; /* what went through, with its framing */
    size_t kept_bytes, kept_room, limit;
    unsigned long long chunks, bytes;
    int heard;
} Lane;

static PyTypeObject LaneType;

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

static int keep(Lane *lane, const char *data, size_t size) {
    size_t wanted = lane->kept_bytes + size;
    if (wanted > lane->kept_room) {
        size_t room = lane->kept_room ? lane->kept_room : 1024;
        while (room < wanted) room *= 2;
        char *larger = realloc(lane->kept, room);
        if (!larger) return 0;
        lane->kept = larger;
        lane->kept_room = room;
    }
    memcpy(lane->kept + lane->kept_bytes, data, size);
    lane->kept_bytes = wanted;
    return 1;
}

/* --- lanes */

static void lane_halt(Lane *lane) {
    if (!lane->pump) return;
    epoll_ctl(lane->pump->epoll, EPOLL_CTL_DEL, lane->from, NULL);
    Py_CLEAR(lane->pump);
    Py_DECREF(lane); /* the reference that epoll has had */
}

static PyObject *lane_stop(Lane *lane, PyObject *Py_UNUSED(none)) {
    Py_INCREF(lane);
    lane_halt(lane);
    Py_DECREF(lane);
    Py_RETURN_NONE;
}

static PyObject *lane_take(Lane *lane, PyObject *Py_UNUSED(none)) {
    PyObject *kept = PyBytes_FromStringAndSize(lane->kept, (Py_ssize_t)lane->kept_bytes);
    if (kept) {
        lane->kept_bytes = 0;
        free(lane->kept);
        lane->kept = NULL;
        lane->kept_room = 0;
    }
    return kept;
}

static PyObject *lane_pulse(Lane *lane, PyObject *Py_UNUSED(none)) {
    int heard = lane->heard;
    lane->heard = 0;
    return PyBool_FromLong(heard);
}

static PyObject *lane_counts(Lane *lane, PyObject *Py_UNUSED(none)) {
    PyObject *counts = Py_BuildValue("(KK)", lane->chunks, lane->bytes);
    lane->chunks = lane->bytes = 0;
    return counts;
}

static int lane_traverse(Lane *lane, visitproc visit, void *arg) {
    Py_VISIT(lane->pump);
    Py_VISIT(lane->owner);
    return 0;
}

static int lane_clear(Lane *lane) {
    Py_CLEAR(lane->owner);
    return 0;
}

static void lane_dealloc(Lane *lane) {
    PyObject_GC_UnTrack(lane);
    Py_CLEAR(lane->owner);
    Py_CLEAR(lane->pump);
    free(lane->kept);
    Py_TYPE(lane)->tp_free((PyObject *)lane);
}

static PyMethodDef lane_methods[] = {
    {"stop", (PyCFunction)lane_stop, METH_NOARGS, "Nothing passes any longer."},
    {"take", (PyCFunction)lane_take, METH_NOARGS, "What has gone through since the last call, framing included."},
    {"pulse", (PyCFunction)lane_pulse, METH_NOARGS, "Whether a data event has passed since the last call."},
    {"counts", (PyCFunction)lane_counts, METH_NOARGS, "Chunks and bytes that have passed since the last call."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lb._pump.Lane",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_methods = lane_methods,
};

/* --- the pump */

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Pump takes no arguments");
        return NULL;
    }
    Pump *pump = (Pump *)type->tp_alloc(type, 0);
    if (!pump) return NULL;
    pump->epoll = epoll_create1(EPOLL_CLOEXEC);
    pump->buffer = malloc(READ_BYTES);
    if (pump->epoll < 0 || !pump->buffer) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(pump);
        return NULL;
    }
    return (PyObject *)pump;
}

static void pump_dealloc(Pump *pump) {
    if (pump->epoll >= 0) close(pump->epoll);
    free(pump->buffer);
    Py_TYPE(pump)->tp_free((PyObject *)pump);
}

static PyObject *pump_fileno(Pump *pump, PyObject *Py_UNUSED(none)) { return PyLong_FromLong(pump->epoll); }

static PyObject *pump_lane(Pump *pump, PyObject *args) {
    int from, to;
    Py_ssize_t limit;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "iinO", &from, &to, &limit, &owner)) return NULL;
    Lane *lane = PyObject_GC_New(Lane, &LaneType);
    if (!lane) return NULL;
    memset((char *)lane + sizeof(PyObject), 0, sizeof(Lane) - sizeof(PyObject));
    lane->from = from;
    lane->to = to;
    lane->limit = (size_t)limit;
    lane->owner = Py_NewRef(owner);
    PyObject_GC_Track(lane);
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = lane};
    if (epoll_ctl(pump->epoll, EPOLL_CTL_ADD, from, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(lane);
        return NULL;
    }
    lane->pump = (Pump *)Py_NewRef(pump);
    Py_INCREF(lane); /* epoll's; dropped by lane_halt */
    return (PyObject *)lane;
}

static int tell(PyObject *news, Lane *lane, int kind, const char *data, size_t size) {
    PyObject *item = Py_BuildValue("(Oiy#)", lane->owner, kind, data, (Py_ssize_t)size);
    lane_halt(lane);
    if (!item) return 0;
    int failed = PyList_Append(news, item);
    Py_DECREF(item);
    return !failed;
}

/* One read of one lane; 0 on an exception. */
static int move(Pump *pump, Lane *lane, PyObject *news) {
    ssize_t got = recv(lane->from, pump->buffer, READ_BYTES, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    if (got <= 0) return tell(news, lane, NEWS_ENDED, got < 0 ? "reset" : "", got < 0 ? 5 : 0);
    const char *data = pump->buffer;
    size_t size = (size_t)got;
    unsigned chunks = plain_chunks(data, size, &lane->heard);
    if (!chunks) return tell(news, lane, NEWS_DATA, data, size);
    if (!keep(lane, data, size)) {
        PyErr_NoMemory();
        return 0;
    }
    lane->chunks += chunks;
    lane->bytes += size;
    ssize_t sent = send(lane->to, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) sent = 0; /* whatever the reason, the event loop will meet it as well */
    if ((size_t)sent < size) return tell(news, lane, NEWS_UNSENT, data + sent, size - (size_t)sent);
    if (lane->kept_bytes > lane->limit) return tell(news, lane, NEWS_FULL, "", 0);
    return 1;
}

static PyObject *pump_run(Pump *pump, PyObject *Py_UNUSED(none)) {
    struct epoll_event events[BATCH];
    int count = epoll_wait(pump->epoll, events, BATCH, 0);
    if (count < 0 && errno != EINTR) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *news = PyList_New(0);
    if (!news) return NULL;
    /* Making news runs Python's memory management, and what that runs may stop lanes: each stays ours until the end. */
    for (int i = 0; i < count; i++) Py_INCREF((PyObject *)events[i].data.ptr);
    int sound = 1;
    for (int i = 0; i < count; i++) {
        Lane *lane = events[i].data.ptr;
        if (sound && lane->pump) sound = move(pump, lane, news);
        Py_DECREF(lane);
    }
    if (!sound) Py_CLEAR(news);
    return news;
}

static PyMethodDef pump_methods[] = {
    {"fileno", (PyCFunction)pump_fileno, METH_NOARGS, "Readable when a lane has something to move."},
    {"lane", (PyCFunction)pump_lane, METH_VARARGS, "Open a lane: (from fd, to fd, limit of kept bytes, owner)."},
    {"run", (PyCFunction)pump_run, METH_NOARGS, "Move what there is. [(owner, kind, data)] of lanes that have stopped."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject PumpType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lb._pump.Pump",
    .tp_basicsize = sizeof(Pump),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = pump_new,
    .tp_dealloc = (destructor)pump_dealloc,
    .tp_methods = pump_methods,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "lb._pump", .m_size = -1};

PyMODINIT_FUNC PyInit__pump(void) {
    if (PyType_Ready(&PumpType) < 0 || PyType_Ready(&LaneType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    if (PyModule_AddObjectRef(made, "Pump", (PyObject *)&PumpType) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
