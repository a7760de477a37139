/* Moves the chunks of running streams from targets to clients without waking Python for each of them.
 *
 * A forwarding is a pair of connections and the bytes that went through. A connection is a socket, or one of TLS, whose records
 * OpenSSL reads and writes at the socket (lb/http/tls_transport.py). What passes here is only the regular case: a read that
 * is one or more whole HTTP chunks, each of whole server-sent events, in which the engine neither ends the stream nor gives
 * it up, and that the client takes at once. Fields that the client has not asked for are removed where they have the one
 * shape that engines write. What came is kept packed (_event_delta.h). Anything else stops the forwarding and goes back to Python
 * as the bytes that were read, so that every decision is made in one place (lb/proxy/forwarded_relay.py). lb/proxy/fast_path.py says
 * what modes and reasons mean; lb/stream/stream_merge.py removes the same fields, and lb/stream/token_usage.py counts the same tokens.
 *
 * Sockets are non-blocking and belong to the event loop; a forwarding must be stopped before either is closed. Python reads
 * nothing of the source meanwhile, and writes nothing to the sink; of TLS, it neither reads nor writes either side, as a connection of
 * OpenSSL is one thread's at a time.
 *
 * Chunks are moved by movers: one on the event loop (`run`), or several, each a thread that needs nothing of Python. A forwarding
 * belongs to one mover. The mover's lock is held while it moves a batch, so under the lock all that was read is sent, or
 * its forwarding stopped. What has stopped waits in a list for `run`, or until Python itself stops the forwarding. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "_packed_events.h"

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
#define MOST_MOVERS 64

enum { STOP_IRREGULAR = 0, STOP_UNSENT = 1, STOP_FULL = 2, STOP_ENDED = 3, STOP_CLIENT = 4 };
enum { MOVING = -1 }; /* in the place of a reason to stop */
enum { MODE_CHUNKS = 0, MODE_EVENTS = 1, MODE_WITHOUT_IDS = 2, MODE_WITHOUT_USAGE = 3 };

typedef struct Forwarding Forwarding;
typedef struct FastPath FastPath;

typedef struct {
    Forwarding *first, *last;
} List;

typedef struct {
    FastPath *fast_path;
    int sources; /* an epoll, of what forwardings read from, and of the clients that have TLS */
    long long ran_ns;
    int paced;
    char *buffer, *out;
    int forwardings;      /* how many it has; atomic */
    pthread_mutex_t lock; /* held while a batch is moved */
    int awaited;          /* whether Python waits for the lock; atomic */
    List stopped;         /* in the batch */
    pthread_t thread;
} Mover;

struct FastPath {
    PyObject_HEAD
    int epoll;   /* what the event loop watches: of the only mover, `sources` while chunks are rare, `timer` while they are paced */
    int timer;
    int reports; /* with threads it is this, an eventfd: something has stopped */
    int quit;    /* an eventfd that ends the threads */
    Mover *movers;
    int count, threads; /* movers; those of them that run in a thread */
    pthread_mutex_t lock; /* of the list, and taken after that of a mover */
    List stopped;
};

typedef struct {
    unsigned long long chunks, events, ids;
    int heard; /* atomic */
} Counts;

typedef struct ssl_st SSL;

/* One side of a forwarding. */
typedef struct {
    int fd;
    SSL *ssl;      /* NULL without TLS */
    PyObject *tls; /* whose it is; NULL as well */
} End;

struct Forwarding {
    PyObject_HEAD
    FastPath *fast_path; /* NULL once Python knows that it has stopped */
    PyObject *owner;     /* gets the reason why it has stopped */
    Mover *mover;
    End source, sink;
    int mode;
    EventDelta packed; /* what came, with its framing; of chunks that need not be events, the last bytes are in `kept` */
    char *kept;
    size_t kept_bytes, kept_room, limit;
    unsigned long long sent_bytes;
    Counts counts;
    int reason; /* why the mover has stopped it, or MOVING; and what was read or not sent */
    char *rest;
    size_t rest_bytes;
    Forwarding *next; /* in a list of those that have stopped */
};

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
    if (forwarding->mode != MODE_CHUNKS) return delta_add(&forwarding->packed, data, size);
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
    if (wanted > 2 * forwarding->limit) {
        memmove(forwarding->kept, forwarding->kept + wanted - forwarding->limit, forwarding->limit);
        forwarding->kept_bytes = forwarding->limit;
    }
    return 1;
}

