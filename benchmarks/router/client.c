/* See client.h. */
#include "client.h"
#include "tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_BYTES = 65536, SHOWN = 3 };

struct Seen seen;

static int poller, shown;
static Holes answer_holes;
static uint64_t next_nonce, dice = 88172645463325252u;
static size_t room_latencies;

void clients_start(int epoll) {
    poller = epoll;
    if (given.tls) tls_request();
    answer_holes = find_holes(answer_template());
    next_nonce = monotonic_ns(); /* never the same in two runs: a cache has not seen it */
}

/* --- requests */

static void watch(Conn *c, int operation, uint32_t events) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    epoll_ctl(poller, operation, c->fd, &e);
}

static void dial(Conn *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)given.port)};
    address.sin_addr.s_addr = given.address;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    /* Idle streams end with a reset: after another end, nginx with TLS was seen to keep those of the engine to its timeout. */
    struct linger reset = {.l_onoff = !strcmp(given.mode, "idle")};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    link_connect(c->fd);
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

static void hang_up(Conn *c) {
    link_close(c->fd);
    c->fd = -1;
    c->blocked = false;
}

/* The event that must come now; nothing after the sentinel. */
static void expect(Conn *c) {
    c->expected_at = 0;
    c->expected_bytes = c->event < stream_events(&c->stream) ? write_event(c->expected, &c->stream, c->event) : 0;
}

void client_writable(Conn *c) {
    ssize_t n = link_send(c->fd, c->request + c->sent, c->request_bytes - c->sent);
    if (n > 0) c->sent += (size_t)n;
    bool blocked = c->sent < c->request_bytes;
    if (blocked != c->blocked) watch(c, EPOLL_CTL_MOD, blocked ? EPOLLIN | EPOLLOUT : EPOLLIN);
    c->blocked = blocked;
}

void client_fire(Conn *c, const Requests *from, uint64_t due_ns) {
    dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17; /* Marsaglia's xorshift64 */
    size_t line = dice % from->n;
    const Request *request = &from->all[line];
    if (c->fd < 0) dial(c);
    c->request = realloc(c->request, request->bytes);
    if (!c->request) die("realloc");
    memcpy(c->request, request->text, request->bytes);
    snprintf(c->nonce, sizeof c->nonce, "%016lx", (unsigned long)next_nonce++);
    memcpy(c->request + request->nonce_at, c->nonce, NONCE_DIGITS);
    put_digits(c->request + request->key_at, (unsigned)(seen.sent % given.keys), KEY_DIGITS);
    if (request->trace_at) { /* 32 digits of the trace, a hyphen, 16 of the span */
        char digits[NONCE_DIGITS + 1];
        snprintf(digits, sizeof digits, "%016lx", (unsigned long)dice);
        memcpy(c->request + request->trace_at, digits, NONCE_DIGITS);
        memcpy(c->request + request->trace_at + NONCE_DIGITS, c->nonce, NONCE_DIGITS);
        memcpy(c->request + request->trace_at + 2 * NONCE_DIGITS + 1, c->nonce, NONCE_DIGITS);
    }
    c->request_bytes = request->bytes;
    c->group = (unsigned)(line % given.groups);
    c->busy = true;
    c->wrong = false;
    c->last = c->late; /* the next late stream is a client of its own */
    c->began_ns = due_ns;
    c->framing = HEAD;
    c->sent = c->head_used = c->body_used = c->line_used = c->event = 0;
    c->port = 0;
    c->stream = (Stream){.tokens = request->tokens, .usage = request->usage};
    memcpy(c->stream.nonce, c->nonce, NONCE_DIGITS);
    if (given.streaming) expect(c);
    seen.busy++;
    seen.sent++;
    client_writable(c);
}

/* --- answers */

static void show(const Conn *c, const char *what) {
    if (shown++ >= SHOWN) return;
    fprintf(stderr, "%s: status %d, %zu bytes of head, event %u, byte %zu of it\n%.*s%.*s\n", what, c->status,
            c->head_used, c->event, c->expected_at, (int)c->head_used, c->head, (int)c->body_used, c->body);
}

