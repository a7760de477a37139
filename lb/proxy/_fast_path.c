/* Moves the chunks of running streams from targets to clients without waking Python for each of them.
 *
 * A forwarding is a pair of connections and the bytes that went through. A connection is a socket, or one of TLS, whose records
 * OpenSSL reads and writes at the socket (lb/http/tls_transport.py). What passes here is only the regular case: a read that
 * is one or more whole HTTP chunks, each of whole server-sent events, in which the engine neither ends the stream nor gives
 * it up, and that the client takes at once. Fields that the client has not asked for are removed where they have the one
 * shape that engines write. Anything else stops the forwarding and goes back to Python as the bytes that were read, so that
 * every decision is made in one place (lb/proxy/forwarded_relay.py). lb/proxy/fast_path.py says what modes and reasons mean;
 * lb/stream/stream_merge.py removes the same fields, and lb/stream/token_usage.py counts the same tokens.
 *
 * Sockets are non-blocking and belong to the event loop; a forwarding must be stopped before either is closed. Python reads
 * nothing of the source meanwhile, and writes nothing to the sink. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define READ_BYTES (256 * 1024)         /* of one read, at least */
#define BUFFER_BYTES (2 * READ_BYTES)   /* for the reads of a batch; pages that are not used take no memory */
#define OUT_BYTES (2 * BUFFER_BYTES)    /* `null` in the place of `{}` is longer */
#define BATCH 32
/* Of one call of `run`, after which the event loop sees to everything else: new connections and first chunks need some ten
 * turns of the loop, so this is about a tenth of what they wait while more comes than one core can move. */
#define BUDGET_NS 1000000
/* Where chunks come closer together than CLOSE_NS they are moved once in PACE_NS: a turn of the event loop, and waking the
 * client's process, for each of them costs half as much as moving it. A chunk waits 2 ms on average then, of the 10 to 50 ms
 * between two tokens of a stream; the first ones do not come through here. Paced until fewer than PACE_CHUNKS come together. */
#define CLOSE_NS 1000000
#define PACE_NS 4000000
#define PACE_CHUNKS 3
/* Edges: with levels the kernel looks twice at a socket for each of its chunks, the second time to find it empty. A read that
 * has not filled its room has emptied the socket; after others, and where the end has come with the data, it is armed again. */
#define SOURCE_EVENTS (EPOLLIN | EPOLLRDHUP | EPOLLET)
/* Levels for TLS: what is left in OpenSSL is no whole record, so there is more as long as the socket has something. */
#define TLS_SOURCE_EVENTS (EPOLLIN | EPOLLRDHUP)
#define RECORD_BYTES (16 * 1024) /* the most that a record holds; as in lb/http/tls_transport.py */
#define MAX_SIZE_DIGITS 7
#define MAX_CUTS 64 /* of one chunk */

enum { STOP_IRREGULAR = 0, STOP_UNSENT = 1, STOP_FULL = 2, STOP_ENDED = 3 };
enum { MOVING = -1, NO_MEMORY = -2 }; /* in the place of a reason to stop */
enum { MODE_CHUNKS = 0, MODE_EVENTS = 1, MODE_WITHOUT_IDS = 2, MODE_WITHOUT_USAGE = 3 };

typedef struct {
    PyObject_HEAD
    int epoll;   /* what the event loop watches: `sources` while chunks are rare, `timer` while they are paced */
    int sources; /* an epoll of its own, of what forwardings read from */
    int timer, paced;
    long long ran_ns;
    char *buffer, *out;
} FastPath;

typedef struct {
    unsigned long long chunks, events, ids;
    int heard;
} Counts;

typedef struct ssl_st SSL;

/* One side of a forwarding. */
typedef struct {
    int fd;
    SSL *ssl;      /* NULL without TLS */
    PyObject *tls; /* whose it is; NULL as well */
} End;