/* --- movers */

/* For Python: a batch takes less than a millisecond. */
static void lock_mover(Mover *mover) {
    if (!pthread_mutex_trylock(&mover->lock)) return;
    __atomic_add_fetch(&mover->awaited, 1, __ATOMIC_RELAXED);
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&mover->lock);
    Py_END_ALLOW_THREADS
    __atomic_sub_fetch(&mover->awaited, 1, __ATOMIC_RELAXED);
}

static void unlock_mover(Mover *mover) { pthread_mutex_unlock(&mover->lock); }

/* Under the lock of the mover. */
static void leave_mover(Forwarding *forwarding) {
    Mover *mover = forwarding->mover;
    epoll_ctl(mover->sources, EPOLL_CTL_DEL, forwarding->source.fd, NULL);
    if (forwarding->sink.ssl) epoll_ctl(mover->sources, EPOLL_CTL_DEL, forwarding->sink.fd, NULL);
    if (forwarding->source.ssl) openssl.set_read_ahead(forwarding->source.ssl, 0);
    __atomic_sub_fetch(&mover->forwardings, 1, __ATOMIC_RELAXED);
}

static void append(List *list, Forwarding *first, Forwarding *last) {
    if (list->last) list->last->next = first;
    else list->first = first;
    list->last = last;
}

/* The mover gives a forwarding up; the list has epoll's reference from now on. */
static void stop(Forwarding *forwarding, int reason, const char *data, size_t size) {
    Mover *mover = forwarding->mover;
    leave_mover(forwarding);
    if (size) {
        forwarding->rest = malloc(size);
        if (!forwarding->rest) abort(); /* a client would miss these bytes and not know it */
        memcpy(forwarding->rest, data, size);
        forwarding->rest_bytes = size;
    }
    forwarding->reason = reason;
    append(&mover->stopped, forwarding, forwarding);
}

/* Tell Python what has stopped. Until then all forwardings of the batch exist: it may let go of them at once. */
static void report(Mover *mover) {
    FastPath *fast_path = mover->fast_path;
    if (!mover->stopped.first) return;
    pthread_mutex_lock(&fast_path->lock);
    uint64_t one = 1;
    /* It cannot hold as much as it would take to fail. */
    if (!fast_path->stopped.first && fast_path->reports >= 0 && write(fast_path->reports, &one, sizeof(one)) < 0) abort();
    append(&fast_path->stopped, mover->stopped.first, mover->stopped.last);
    pthread_mutex_unlock(&fast_path->lock);
    mover->stopped = (List){NULL, NULL};
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
static Read read_one(Mover *mover, Forwarding *forwarding, uint32_t events, size_t *used, size_t *written) {
    char *buffer = mover->buffer + *used, *out = mover->out + *written;
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
    counts.heard = 0;
    const char *data = passable(buffer, out, forwarding->mode, &size, &counts);
    if (!data) return (Read){forwarding, buffer, got, STOP_IRREGULAR, MOVING, 0};
    if (data == out) *written += size;
    /* Without memory the stream breaks here, and may go on from elsewhere. */
    if (!keep(forwarding, buffer, got)) return (Read){forwarding, "", 0, STOP_ENDED, MOVING, 0};
    if (counts.heard) __atomic_store_n(&forwarding->counts.heard, 1, __ATOMIC_RELAXED);
    forwarding->counts.chunks = counts.chunks;
    forwarding->counts.events = counts.events;
    forwarding->counts.ids = counts.ids;
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
    } else if (forwarding->packed.raw_bytes > forwarding->limit) {
        read->reason = STOP_FULL;
    }
}

static void arm_again(Forwarding *forwarding) {
    struct epoll_event event = {.events = SOURCE_EVENTS, .data.ptr = forwarding};
    epoll_ctl(forwarding->mover->sources, EPOLL_CTL_MOD, forwarding->source.fd, &event); /* it is there: nothing can go wrong */
}

/* Send what was read, then see what has stopped. First all reads of a batch, then all sends: the caches hold one path through
 * the kernel at a time, and a client's process is woken once for several chunks. */
