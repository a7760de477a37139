/* TLS in front of the replica's server, for tls_proxy.py: the same relay, with no Python for each byte that passes.
 *
 * A library for `ctypes` that knows nothing of Python, so that it fits every version of it. OpenSSL is that of the machine, found
 * when the library is used. What is not there (another architecture, no OpenSSL, an older C library) leaves the relay to Python.
 *
 * Each thread has an epoll and its own pairs of connections; the first one accepts and hands connections out in turn. Nothing is read from
 * a side while bytes wait for the other, so a pair takes memory for one read at most. Requests and responses are looked at as by
 * `TrafficWatch` in tls_proxy.py, which says why; what is seen goes to Python as letters in a pipe. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define READ_BYTES (64 * 1024)
#define HEAD_BYTES 4096 /* of a request, in which the user agent is looked for */
#define TURNS 16        /* reads of one side, before the others have theirs */
#define BATCH 64
#define PATIENCE_MS 10000 /* for a connection to the server, and for a handshake */
#define FLUSH_MS 60000    /* for what waits for a side when the other has ended */
#define RETRY_MS 50       /* after an accept that found no descriptor */
#define NOTE_EVERY_MS 20000
#define MOST_THREADS 16

enum { CONNECTING, HANDSHAKING, MOVING, ENDING, GONE };
enum { BLOCKED = 0, ENDED = -1, FAILED = -2 };       /* in the place of a number of bytes */
enum { UNKNOWN = -1, FOREIGN = 0, OURS = 1 };        /* a request; what is no request head is unknown */
enum { NO_HEAD = -1, UNSUCCESSFUL = 0, SUCCESS = 1 }; /* a response */

/* --- OpenSSL: functions that are the same in 1.1.1 and in all of 3; its headers are not needed to build this */

typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
enum { WANT_READ = 2, WANT_WRITE = 3, ZERO_RETURN = 6 };
enum { FILE_PEM = 1, CTRL_MODE = 33, CTRL_MIN_VERSION = 123, TLS_1_2 = 0x0303 };
enum { MODES = 0x01 | 0x02 | 0x10 }; /* partial writes, from a buffer that moves; idle connections give their buffers back */
#define NO_RENEGOTIATION (1UL << 30)

static struct {
    SSL_CTX *context;
    const void *(*TLS_server_method)(void);
    SSL_CTX *(*SSL_CTX_new)(const void *);
    long (*SSL_CTX_ctrl)(SSL_CTX *, int, long, void *);
    unsigned long (*SSL_CTX_set_options)(SSL_CTX *, unsigned long);
    int (*SSL_CTX_set_num_tickets)(SSL_CTX *, size_t);
    int (*SSL_CTX_use_certificate_chain_file)(SSL_CTX *, const char *);
    int (*SSL_CTX_use_PrivateKey_file)(SSL_CTX *, const char *, int);
    SSL *(*SSL_new)(SSL_CTX *);
    void (*SSL_free)(SSL *);
    int (*SSL_set_fd)(SSL *, int);
    int (*SSL_accept)(SSL *);
    int (*SSL_read)(SSL *, void *, int);
    int (*SSL_write)(SSL *, const void *, int);
    int (*SSL_pending)(const SSL *);
    int (*SSL_get_error)(const SSL *, int);
    int (*SSL_shutdown)(SSL *);
    void (*ERR_clear_error)(void);
} tls;