typedef struct {
    PyObject_HEAD
    FastPath *fast_path; /* NULL while stopped */
    PyObject *owner;     /* gets the reason why it has stopped */
    End source, sink;
    int mode;
    char *kept; /* what came, with its framing */
    size_t kept_bytes, kept_room, limit;
    unsigned long long sent_bytes;
    Counts counts;
} Forwarding;

static PyTypeObject ForwardingType;

/* --- TLS */

/* Functions of the OpenSSL that Python's own module `_ssl` is linked with: no other one may touch its connections. Declared here,
 * as its headers are not needed to install Python packages; they are the same in every OpenSSL since 1.1.1. */
static struct {
    PyTypeObject *type; /* of the connections, `_ssl._SSLSocket`; NULL: TLS is left to Python */
    int (*read_ex)(SSL *, void *, size_t, size_t *);
    int (*write_ex)(SSL *, const void *, size_t, size_t *);
    int (*get_error)(const SSL *, int);
    int (*has_pending)(const SSL *);
    int (*get_fd)(const SSL *);
    void (*set_read_ahead)(SSL *, int);
    void (*clear_error)(void);
} openssl;

enum { OPENSSL_WANT_READ = 2 }; /* SSL_ERROR_WANT_READ */

/* How a connection begins in CPython's Modules/_ssl.c. */
typedef struct {
    PyObject_HEAD
    PyObject *socket; /* a weak reference to the object of the module `ssl` */
    SSL *ssl;
} TlsObject;

#if defined(Py_GIL_DISABLED) || PY_VERSION_HEX < 0x030a0000 || PY_VERSION_HEX >= 0x030f0000
#define KNOWS_TLS_OBJECTS 0
#else
#define KNOWS_TLS_OBJECTS 1
#endif

/* Find OpenSSL's functions from `_ssl` itself and what it is linked with; why not, or NULL. */
static const char *find_openssl(const char *module_file) {
    void *module = dlopen(module_file, RTLD_NOW | RTLD_NOLOAD);
    if (!module) return "the module _ssl is not loaded from its file";
#define FIND_FUNCTION(member, name)                                              \
    if (!(*(void **)&openssl.member = dlsym(module, name))) return "there is no " name
    FIND_FUNCTION(read_ex, "SSL_read_ex");
    FIND_FUNCTION(write_ex, "SSL_write_ex");
    FIND_FUNCTION(get_error, "SSL_get_error");
    FIND_FUNCTION(has_pending, "SSL_has_pending");
    FIND_FUNCTION(get_fd, "SSL_get_fd");
    FIND_FUNCTION(set_read_ahead, "SSL_set_read_ahead");
    FIND_FUNCTION(clear_error, "ERR_clear_error");
    return NULL; /* the handle stays open, as the module does */
}

static PyObject *learn_tls(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *module_file, *why = NULL;
    PyObject *sample, *socket;
    int fd;
    if (!PyArg_ParseTuple(args, "sOOi", &module_file, &sample, &socket, &fd)) return NULL;
    TlsObject *object = (TlsObject *)sample;
    if (!KNOWS_TLS_OBJECTS) {
        why = "this version of Python is not known";
    } else if (Py_TYPE(sample)->tp_basicsize < (Py_ssize_t)sizeof(TlsObject) || !object->socket ||
               !PyWeakref_CheckRef(object->socket) || !object->ssl) {
        why = "connections of _ssl are not as expected";
    } else {
        PyObject *refers_to = PyObject_CallNoArgs(object->socket);
        if (!refers_to) return NULL;
        Py_DECREF(refers_to); /* the caller has it */
        if (refers_to != socket) why = "connections of _ssl are not as expected";
    }
    if (!why) why = find_openssl(module_file);
    if (!why && openssl.get_fd(object->ssl) != fd) why = "connections of _ssl have another descriptor";
    openssl.type = why ? NULL : Py_TYPE(sample);
    return PyUnicode_FromString(why ? why : "");
}