static void send_all(Read *reads, int count) {
    for (int i = 0; i < count; i++) send_one(&reads[i]);
    for (int i = 0; i < count; i++) {
        Read *read = &reads[i];
        if (read->reason != MOVING) {
            stop(read->forwarding, read->reason, read->data, read->size);
        } else if (read->more) {
            arm_again(read->forwarding);
        }
    }
}

/* Which side of a forwarding an event is of. */
#define IS_SINK(pointer) ((uintptr_t)(pointer) & 1)
#define SINK_OF(forwarding) ((void *)((uintptr_t)(forwarding) | 1))
#define FORWARDING_OF(pointer) ((Forwarding *)((uintptr_t)(pointer) & ~(uintptr_t)1))

/* One read of each of the next forwardings that have something; how many. Under the lock. */
static int move_batch(Mover *mover) {
    struct epoll_event events[BATCH];
    Read reads[BATCH];
    int count = epoll_wait(mover->sources, events, BATCH, 0), pending = 0;
    size_t used = 0, written = 0;
    for (int i = 0; i < count; i++) {
        void *of = events[i].data.ptr;
        if (!of || IS_SINK(of)) continue;
        reads[pending++] = read_one(mover, of, events[i].events, &used, &written);
        if (used <= BUFFER_BYTES - READ_BYTES) continue;
        send_all(reads, pending);
        pending = 0;
        used = written = 0;
    }
    send_all(reads, pending);
    for (int i = 0; i < count; i++) {
        void *of = events[i].data.ptr;
        if (IS_SINK(of) && FORWARDING_OF(of)->reason == MOVING) stop(FORWARDING_OF(of), STOP_CLIENT, "", 0);
    }
    report(mover);
    return count;
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Whether the next chunks had better be moved together, after a turn that began at that time and has moved so many. */
static int should_pace(Mover *mover, long long began_ns, int moved, int count) {
    int close_together = mover->paced ? moved >= PACE_CHUNKS : began_ns - mover->ran_ns < CLOSE_NS;
    mover->ran_ns = began_ns;
    return close_together && count < BATCH; /* what a budget has left out does not wait */
}

static int is_quitting(Mover *mover) { return __atomic_load_n(&mover->fast_path->threads, __ATOMIC_ACQUIRE) == 0; }

static void *mover_thread(void *given) {
    Mover *mover = given;
    struct pollfd sources = {.fd = mover->sources, .events = POLLIN};
    pthread_setname_np(pthread_self(), "mover"); /* as `top -H` shows it */
    while (poll(&sources, 1, -1) >= 0 || errno == EINTR) {
        long long began = now_ns();
        int count, moved = 0;
        do {
            if (is_quitting(mover)) return NULL;
            while (__atomic_load_n(&mover->awaited, __ATOMIC_RELAXED)) sched_yield(); /* locks are not fair */
            pthread_mutex_lock(&mover->lock);
            moved += (count = move_batch(mover)) > 0 ? count : 0;
            pthread_mutex_unlock(&mover->lock);
        } while (count == BATCH);
        mover->paced = should_pace(mover, began, moved, count);
        if (!mover->paced) continue;
        long long next = began + PACE_NS;
        struct timespec at = {.tv_sec = next / 1000000000, .tv_nsec = next % 1000000000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
    }
    return NULL;
}

/* --- forwardings */

/* Python knows that it has stopped. */
static void forget(Forwarding *forwarding) {
    Py_CLEAR(forwarding->fast_path);
    forwarding->reason = STOP_ENDED;
}

static PyObject *forwarding_stop(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    if (!forwarding->fast_path) Py_RETURN_NONE;
    lock_mover(forwarding->mover);
    int reason = forwarding->reason;
    if (reason == MOVING) leave_mover(forwarding);
    unlock_mover(forwarding->mover);
    forget(forwarding);
    if (reason == MOVING) {
        Py_DECREF(forwarding); /* the reference that epoll had; the caller has another one */
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(iy#)", reason, forwarding->rest ? forwarding->rest : "", (Py_ssize_t)forwarding->rest_bytes);
}

/* What is kept from now on is another stream of bytes. */
static EventDelta taken_from(Forwarding *forwarding, char **kept, size_t *kept_bytes) {
    int runs = forwarding->fast_path != NULL;
    if (runs) lock_mover(forwarding->mover);
    EventDelta packed = forwarding->packed;
    *kept = forwarding->kept;
    *kept_bytes = forwarding->kept_bytes;
    forwarding->packed = (EventDelta){0};
    forwarding->kept = NULL;
    forwarding->kept_bytes = forwarding->kept_room = 0;
    if (runs) unlock_mover(forwarding->mover);
    return packed;
}

static PyObject *forwarding_take(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    char *kept;
    size_t kept_bytes;
    EventDelta packed = taken_from(forwarding, &kept, &kept_bytes);
    PyObject *taken = packed.first ? unpacked_all(&packed) : PyBytes_FromStringAndSize(kept, (Py_ssize_t)kept_bytes);
    delta_free(&packed);
    free(kept);
    return taken;
}

static PyObject *forwarding_take_packed(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    char *kept; /* there is none of what is packed */
    size_t kept_bytes;
    EventDelta packed = taken_from(forwarding, &kept, &kept_bytes);
    free(kept);
    if (!packed.first) Py_RETURN_NONE;
    PyObject *taken = packed_events_of(&packed);
    delta_free(&packed);
    return taken;
}

/* Without the lock: it is asked of all streams each second. */
static PyObject *forwarding_held_bytes(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    return PyLong_FromSize_t(__atomic_load_n(&forwarding->packed.held_bytes, __ATOMIC_RELAXED) +
                             __atomic_load_n(&forwarding->kept_room, __ATOMIC_RELAXED));
}

static PyObject *forwarding_pulse(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    return PyBool_FromLong(__atomic_exchange_n(&forwarding->counts.heard, 0, __ATOMIC_RELAXED));
}

static PyObject *forwarding_counts(Forwarding *forwarding, PyObject *Py_UNUSED(none)) {
    int runs = forwarding->fast_path != NULL;
    if (runs) lock_mover(forwarding->mover);
    Counts *counts = &forwarding->counts, found = *counts;
    unsigned long long sent_bytes = forwarding->sent_bytes;
    counts->chunks = counts->events = counts->ids = forwarding->sent_bytes = 0;
    if (runs) unlock_mover(forwarding->mover);
    return Py_BuildValue("(KKKK)", found.chunks, sent_bytes, found.events, found.ids);
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
    delta_free(&forwarding->packed);
    free(forwarding->rest);
    Py_TYPE(forwarding)->tp_free((PyObject *)forwarding);
}

static PyMethodDef forwarding_methods[] = {
    {"stop", (PyCFunction)forwarding_stop, METH_NOARGS, "Let nothing more pass. Returns (reason, data) of one that had stopped by itself, and was not reported."},
    {"take", (PyCFunction)forwarding_take, METH_NOARGS, "What has come since the last call, as it came, with its framing. Of the first mode: the last of it."},
    {"take_packed", (PyCFunction)forwarding_take_packed, METH_NOARGS,
     "What has come since the last call, with its framing, as PackedEvents; None if nothing is packed."},
    {"held_bytes", (PyCFunction)forwarding_held_bytes, METH_NOARGS, "How many bytes of memory hold what can be taken."},
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

static int open_mover(FastPath *fast_path, Mover *mover) {
    mover->fast_path = fast_path;
    mover->sources = epoll_create1(EPOLL_CLOEXEC);
    mover->buffer = malloc(BUFFER_BYTES);
    mover->out = malloc(OUT_BYTES);
    return !pthread_mutex_init(&mover->lock, NULL) && mover->sources >= 0 && mover->buffer && mover->out;
}

static int watch(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) >= 0;
}

static void end_threads(FastPath *fast_path) {
    int threads = fast_path->threads;
    uint64_t one = 1;
    if (!threads) return;
    __atomic_store_n(&fast_path->threads, 0, __ATOMIC_RELEASE);
    while (write(fast_path->quit, &one, sizeof(one)) < 0 && errno == EINTR) {}
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < threads; i++) pthread_join(fast_path->movers[i].thread, NULL);
    Py_END_ALLOW_THREADS
}

/* Signals are for the thread of Python. */
static int start_threads(FastPath *fast_path) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0, wanted = fast_path->count;
    fast_path->threads = wanted;
    for (int i = 0; i < wanted && !failed; i++) {
        failed = pthread_create(&fast_path->movers[i].thread, NULL, mover_thread, &fast_path->movers[i]);
        if (failed) fast_path->threads = i;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = failed;
    return !failed;
}

static int open_all(FastPath *fast_path, int threads) {
    fast_path->epoll = fast_path->timer = fast_path->reports = fast_path->quit = -1;
    fast_path->count = threads ? threads : 1;
    fast_path->movers = calloc((size_t)fast_path->count, sizeof(Mover));
    if (!fast_path->movers) return 0;
    for (int i = 0; i < fast_path->count; i++) fast_path->movers[i].sources = -1;
    for (int i = 0; i < fast_path->count; i++) {
        if (!open_mover(fast_path, &fast_path->movers[i])) return 0;
    }
    if (pthread_mutex_init(&fast_path->lock, NULL)) return 0;
    if (!threads) {
        fast_path->epoll = epoll_create1(EPOLL_CLOEXEC);
        fast_path->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
        return fast_path->epoll >= 0 && fast_path->timer >= 0 && watch(fast_path->epoll, fast_path->movers->sources) &&
               watch(fast_path->epoll, fast_path->timer);
    }
    fast_path->reports = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    fast_path->quit = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fast_path->reports < 0 || fast_path->quit < 0) return 0;
    for (int i = 0; i < threads; i++) {
        if (!watch(fast_path->movers[i].sources, fast_path->quit)) return 0;
    }
    return start_threads(fast_path);
}

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int threads = 0;
    if (!PyArg_ParseTuple(args, "|i", &threads) || (kwargs && PyDict_GET_SIZE(kwargs))) return NULL;
    if (threads < 0 || threads > MOST_MOVERS) return PyErr_Format(PyExc_ValueError, "not 0 to %d threads: %d", MOST_MOVERS, threads);
    FastPath *fast_path = (FastPath *)type->tp_alloc(type, 0);
    if (!fast_path) return NULL;
    if (!open_all(fast_path, threads)) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(fast_path);
        return NULL;
    }
    return (PyObject *)fast_path;
}