static void note_target(Conn *c, const char *digits) {
    c->port = 0;
    for (int i = 0; i < PORT_DIGITS; i++) c->port = c->port * 10 + (digits[i] - '0');
    int target = 0;
    while (target < seen.n_targets && seen.targets[target] != c->port) target++;
    if (target == MAX_TARGETS) {
        c->wrong = true;
        return;
    }
    if (target == seen.n_targets) seen.targets[seen.n_targets++] = c->port;
    seen.answers[c->group][target]++;
}

static void note_latency(const Conn *c) {
    if (seen.n_latencies == room_latencies) {
        room_latencies = room_latencies ? 2 * room_latencies : 1 << 16;
        seen.latencies_ns = realloc(seen.latencies_ns, room_latencies * sizeof *seen.latencies_ns);
        if (!seen.latencies_ns) die("realloc");
    }
    seen.latencies_ns[seen.n_latencies++] = monotonic_ns() - c->began_ns;
}

/* Bytes of a stream against what they must be. The first event carries the port; the others must carry the same. */
static void compare(Conn *c, const char *bytes, size_t n) {
    while (n && !c->wrong) {
        size_t k = c->expected_bytes - c->expected_at;
        if (k > n) k = n;
        if (!k) c->wrong = true;
        if (c->event == 0) {
            for (size_t i = 0, at = c->expected_at; i < k; i++, at++) {
                if (at >= EVENT_PORT_AT && at < EVENT_PORT_AT + PORT_DIGITS) c->expected[at] = bytes[i];
                if (c->expected[at] != bytes[i]) c->wrong = true;
            }
        } else if (memcmp(c->expected + c->expected_at, bytes, k)) {
            c->wrong = true;
        }
        if (c->wrong) return;
        c->expected_at += k, bytes += k, n -= k;
        if (c->expected_at < c->expected_bytes) return;
        if (c->event == 0) {
            note_target(c, c->expected + EVENT_PORT_AT);
            c->stream.port = (unsigned)c->port;
            if (!c->late) seen.started++;
            else if (seen.measuring) note_latency(c);
        }
        if (seen.measuring && c->event && c->event <= c->stream.tokens) seen.events++;
        c->event++;
        expect(c);
    }
}

static void take_content(Conn *c, const char *bytes, size_t n) {
    if (given.streaming && c->status == 200) {
        compare(c, bytes, n);
        return;
    }
    size_t k = n < BODY_BYTES - c->body_used ? n : BODY_BYTES - c->body_used;
    if (k < n) c->wrong = true;
    memcpy(c->body + c->body_used, bytes, k);
    c->body_used += k;
}

/* Is this the 1 KB answer to this very request? */
static bool is_answer(Conn *c) {
    char right[ANSWER_BYTES];
    if (c->body_used != ANSWER_BYTES) return false;
    memcpy(right, answer_template(), ANSWER_BYTES);
    memcpy(right + answer_holes.nonce, c->nonce, NONCE_DIGITS);
    memcpy(right + answer_holes.port, c->body + answer_holes.port, PORT_DIGITS);
    return !memcmp(right, c->body, ANSWER_BYTES);
}

static void finish(Conn *c) {
    c->busy = false;
    seen.busy--;
    if (c->status != 200) {
        seen.failed++;
        show(c, "failed");
    } else if (c->wrong || !(given.streaming ? c->event == stream_events(&c->stream) : is_answer(c))) {
        seen.wrong++;
        show(c, "wrong");
    } else {
        seen.answered++;
        if (!given.streaming) note_target(c, c->body + answer_holes.port);
        if (seen.measuring) {
            seen.requests++;
            if (!given.streaming) note_latency(c);
        }
    }
    if (c->last) {
        hang_up(c);
        seen.reconnected++;
    }
}

static bool line_is(const char *line, const char *name, const char *value) {
    size_t n = strlen(name);
    return !strncasecmp(line, name, n) && !strncasecmp(line + n + strspn(line + n, " "), value, strlen(value));
}