/* A side of a forwarding, of a descriptor or a connection of TLS; 0 on an exception. */
static int open_end(PyObject *given, End *end) {
    if (openssl.type && Py_TYPE(given) == openssl.type) {
        SSL *ssl = ((TlsObject *)given)->ssl;
        *end = (End){ssl ? openssl.get_fd(ssl) : -1, ssl, Py_NewRef(given)};
        return 1;
    }
    long fd = PyLong_AsLong(given);
    if (fd == -1 && PyErr_Occurred()) return 0;
    *end = (End){(int)fd, NULL, NULL};
    return 1;
}

/* Read all whole records that are there, READ_BYTES at most; `reason` is why no more can be read, MOVING: no more is there.
 *
 * OpenSSL reads ahead, so a record takes one call of the kernel instead of two. Past half of the room it no longer does, but
 * uses up what it has, so that it holds no whole record in the end: of such, epoll would know nothing. */
static size_t read_records(SSL *ssl, char *buffer, int *reason) {
    size_t size = 0, got;
    *reason = MOVING;
    openssl.clear_error();
    do {
        if (size > READ_BYTES / 2) openssl.set_read_ahead(ssl, 0);
        if (openssl.read_ex(ssl, buffer + size, READ_BYTES - size, &got)) {
            size += got;
            continue;
        }
        /* Whatever else it is, the event loop will meet it again. */
        if (openssl.get_error(ssl, 0) != OPENSSL_WANT_READ) *reason = STOP_ENDED;
        openssl.clear_error();
        break;
    } while (openssl.has_pending(ssl));
    if (size > READ_BYTES / 2) openssl.set_read_ahead(ssl, 1);
    return size;
}

/* How many bytes OpenSSL has taken. The rest must be given to it unchanged, by records of the same size: it may have encrypted the
 * first one. */
static size_t write_records(SSL *ssl, const char *data, size_t size) {
    size_t sent = 0, taken;
    openssl.clear_error();
    while (sent < size) {
        size_t record = size - sent < RECORD_BYTES ? size - sent : RECORD_BYTES;
        if (!openssl.write_ex(ssl, data + sent, record, &taken)) {
            openssl.clear_error();
            break;
        }
        sent += taken;
    }
    return sent;
}

/* --- reading events */

#define FIND(text, size, literal) memmem(text, size, literal, sizeof(literal) - 1)
#define STARTS(text, end, literal) ((size_t)((end) - (text)) >= sizeof(literal) - 1 && !memcmp(text, literal, sizeof(literal) - 1))

static int hex_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Whether the key that ends before `end`, and begins with a quotation mark at `least` or later, is one whose value is text. */
static int is_text_key(const char *least, const char *end) {
    static const char *const KEYS[] = {"content",  "text",         "delta",     "reasoning_content", "reasoning",
                                       "thinking", "partial_json", "arguments", "response"};
    for (size_t i = 0; i < sizeof(KEYS) / sizeof(*KEYS); i++) {
        size_t size = strlen(KEYS[i]);
        if ((size_t)(end - least) > size && end[-(ptrdiff_t)size - 1] == '"' && !memcmp(end - size, KEYS[i], size)) return 1;
    }
    return 0;
}

/* How many lines have a field of text that is not empty. */
static unsigned events_with_text(const char *at, const char *end) {
    unsigned count = 0;
    const char *least = at, *colon;
    while ((colon = FIND(at, (size_t)(end - at), "\":"))) {
        const char *value = colon + 2;
        at = value;
        if (value < end && *value == ' ') value++;
        if (end - value < 2 || value[0] != '"' || value[1] == '"' || !is_text_key(least, colon)) continue;
        count++;
        at = least = memchr(value + 2, '\n', (size_t)(end - value - 2));
        if (!at) break;
    }
    return count;
}

static unsigned long long listed_ids(const char *at, const char *end) {
    unsigned long long count = 0;
    while ((at = FIND(at, (size_t)(end - at), "\"token_ids\":["))) {
        unsigned commas = 0;
        const char *first = at += 13;
        while (at < end && ((*at >= '0' && *at <= '9') || *at == ',')) commas += *at++ == ',';
        if (at < end && *at == ']' && at > first) count += commas + 1;
    }
    return count;
}