static void fast_path_dealloc(FastPath *fast_path) {
    end_threads(fast_path);
    const int descriptors[] = {fast_path->epoll, fast_path->timer, fast_path->reports, fast_path->quit};
    for (size_t i = 0; i < sizeof(descriptors) / sizeof(*descriptors); i++) {
        if (descriptors[i] >= 0) close(descriptors[i]);
    }
    for (int i = 0; fast_path->movers && i < fast_path->count; i++) {
        if (fast_path->movers[i].sources >= 0) close(fast_path->movers[i].sources);
        free(fast_path->movers[i].buffer);
        free(fast_path->movers[i].out);
    }
    free(fast_path->movers);
    Py_TYPE(fast_path)->tp_free((PyObject *)fast_path);
}

static PyObject *fast_path_close(FastPath *fast_path, PyObject *Py_UNUSED(none)) {
    end_threads(fast_path);
    Py_RETURN_NONE;
}

static PyObject *fast_path_fileno(FastPath *fast_path, PyObject *Py_UNUSED(none)) {
    return PyLong_FromLong(fast_path->reports >= 0 ? fast_path->reports : fast_path->epoll);
}

static Mover *idlest(FastPath *fast_path) {
    Mover *found = fast_path->movers;
    for (Mover *mover = found; mover < fast_path->movers + fast_path->count; mover++) {
        if (__atomic_load_n(&mover->forwardings, __ATOMIC_RELAXED) < __atomic_load_n(&found->forwardings, __ATOMIC_RELAXED)) found = mover;
    }
    return found;
}

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
    forwarding->reason = MOVING;
    PyObject_GC_Track(forwarding);
    if (!open_end(source, &forwarding->source) || !open_end(sink, &forwarding->sink)) {
        Py_DECREF(forwarding);
        return NULL;
    }
    Mover *mover = forwarding->mover = idlest(fast_path);
    SSL *ssl = forwarding->source.ssl;
    struct epoll_event source_event = {.events = ssl ? TLS_SOURCE_EVENTS : SOURCE_EVENTS, .data.ptr = forwarding};
    struct epoll_event sink_event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = SINK_OF(forwarding)};
    lock_mover(mover); /* it must not have half of a forwarding */
    int failed = forwarding->sink.ssl && epoll_ctl(mover->sources, EPOLL_CTL_ADD, forwarding->sink.fd, &sink_event) < 0;
    if (!failed && epoll_ctl(mover->sources, EPOLL_CTL_ADD, forwarding->source.fd, &source_event) < 0) {
        failed = 1;
        if (forwarding->sink.ssl) epoll_ctl(mover->sources, EPOLL_CTL_DEL, forwarding->sink.fd, NULL);
    }
    if (!failed) {
        if (ssl) openssl.set_read_ahead(ssl, 1);
        __atomic_add_fetch(&mover->forwardings, 1, __ATOMIC_RELAXED);
        forwarding->fast_path = (FastPath *)Py_NewRef(fast_path);
        Py_INCREF(forwarding); /* epoll's, and then that of the list of those that have stopped */
    }
    unlock_mover(mover);
    if (failed) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(forwarding);
        return NULL;
    }
    return (PyObject *)forwarding;
}