static int found_functions(void *library)
{
#define FIND(name) \
    if (!(*(void **)&tls.name = dlsym(library, #name))) return 0
    FIND(TLS_server_method);
    FIND(SSL_CTX_new);
    FIND(SSL_CTX_ctrl);
    FIND(SSL_CTX_set_options);
    FIND(SSL_CTX_set_num_tickets);
    FIND(SSL_CTX_use_certificate_chain_file);
    FIND(SSL_CTX_use_PrivateKey_file);
    FIND(SSL_new);
    FIND(SSL_free);
    FIND(SSL_set_fd);
    FIND(SSL_accept);
    FIND(SSL_read);
    FIND(SSL_write);
    FIND(SSL_pending);
    FIND(SSL_get_error);
    FIND(SSL_shutdown);
    FIND(ERR_clear_error); /* of libcrypto, which libssl needs */
#undef FIND
    return 1;
}

/* Returns why there can be no relay, or NULL. `pem` has the certificate and its key. */
const char *tls_relay_prepare(const char *pem)
{
    void *library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("libssl.so.1.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return "this machine has no OpenSSL 3 or 1.1.1 (libssl.so)";
    if (!found_functions(library)) return "the OpenSSL of this machine lacks a function";
    if (!(tls.context = tls.SSL_CTX_new(tls.TLS_server_method()))) return "OpenSSL cannot be started";
    tls.SSL_CTX_ctrl(tls.context, CTRL_MODE, MODES, NULL);
    tls.SSL_CTX_ctrl(tls.context, CTRL_MIN_VERSION, TLS_1_2, NULL);
    tls.SSL_CTX_set_options(tls.context, NO_RENEGOTIATION);
    tls.SSL_CTX_set_num_tickets(tls.context, 0); /* load balancers resume no session */
    if (tls.SSL_CTX_use_certificate_chain_file(tls.context, pem) != 1 ||
        tls.SSL_CTX_use_PrivateKey_file(tls.context, pem, FILE_PEM) != 1)
        return "OpenSSL does not take the certificate";
    return NULL;
}

/* --- What passes */

static size_t lowered(char *into, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at++) into[at] = from[at] >= 'A' && from[at] <= 'Z' ? from[at] | 0x20 : from[at];
    return bytes;
}

/* Returns whether a segment begins with the head of a request, and of one that is our own. */
int tls_relay_request(const char *data, size_t bytes)
{
    static const char version[] = " HTTP/1.";
    static const char *const agents[] = {"\r\nuser-agent: skyserve\r\n", "\r\nuser-agent: skyserve-lb\r\n"};
    char fields[HEAD_BYTES];
    if (bytes > HEAD_BYTES) bytes = HEAD_BYTES;
    const char *end = memmem(data, bytes, "\r\n", 2);
    size_t line = end ? (size_t)(end - data) : bytes;
    if (line < sizeof version || memcmp(data + line - sizeof version, version, sizeof version - 1) != 0) return UNKNOWN;
    if (data[line - 1] != '0' && data[line - 1] != '1') return UNKNOWN;
    size_t rest = lowered(fields, data + line, bytes - line);
    for (size_t each = 0; each < 2; each++)
        if (memmem(fields, rest, agents[each], strlen(agents[each]))) return OURS;
    return FOREIGN;
}

/* Returns whether a segment begins with the head of a response, and of one that is a success. */
int tls_relay_response(const char *data, size_t bytes)
{
    if (bytes < 7 || memcmp(data, "HTTP/1.", 7) != 0) return NO_HEAD;
    if (bytes > 9 && (data[9] == '2' || data[9] == '3')) return SUCCESS;
    return bytes > 11 && memcmp(data + 9, "101", 3) == 0 ? SUCCESS : UNSUCCESSFUL;
}

/* --- Pairs of connections */

typedef struct Pair Pair;
typedef struct Loop Loop;

typedef struct {
    Pair *pair;
    int fd; /* -1 once it is closed */
    SSL *ssl;
    uint32_t events;               /* what epoll looks for */
    uint32_t to_read, to_write;    /* what the socket must be ready for: OpenSSL may want the other one */
    char *rest;                    /* waits to be sent */
    size_t rest_bytes;
} Side;

struct Pair {
    Loop *loop;
    Side outer, inner;
    int state, is_ours, is_success, has_served;
    long long until_ms;
    Pair *before, *after; /* in the list of those that have until then; all but MOVING */
    int is_listed;
};

typedef struct {
    Pair *first, *last;
} List;

struct Loop {
    int epoll, handed[2]; /* a pipe, through which it gets connections */
    List waiting, ending; /* each in the order of `until_ms` */
    Pair *gone;           /* freed after the batch, as events of them may be in it */
    long long now_ms;
    char buffer[READ_BYTES];
};

static struct {
    int listener, to, most, notes, threads;
    Loop *loops;
    atomic_int connections;
    atomic_llong noted_ms;
    int is_full;          /* the listener is not looked at; the first thread's, as the next two */
    long long retry_ms;
    int next;
} relay;

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static void note(char what)
{
    ssize_t ignored = write(relay.notes, &what, 1); /* full: the same has been said */
    (void)ignored;
}

static void unlist(Pair *pair)
{
    if (!pair->is_listed) return;
    List *list = pair->state == ENDING ? &pair->loop->ending : &pair->loop->waiting;
    *(pair->before ? &pair->before->after : &list->first) = pair->after;
    *(pair->after ? &pair->after->before : &list->last) = pair->before;
    pair->is_listed = 0;
}

static void enter(Pair *pair, int state)
{
    unlist(pair);
    pair->state = state;
    if (state == MOVING || state == GONE) return;
    List *list = state == ENDING ? &pair->loop->ending : &pair->loop->waiting;
    pair->until_ms = pair->loop->now_ms + (state == ENDING ? FLUSH_MS : PATIENCE_MS);
    pair->before = list->last;
    pair->after = NULL;
    *(list->last ? &list->last->after : &list->first) = pair;
    list->last = pair;
    pair->is_listed = 1;
}

static void close_side(Side *side, int with_reset)
{
    if (side->fd < 0) return;
    if (with_reset) {
        struct linger at_once = {1, 0};
        setsockopt(side->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    } else if (side->ssl && side->pair->state >= MOVING) {
        tls.ERR_clear_error();
        tls.SSL_shutdown(side->ssl);
    }
    if (side->ssl) tls.SSL_free(side->ssl);
    close(side->fd); /* which takes it out of the epoll */
    free(side->rest);
    side->ssl = NULL;
    side->rest = NULL;
    side->fd = -1;
    side->events = 0;
}

static void part(Pair *pair, int with_reset)
{
    if (pair->state == GONE) return;
    close_side(&pair->inner, with_reset);
    close_side(&pair->outer, with_reset);
    enter(pair, GONE);
    pair->after = pair->loop->gone;
    pair->loop->gone = pair;
    atomic_fetch_sub(&relay.connections, 1);
}

static void look_for(Side *side, uint32_t events)
{
    if (side->fd < 0 || events == side->events) return;
    struct epoll_event wanted = {events, {.ptr = side}};
    int what = !side->events ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    side->events = events;
    if (epoll_ctl(side->pair->loop->epoll, what, side->fd, &wanted)) part(side->pair, 1);
}

/* What each side is to be ready for now. */
static void look(Pair *pair)
{
    Side *outer = &pair->outer, *inner = &pair->inner;
    if (pair->state == CONNECTING) {
        look_for(inner, EPOLLOUT);
    } else if (pair->state == HANDSHAKING) {
        look_for(inner, 0);
        look_for(outer, outer->to_read);
    } else if (pair->state != GONE) {
        int reads = pair->state == MOVING;
        uint32_t of_outer = (reads && !inner->rest ? outer->to_read : 0) | (outer->rest ? outer->to_write : 0);
        uint32_t of_inner = (reads && !outer->rest ? inner->to_read : 0) | (inner->rest ? inner->to_write : 0);
        look_for(outer, of_outer);
        look_for(inner, of_inner);
    }
}

/* One side has ended. The other ends as well, after what waits for either has been sent. */
static void end(Pair *pair)
{
    enter(pair, ENDING);
    if (!pair->outer.rest) close_side(&pair->outer, 0);
    if (!pair->inner.rest) close_side(&pair->inner, 0);
    if (pair->outer.fd < 0 && pair->inner.fd < 0) part(pair, 0);
}

static int blocked(SSL *ssl, int done, uint32_t *wanted)
{
    switch (tls.SSL_get_error(ssl, done)) {
    case WANT_READ: *wanted = EPOLLIN; return BLOCKED;
    case WANT_WRITE: *wanted = EPOLLOUT; return BLOCKED;
    case ZERO_RETURN: return ENDED;
    default: return FAILED;
    }
}

static ssize_t read_side(Side *side, char *into)
{
    if (side->ssl) {
        tls.ERR_clear_error();
        int got = tls.SSL_read(side->ssl, into, READ_BYTES);
        side->to_read = EPOLLIN;
        return got > 0 ? got : blocked(side->ssl, got, &side->to_read);
    }
    ssize_t got = read(side->fd, into, READ_BYTES);
    if (got > 0) return got;
    return got == 0 ? ENDED : errno == EAGAIN || errno == EINTR ? BLOCKED : FAILED;
}

/* Returns how many were sent, which are fewer where the socket takes no more, or FAILED. */
static ssize_t write_side(Side *side, const char *data, size_t bytes)
{
    size_t sent = 0;
    while (sent < bytes) {
        ssize_t done;
        if (side->ssl) {
            tls.ERR_clear_error();
            done = tls.SSL_write(side->ssl, data + sent, (int)(bytes - sent));
            side->to_write = EPOLLOUT;
            if (done <= 0) done = blocked(side->ssl, (int)done, &side->to_write);
        } else {
            done = send(side->fd, data + sent, bytes - sent, MSG_NOSIGNAL);
            if (done < 0) done = errno == EAGAIN || errno == EINTR ? BLOCKED : FAILED;
        }
        if (done == BLOCKED) break;
        if (done < 0) return FAILED;
        sent += (size_t)done;
    }
    return (ssize_t)sent;
}

static void watch(Pair *pair, int is_request, const char *data, size_t bytes)
{
    int seen = is_request ? tls_relay_request(data, bytes) : tls_relay_response(data, bytes);
    if (is_request) {
        if (seen != UNKNOWN) pair->is_ours = seen == OURS;
        return;
    }
    if (seen != NO_HEAD) pair->is_success = seen == SUCCESS;
    if (!pair->is_success) return;
    if (pair->is_ours) {
        if (!pair->has_served) note('s');
        pair->has_served = 1;
        return;
    }
    long long last = atomic_load(&relay.noted_ms);
    if (pair->loop->now_ms - last >= NOTE_EVERY_MS &&
        atomic_compare_exchange_strong(&relay.noted_ms, &last, pair->loop->now_ms))
        note('t');
}

/* Passes on what has come from a side. A side that has more to give stays ready: what OpenSSL has taken from its socket is read to the end. */
static void pass(Side *from, Side *to)
{
    Pair *pair = from->pair;
    char *buffer = pair->loop->buffer;
    for (int turn = 0; pair->state == MOVING && !to->rest; turn++) {
        if (turn >= TURNS && !(from->ssl && tls.SSL_pending(from->ssl))) return;
        ssize_t got = read_side(from, buffer);
        if (got == BLOCKED) return;
        if (got == ENDED) return end(pair);
        if (got == FAILED) return part(pair, 1);
        watch(pair, from == &pair->outer, buffer, (size_t)got);
        ssize_t sent = write_side(to, buffer, (size_t)got);
        if (sent == FAILED) return part(pair, 1);
        if (sent < got) {
            to->rest_bytes = (size_t)(got - sent);
            if (!(to->rest = malloc(to->rest_bytes))) return part(pair, 1);
            memcpy(to->rest, buffer + sent, to->rest_bytes);
        }
        if (!from->ssl && got < READ_BYTES) return; /* the socket is empty */
    }
}

static void flush(Side *side)
{
    Pair *pair = side->pair;
    Side *other = side == &pair->outer ? &pair->inner : &pair->outer;
    ssize_t sent = write_side(side, side->rest, side->rest_bytes);
    if (sent == FAILED) return part(pair, 1);
    side->rest_bytes -= (size_t)sent;
    if (side->rest_bytes) {
        memmove(side->rest, side->rest + sent, side->rest_bytes);
        return;
    }
    free(side->rest);
    side->rest = NULL;
    if (pair->state == ENDING) return end(pair);
    pass(other, side); /* OpenSSL may hold some of it, of which epoll knows nothing */
}

static void shake_hands(Pair *pair)
{
    tls.ERR_clear_error();
    int done = tls.SSL_accept(pair->outer.ssl);
    if (done == 1) {
        pair->outer.to_read = EPOLLIN;
        enter(pair, MOVING);
        pass(&pair->outer, &pair->inner);
    } else if (blocked(pair->outer.ssl, done, &pair->outer.to_read) != BLOCKED) {
        close_side(&pair->outer, 0);
        part(pair, 1);
    }
}

static void connected(Pair *pair)
{
    int error = 0, on = 1;
    socklen_t bytes = sizeof error;
    getsockopt(pair->inner.fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    setsockopt(pair->inner.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (error || !(pair->outer.ssl = tls.SSL_new(tls.context))) return part(pair, 1);
    tls.SSL_set_fd(pair->outer.ssl, pair->outer.fd);
    enter(pair, HANDSHAKING);
    shake_hands(pair);
}

/* The connection to the server is made first: where nothing listens the client's is reset, as it would be without us. */
static void join(Loop *loop, int client)
{
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons((uint16_t)relay.to)};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Pair *pair = calloc(1, sizeof *pair);
    if (!pair) {
        close(client);
        atomic_fetch_sub(&relay.connections, 1);
        return;
    }
    *pair = (Pair){.loop = loop, .state = MOVING, .is_success = 1}; /* of a stream whose beginning was no response head */
    pair->outer = (Side){.pair = pair, .fd = client, .to_read = EPOLLIN, .to_write = EPOLLOUT};
    pair->inner = (Side){.pair = pair, .to_read = EPOLLIN, .to_write = EPOLLOUT};
    enter(pair, CONNECTING);
    pair->inner.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (pair->inner.fd < 0) return part(pair, 1);
    if (!connect(pair->inner.fd, (struct sockaddr *)&server, sizeof server)) connected(pair);
    else if (errno != EINPROGRESS) part(pair, 1);
    look(pair);
}

/* A peer that is gone without a word is noticed by the kernel, within two minutes. */
static void keep_alive(int fd)
{
    int on = 1, idle_s = 30, every_s = 15, probes = 4;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static void accept_some(Loop *loop)
{
    for (int each = 0; each < BATCH && atomic_load(&relay.connections) < relay.most; each++) {
        int client = accept4(relay.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (client < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) relay.retry_ms = loop->now_ms + RETRY_MS;
            return;
        }
        keep_alive(client);
        atomic_fetch_add(&relay.connections, 1);
        Loop *chosen = &relay.loops[relay.next];
        relay.next = (relay.next + 1) % relay.threads;
        if (chosen == loop) join(loop, client);
        else if (write(chosen->handed[1], &client, sizeof client) != sizeof client) {
            close(client);
            atomic_fetch_sub(&relay.connections, 1);
        }
    }
}

/* The first thread looks at the listener while there is room. Others may make room, so a full relay looks again by itself. */
static void look_at_listener(Loop *loop)
{
    if (relay.retry_ms && loop->now_ms >= relay.retry_ms) relay.retry_ms = 0;
    if (atomic_load(&relay.connections) >= relay.most && !relay.retry_ms) relay.retry_ms = loop->now_ms + RETRY_MS;
    int is_full = relay.retry_ms != 0;
    if (is_full == relay.is_full) return;
    struct epoll_event wanted = {EPOLLIN, {.ptr = NULL}};
    epoll_ctl(loop->epoll, is_full ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, relay.listener, &wanted);
    relay.is_full = is_full;
}

static void handle(Side *side, uint32_t events)
{
    Pair *pair = side->pair;
    if (side->fd < 0 || pair->state == GONE) return; /* by an event before it in the batch */
    if (pair->state == CONNECTING) {
        connected(pair);
    } else if (pair->state == HANDSHAKING) {
        shake_hands(pair);
    } else {
        Side *other = side == &pair->outer ? &pair->inner : &pair->outer;
        uint32_t ready = events & (EPOLLERR | EPOLLHUP) ? side->events : events;
        if (side->rest && ready & side->to_write) flush(side);
        if (pair->state == MOVING && !other->rest && ready & side->to_read) pass(side, other);
    }
    look(pair);
}

static void expire(Loop *loop)
{
    List *const lists[] = {&loop->waiting, &loop->ending};
    for (int each = 0; each < 2; each++)
        while (lists[each]->first && lists[each]->first->until_ms <= loop->now_ms) part(lists[each]->first, 1);
}

static int timeout_of(const Loop *loop)
{
    long long first = loop == relay.loops && relay.retry_ms ? relay.retry_ms : INT64_MAX;
    if (loop->waiting.first && loop->waiting.first->until_ms < first) first = loop->waiting.first->until_ms;
    if (loop->ending.first && loop->ending.first->until_ms < first) first = loop->ending.first->until_ms;
    if (first == INT64_MAX) return -1;
    return first <= loop->now_ms ? 0 : (int)(first - loop->now_ms);
}

static void *live(void *argument)
{
    Loop *loop = argument;
    struct epoll_event ready[BATCH];
    for (;;) {
        if (loop == relay.loops) look_at_listener(loop);
        int count = epoll_wait(loop->epoll, ready, BATCH, timeout_of(loop));
        if (count < 0 && errno != EINTR) return NULL;
        loop->now_ms = now_ms();
        for (int each = 0; each < count; each++) {
            int client;
            if (ready[each].data.ptr == NULL) accept_some(loop);
            else if (ready[each].data.ptr != loop) handle(ready[each].data.ptr, ready[each].events);
            else while (read(loop->handed[0], &client, sizeof client) == sizeof client) join(loop, client);
        }
        expire(loop);
        while (loop->gone) {
            Pair *pair = loop->gone;
            loop->gone = pair->after;
            free(pair);
        }
    }
}

/* Serves until the process ends. Returns the `errno` of what could not be set up.
 *
 * `listener` listens and does not block. Connections go to the port `to` on loopback, at most `most` at a time. `notes` is a pipe that does not
 * block: `t` is traffic, `s` a response to a poll of ours. Call it once. */
int tls_relay_run(int listener, int to, int most, int threads, int notes)
{
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    relay.listener = listener, relay.to = to, relay.most = most, relay.notes = notes, relay.threads = threads;
    relay.is_full = 1;
    atomic_store(&relay.noted_ms, -NOTE_EVERY_MS);
    signal(SIGPIPE, SIG_IGN);
    if (!(relay.loops = calloc((size_t)threads, sizeof *relay.loops))) return ENOMEM;
    for (int each = 0; each < threads; each++) {
        Loop *loop = &relay.loops[each];
        struct epoll_event wanted = {EPOLLIN, {.ptr = loop}};
        loop->now_ms = now_ms();
        if ((loop->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0 || pipe2(loop->handed, O_NONBLOCK | O_CLOEXEC)) return errno;
        if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->handed[0], &wanted)) return errno;
    }
    for (int each = 1; each < threads; each++) {
        pthread_t thread;
        int error = pthread_create(&thread, NULL, live, &relay.loops[each]);
        if (error) return error;
    }
    live(&relay.loops[0]);
    return errno;
}