/* --- removing fields */

typedef struct {
    const char *from, *to;
    int null; /* leave `null` in its place */
} Cut;

/* Where the token ids of a payload are; -1 if they have another shape than expected. */
static int find_ids(const char *payload, const char *end, Cut *cuts) {
    int count = 0;
    for (const char *at = payload, *key; (key = FIND(at, (size_t)(end - at), "token_ids\"")); count++) {
        if (count == MAX_CUTS) return -1;
        const char *from = key - payload >= 9 && !memcmp(key - 9, ",\"prompt_", 9) ? key - 9 : key - 2;
        if (from < payload || from[0] != ',' || from[1] != '"') return -1;
        at = key + 10;
        if (STARTS(at, end, ":null")) {
            at += 5;
        } else if (STARTS(at, end, ":[")) {
            at += 2;
            while (at < end && ((*at >= '0' && *at <= '9') || *at == ',')) at++;
            if (at == end || *at++ != ']') return -1;
        } else {
            return -1;
        }
        cuts[count] = (Cut){from, at, 0};
    }
    return count;
}

/* The same for usage: objects within it hold none themselves. An event without choices is dropped or kept by Python. */
static int find_usage(const char *payload, const char *end, Cut *cuts) {
    int count = 0;
    if (FIND(payload, (size_t)(end - payload), "\"choices\":[]")) return -1;
    for (const char *at = payload, *key; (key = FIND(at, (size_t)(end - at), "\"usage\"")); ) {
        at = key + 7;
        if (STARTS(at, end, ":null")) continue;
        if (count == MAX_CUTS || key == payload || key[-1] != ',' || !STARTS(at, end, ":{")) return -1;
        const char *from = ++at;
        int depth = 0;
        for (; at < end; at++) {
            if (*at == '{' && ++depth > 2) return -1;
            if (*at == '}' && --depth == 0) break;
        }
        if (at == end) return -1;
        cuts[count++] = (Cut){from, ++at, 1};
    }
    return count;
}

/* Write a chunk without what is cut out of it. Returns the place behind it. */
static char *write_chunk(char *out, const char *payload, const char *end, const Cut *cuts, int count) {
    size_t size = (size_t)(end - payload);
    for (int i = 0; i < count; i++) size -= (size_t)(cuts[i].to - cuts[i].from) - (cuts[i].null ? 4 : 0);
    out += sprintf(out, "%zx\r\n", size);
    for (int i = 0; i < count; payload = cuts[i++].to) {
        out = mempcpy(out, payload, (size_t)(cuts[i].from - payload));
        if (cuts[i].null) out = mempcpy(out, "null", 4);
    }
    out = mempcpy(out, payload, (size_t)(end - payload));
    return mempcpy(out, "\r\n", 2);
}

/* --- what may pass */

/* The payload of the chunk at `at`, and its end; NULL if it is not a whole one, or the last. */
static const char *payload_of(const char *at, const char *end, const char **payload_end) {
    size_t length = 0;
    int digits = 0, digit;
    while (at < end && digits <= MAX_SIZE_DIGITS && (digit = hex_of(*at)) >= 0) {
        length = length * 16 + (size_t)digit;
        at++, digits++;
    }
    if (!digits || digits > MAX_SIZE_DIGITS || !length) return NULL;
    if ((size_t)(end - at) < 2 + length + 2 || at[0] != '\r' || at[1] != '\n') return NULL;
    *payload_end = at + 2 + length;
    return (*payload_end)[0] == '\r' && (*payload_end)[1] == '\n' ? at + 2 : NULL;
}

/* Whether a payload is whole events, none of which ends the stream or gives it up. */
static int is_regular(const char *payload, const char *end) {
    size_t size = (size_t)(end - payload);
    return size >= 2 && end[-1] == '\n' && end[-2] == '\n' && !FIND(payload, size, "data: [DONE]") &&
           !FIND(payload, size, "data: {\"error\"") && !FIND(payload, size, "\"finish_reason\":\"abort\"") &&
           !(STARTS(payload, end, "event: ") &&
             (FIND(payload, size, "event: error\n") || FIND(payload, size, "event: response.failed\n")));
}