/* Watch the timer instead of the sources, or the sources again. A failure leaves both as they are, which is slower at worst. */
static void set_pace(FastPath *fast_path, int paced) {
    Mover *mover = fast_path->movers;
    if (mover->paced == paced) return;
    struct itimerspec period = {0};
    period.it_value.tv_nsec = period.it_interval.tv_nsec = paced ? PACE_NS : 0;
    struct epoll_event event = {.events = paced ? 0 : EPOLLIN};
    if (timerfd_settime(fast_path->timer, 0, &period, NULL) < 0) return;
    if (epoll_ctl(fast_path->epoll, EPOLL_CTL_MOD, mover->sources, &event) < 0) return;
    mover->paced = paced;
}

/* epoll returns what is ready in turn, so whom the budget leaves out is first next time. */
static void move_here(FastPath *fast_path) {
    Mover *mover = fast_path->movers;
    unsigned long long ticks;
    if (mover->paced && read(fast_path->timer, &ticks, sizeof(ticks)) < 0 && errno != EAGAIN) set_pace(fast_path, 0);
    long long began = now_ns();
    int count, moved = 0;
    do moved += (count = move_batch(mover)) > 0 ? count : 0;
    while (count == BATCH && now_ns() < began + BUDGET_NS);
    set_pace(fast_path, should_pace(mover, began, moved, count));
}