static void understand_head(Conn *c) {
    c->head[c->head_used] = 0;
    c->status = atoi(c->head + 9);
    c->framing = FIXED;
    c->left = SIZE_MAX; /* until the connection ends, unless the head says otherwise */
    for (char *line = strstr(c->head, "\r\n"); line; line = strstr(line, "\r\n")) {
        line += 2;
        if (line_is(line, "content-length:", "")) c->left = strtoul(line + strlen("content-length:"), NULL, 10);
        if (line_is(line, "transfer-encoding:", "chunked")) c->framing = CHUNK_SIZE;
        if (line_is(line, "connection:", "close")) c->last = true;
    }
    if (c->framing == FIXED && c->left == SIZE_MAX) c->last = true;
    if (c->framing == FIXED && !c->left) c->framing = WHOLE;
}

/* One line of the framing, without its end; NULL until it is whole. */
static const char *take_line(Conn *c, const char **bytes, const char *end) {
    while (*bytes < end) {
        char byte = *(*bytes)++;
        if (byte == '\n') {
            c->line[c->line_used && c->line[c->line_used - 1] == '\r' ? c->line_used - 1 : c->line_used] = 0;
            c->line_used = 0;
            return c->line;
        }
        if (c->line_used < sizeof c->line - 1) c->line[c->line_used++] = byte;
    }
    return NULL;
}

static void take(Conn *c, const char *bytes, size_t n) {
    const char *end = bytes + n, *line;
    while (bytes < end && c->framing != WHOLE) {
        size_t k = (size_t)(end - bytes);
        switch (c->framing) {
        case HEAD:
            if (k > HEAD_BYTES - 1 - c->head_used) k = HEAD_BYTES - 1 - c->head_used;
            memcpy(c->head + c->head_used, bytes, k);
            char *stop = find(c->head, c->head_used + k, "\r\n\r\n");
            if (!stop && c->head_used + k == HEAD_BYTES - 1) fail("a head of more than 8 KB");
            if (stop) k = (size_t)(stop + 4 - c->head) - c->head_used;
            c->head_used += k;
            if (stop) understand_head(c);
            bytes += k;
            break;
        case FIXED:
        case CHUNK_DATA:
            if (k > c->left) k = c->left;
            take_content(c, bytes, k);
            bytes += k, c->left -= k;
            if (!c->left) c->framing = c->framing == FIXED ? WHOLE : CHUNK_CRLF;
            break;
        case CHUNK_SIZE:
            if (!(line = take_line(c, &bytes, end))) break;
            char *after;
            c->left = strtoul(line, &after, 16);
            if (after == line) c->wrong = true;
            c->framing = c->left ? CHUNK_DATA : TRAILER;
            break;
        case CHUNK_CRLF:
            if (!(line = take_line(c, &bytes, end))) break;
            if (*line) c->wrong = true;
            c->framing = CHUNK_SIZE;
            break;
        case TRAILER:
            if ((line = take_line(c, &bytes, end)) && !*line) c->framing = WHOLE;
            break;
        case WHOLE:
            break;
        }
    }
    if (bytes < end) c->wrong = true; /* more than the answer */
}

void client_readable(Conn *c) {
    static char bytes[READ_BYTES];
    ssize_t n = link_recv(c->fd, bytes, sizeof bytes);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        bool to_the_end = c->busy && c->framing == FIXED && c->last && n == 0;
        hang_up(c);
        if (to_the_end) {
            c->last = false;
            finish(c);
        } else {
            seen.reconnected++;
            if (c->busy) {
                c->busy = false;
                seen.busy--;
                seen.cut++;
                show(c, "cut");
            }
        }
        return;
    }
    if (!c->busy) { /* bytes that were not requested */
        seen.wrong++;
        hang_up(c);
        return;
    }
    if (seen.measuring) seen.reads++;
    take(c, bytes, (size_t)n);
    if (c->framing == WHOLE) finish(c);
}