/* What may be sent of a read, and its size: `data` itself, or what was written to `changed_data`. NULL if any of it is
 * irregular; `counts` are then of no use. */
static const char *passable(const char *data, char *changed_data, int mode, size_t *size, Counts *counts) {
    const char *at = data, *end = at + *size, *payload_end;
    char *out = changed_data;
    int changed = 0;
    while (at < end) {
        const char *chunk = at, *payload = payload_of(at, end, &payload_end);
        if (!payload || (mode != MODE_CHUNKS && !is_regular(payload, payload_end))) return NULL;
        at = payload_end + 2;
        counts->chunks++;
        counts->events += events_with_text(payload, payload_end);
        counts->ids += listed_ids(payload, payload_end);
        counts->heard |= mode == MODE_CHUNKS || STARTS(payload, payload_end, "data") ||
                         FIND(payload, (size_t)(payload_end - payload), "\ndata") != NULL;
        if (mode < MODE_WITHOUT_IDS) continue;
        Cut cuts[MAX_CUTS];
        int count = mode == MODE_WITHOUT_IDS ? find_ids(payload, payload_end, cuts) : find_usage(payload, payload_end, cuts);
        if (count < 0) return NULL;
        changed |= count > 0;
        out = count ? write_chunk(out, payload, payload_end, cuts, count) : mempcpy(out, chunk, (size_t)(at - chunk));
    }
    if (!changed) return data;
    *size = (size_t)(out - changed_data);
    return changed_data;
}

/* Keep what came: all of it until Python takes it, or only the last bytes. 0 if there is no memory. */
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
    if (forwarding->mode == MODE_CHUNKS && wanted > 2 * forwarding->limit) {
        memmove(forwarding->kept, forwarding->kept + wanted - forwarding->limit, forwarding->limit);
        forwarding->kept_bytes = forwarding->limit;
    }
    return 1;
}

/* --- forwardings */

static void forwarding_halt(Forwarding *forwarding) {
    if (!forwarding->fast_path) return;
    epoll_ctl(forwarding->fast_path->sources, EPOLL_CTL_DEL, forwarding->source.fd, NULL);
    if (forwarding->source.ssl) openssl.set_read_ahead(forwarding->source.ssl, 0);
    Py_CLEAR(forwarding->fast_path);
    Py_DECREF(forwarding); /* the reference that epoll had */
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
    int heard = forwarding->counts.heard;
    forwarding->counts.heard = 0;
    return PyBool_FromLong(heard);
}

static PyObject *forwarding_counts(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    Counts *counts = &forwarding->counts;
    PyObject *values = Py_BuildValue("(KKKK)", counts->chunks, forwarding->sent_bytes, counts->events, counts->ids);
    counts->chunks = counts->events = counts->ids = forwarding->sent_bytes = 0;
    return values;
}

static int forwarding_traverse(Forwarding *forwarding, visitproc visit, void *arg) {
    Py_VISIT(forwarding->fast_path);
    Py_VISIT(forwarding->owner);
    Py_VISIT(forwarding->source.tls);
    Py_VISIT(forwarding->sink.tls);
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
    Py_CLEAR(forwarding->source.tls);
    Py_CLEAR(forwarding->sink.tls);
    free(forwarding->kept);
    Py_TYPE(forwarding)->tp_free((PyObject *)forwarding);
}