static PyObject *fast_path_run(FastPath *fast_path, PyObject *Py_UNUSED(none)) {
    unsigned long long reports;
    if (fast_path->reports < 0) move_here(fast_path);
    else if (read(fast_path->reports, &reports, sizeof(reports)) < 0) errno = 0; /* another call has seen to them */
    PyObject *stopped = PyList_New(0);
    if (!stopped) return NULL;
    pthread_mutex_lock(&fast_path->lock);
    Forwarding *next = fast_path->stopped.first;
    fast_path->stopped = (List){NULL, NULL};
    pthread_mutex_unlock(&fast_path->lock);
    int failed = 0;
    while (next) {
        Forwarding *forwarding = next;
        next = forwarding->next;
        if (forwarding->fast_path) { /* else Python has stopped it, and has its report */
            PyObject *report = Py_BuildValue("(Oiy#)", forwarding->owner, forwarding->reason, forwarding->rest ? forwarding->rest : "",
                                             (Py_ssize_t)forwarding->rest_bytes);
            forget(forwarding);
            failed |= !report || PyList_Append(stopped, report) < 0;
            Py_XDECREF(report);
        }
        Py_DECREF(forwarding);
    }
    if (failed) Py_CLEAR(stopped);
    return stopped;
}

static PyMethodDef fast_path_methods[] = {
    {"close", (PyCFunction)fast_path_close, METH_NOARGS, "End the threads: nothing moves any more."},
    {"fileno", (PyCFunction)fast_path_fileno, METH_NOARGS, "Readable when `run` has something to do."},
    {"forwarding", (PyCFunction)fast_path_forwarding, METH_VARARGS,
     "Open a forwarding: (source, sink, limit of kept bytes, owner, mode). A side is a descriptor or a `_ssl._SSLSocket`."},
    {"run", (PyCFunction)fast_path_run, METH_NOARGS,
     "Without threads, move what there is, for about a millisecond. Returns [(owner, reason, data)] of the forwardings that have stopped."},
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
    if (PyType_Ready(&FastPathType) < 0 || PyType_Ready(&ForwardingType) < 0 || PyType_Ready(&PackedEventsType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    if (PyModule_AddObjectRef(made, "FastPath", (PyObject *)&FastPathType) < 0 ||
        PyModule_AddObjectRef(made, "PackedEvents", (PyObject *)&PackedEventsType) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