static PyMethodDef forwarding_methods[] = {
    {"stop", (PyCFunction)forwarding_stop, METH_NOARGS, "Let nothing more pass."},
    {"take", (PyCFunction)forwarding_take, METH_NOARGS, "What has come since the last call, as it came, with its framing."},
    {"pulse", (PyCFunction)forwarding_pulse, METH_NOARGS, "Whether a data event has passed since the last call."},
    {"counts", (PyCFunction)forwarding_counts, METH_NOARGS, "Since the last call: chunks, bytes sent, events that carry text, token ids."},
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

/* --- the fast path */

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "FastPath takes no arguments");
        return NULL;
    }
    FastPath *fast_path = (FastPath *)type->tp_alloc(type, 0);
    if (!fast_path) return NULL;
    fast_path->epoll = epoll_create1(EPOLL_CLOEXEC);
    fast_path->sources = epoll_create1(EPOLL_CLOEXEC);
    fast_path->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    fast_path->buffer = malloc(BUFFER_BYTES);
    fast_path->out = malloc(OUT_BYTES);
    struct epoll_event event = {.events = EPOLLIN};
    if (fast_path->epoll < 0 || fast_path->sources < 0 || fast_path->timer < 0 || !fast_path->buffer || !fast_path->out ||
        epoll_ctl(fast_path->epoll, EPOLL_CTL_ADD, fast_path->sources, &event) < 0 ||
        epoll_ctl(fast_path->epoll, EPOLL_CTL_ADD, fast_path->timer, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(fast_path);
        return NULL;
    }
    return (PyObject *)fast_path;
}

static void fast_path_dealloc(FastPath *fast_path) {
    if (fast_path->epoll >= 0) close(fast_path->epoll);
    if (fast_path->sources >= 0) close(fast_path->sources);
    if (fast_path->timer >= 0) close(fast_path->timer);
    free(fast_path->buffer);
    free(fast_path->out);
    Py_TYPE(fast_path)->tp_free((PyObject *)fast_path);
}

static PyObject *fast_path_fileno(FastPath *fast_path, PyObject *Py_UNUSED(none)) { return PyLong_FromLong(fast_path->epoll); }

static PyObject *fast_path_forwarding(FastPath *fast_path, PyObject *args) {
    int mode;
    Py_ssize_t limit;
    PyObject *source, *sink, *owner;
    if (!PyArg_ParseTuple(args, "OOnOi", &source, &sink, &limit, &owner, &mode)) return NULL;
    if (mode < MODE_CHUNKS || mode > MODE_WITHOUT_USAGE) return PyErr_Format(PyExc_ValueError, "no such mode: %d", mode);
    Forwarding *forwarding = PyObject_GC_New(Forwarding, &ForwardingType);
    if (!forwarding) return NULL;
    memset((char *)forwarding + sizeof(PyObject), 0, sizeof(Forwarding) - sizeof(PyObject));
    forwarding->mode = mode;
    forwarding->limit = (size_t)limit;
    forwarding->owner = Py_NewRef(owner);
    PyObject_GC_Track(forwarding);
    if (!open_end(source, &forwarding->source) || !open_end(sink, &forwarding->sink)) {
        Py_DECREF(forwarding);
        return NULL;
    }
    SSL *ssl = forwarding->source.ssl;
    struct epoll_event event = {.events = ssl ? TLS_SOURCE_EVENTS : SOURCE_EVENTS, .data.ptr = forwarding};
    if (epoll_ctl(fast_path->sources, EPOLL_CTL_ADD, forwarding->source.fd, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(forwarding);
        return NULL;
    }
    if (ssl) openssl.set_read_ahead(ssl, 1);
    forwarding->fast_path = (FastPath *)Py_NewRef(fast_path);
    Py_INCREF(forwarding); /* epoll's; dropped by forwarding_halt */
    return (PyObject *)forwarding;
}

/* Stop a forwarding and add to the list why; 0 on an exception. */
static int stop(PyObject *stopped, Forwarding *forwarding, int reason, const char *data, size_t size) {
    PyObject *item = Py_BuildValue("(Oiy#)", forwarding->owner, reason, data, (Py_ssize_t)size);
    forwarding_halt(forwarding);
    if (!item) return 0;
    int failed = PyList_Append(stopped, item);
    Py_DECREF(item);
    return !failed;
}

/* One read, and what becomes of it. */
typedef struct {
    Forwarding *forwarding;
    const char *data; /* to be sent; of a stop: to be returned */
    size_t size;
    int reason; /* MOVING, or why it stops */
    int then;   /* the same, once all is sent */
    int more;   /* there may be more to read, without another edge */
} Read;

/* Read what there is; `used` and `written` say how much of the buffers is taken. */
static Read read_one(FastPath *fast_path, Forwarding *forwarding, uint32_t events, size_t *used, size_t *written) {
    char *buffer = fast_path->buffer + *used, *out = fast_path->out + *written;
    size_t got;
    int then = MOVING, more = 0;
    if (forwarding->source.ssl) {
        got = read_records(forwarding->source.ssl, buffer, &then);
        if (!got) return (Read){forwarding, "", 0, then, MOVING, 0};
    } else {
        ssize_t received = recv(forwarding->source.fd, buffer, READ_BYTES, MSG_DONTWAIT);
        if (received < 0 && (errno == EAGAIN || errno == EINTR)) return (Read){forwarding, "", 0, MOVING, MOVING, errno == EINTR};
        if (received == 0) return (Read){forwarding, "", 0, STOP_ENDED, MOVING, 0};
        if (received < 0) return (Read){forwarding, "reset", 5, STOP_ENDED, MOVING, 0};
        got = (size_t)received;
        more = got == READ_BYTES || (events & ~EPOLLIN);
    }
    size_t size = got;
    *used += size;
    Counts counts = forwarding->counts;
    const char *data = passable(buffer, out, forwarding->mode, &size, &counts);
    if (!data) return (Read){forwarding, buffer, got, STOP_IRREGULAR, MOVING, 0};
    if (data == out) *written += size;
    if (!keep(forwarding, buffer, got)) return (Read){forwarding, "", 0, NO_MEMORY, MOVING, 0};
    forwarding->counts = counts;
    forwarding->sent_bytes += size;
    return (Read){forwarding, data, size, MOVING, then, more};
}

static void send_one(Read *read) {
    if (read->reason != MOVING || !read->size) return;
    Forwarding *forwarding = read->forwarding;
    size_t sent;
    if (forwarding->sink.ssl) {
        sent = write_records(forwarding->sink.ssl, read->data, read->size);
    } else {
        ssize_t taken = send(forwarding->sink.fd, read->data, read->size, MSG_DONTWAIT | MSG_NOSIGNAL);
        sent = taken < 0 ? 0 : (size_t)taken; /* whatever the reason, the event loop will meet it as well */
    }
    read->data += sent;
    read->size -= sent;
    if (read->size) {
        read->reason = STOP_UNSENT;
    } else if (read->then != MOVING) {
        read->reason = read->then;
    } else if (forwarding->mode != MODE_CHUNKS && forwarding->kept_bytes > forwarding->limit) {
        read->reason = STOP_FULL;
    }
}

static void arm_again(FastPath *fast_path, Forwarding *forwarding) {
    struct epoll_event event = {.events = SOURCE_EVENTS, .data.ptr = forwarding};
    epoll_ctl(fast_path->sources, EPOLL_CTL_MOD, forwarding->source.fd, &event); /* it is there: nothing can go wrong */
}

/* Send what was read, then add to the list what has stopped; 0 on an exception. First all reads of a batch, then all sends:
 * the caches hold one path through the kernel at a time, and a client's process is woken once for several chunks. Nothing of
 * Python runs between a read and its send, so no forwarding is stopped, and no socket closed, in between. */
static int send_all(FastPath *fast_path, Read *reads, int count, PyObject *stopped) {
    for (int i = 0; i < count; i++) send_one(&reads[i]);
    for (int i = 0; i < count; i++) {
        if (reads[i].reason == MOVING && reads[i].more) arm_again(fast_path, reads[i].forwarding);
    }
    for (int i = 0; i < count; i++) {
        Read *read = &reads[i];
        if (read->reason == MOVING || !read->forwarding->fast_path) continue;
        if (read->reason == NO_MEMORY) {
            PyErr_NoMemory();
            return 0;
        }
        if (!stop(stopped, read->forwarding, read->reason, read->data, read->size)) return 0;
    }
    return 1;
}

/* One read of each of the next forwardings that have something; how many, or -1 on an exception. */
static int move_batch(FastPath *fast_path, PyObject *stopped) {
    struct epoll_event events[BATCH];
    Read reads[BATCH];
    int count = epoll_wait(fast_path->sources, events, BATCH, 0);
    if (count < 0) {
        if (errno == EINTR) return 0;
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    /* Adding to the list runs Python's memory management, and what that runs may stop forwardings: each stays ours until the
     * end. */
    for (int i = 0; i < count; i++) Py_INCREF((PyObject *)events[i].data.ptr);
    int sound = 1, pending = 0;
    size_t used = 0, written = 0;
    for (int i = 0; i < count && sound; i++) {
        Forwarding *forwarding = events[i].data.ptr;
        if (forwarding->fast_path) reads[pending++] = read_one(fast_path, forwarding, events[i].events, &used, &written);
        if (i + 1 < count && used <= BUFFER_BYTES - READ_BYTES) continue;
        sound = send_all(fast_path, reads, pending, stopped);
        pending = 0;
        used = written = 0;
    }
    for (int i = 0; i < count; i++) Py_DECREF((PyObject *)events[i].data.ptr);
    return sound ? count : -1;
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Watch the timer instead of the sources, or the sources again. A failure leaves both as they are, which is slower at worst. */
static void set_pace(FastPath *fast_path, int paced) {
    if (fast_path->paced == paced) return;
    struct itimerspec period = {0};
    period.it_value.tv_nsec = period.it_interval.tv_nsec = paced ? PACE_NS : 0;
    struct epoll_event event = {.events = paced ? 0 : EPOLLIN};
    if (timerfd_settime(fast_path->timer, 0, &period, NULL) < 0) return;
    if (epoll_ctl(fast_path->epoll, EPOLL_CTL_MOD, fast_path->sources, &event) < 0) return;
    fast_path->paced = paced;
}

/* epoll returns what is ready in turn, so whom the budget leaves out is first next time. */
static PyObject *fast_path_run(FastPath *fast_path, PyObject *Py_UNUSED(none)) {
    PyObject *stopped = PyList_New(0);
    if (!stopped) return NULL;
    unsigned long long ticks;
    if (fast_path->paced && read(fast_path->timer, &ticks, sizeof(ticks)) < 0 && errno != EAGAIN) set_pace(fast_path, 0);
    long long began = now_ns();
    int count, moved = 0;
    do moved += (count = move_batch(fast_path, stopped)) > 0 ? count : 0;
    while (count == BATCH && now_ns() < began + BUDGET_NS);
    int close_together = fast_path->paced ? moved >= PACE_CHUNKS : began - fast_path->ran_ns < CLOSE_NS;
    set_pace(fast_path, close_together && count < BATCH); /* what the budget left out does not wait for the timer */
    fast_path->ran_ns = began;
    if (count < 0) Py_CLEAR(stopped);
    return stopped;
}

static PyMethodDef fast_path_methods[] = {
    {"fileno", (PyCFunction)fast_path_fileno, METH_NOARGS, "Readable when a forwarding has something to move."},
    {"forwarding", (PyCFunction)fast_path_forwarding, METH_VARARGS,
     "Open a forwarding: (source, sink, limit of kept bytes, owner, mode). A side is a descriptor or a `_ssl._SSLSocket`."},
    {"run", (PyCFunction)fast_path_run, METH_NOARGS, 
     "Move what there is, for about a millisecond. Returns [(owner, reason, data)] of the forwardings that have stopped."},
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

static PyMethodDef module_methods[] = {
    {"learn_tls", (PyCFunction)learn_tls, METH_VARARGS,
     "Find OpenSSL: (file of `_ssl`, a sample `_ssl._SSLSocket`, its `ssl.SSLSocket`, its fd). Returns why TLS is left to Python, or \"\"."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "lb.proxy._fast_path", .m_size = -1, .m_methods = module_methods};

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
