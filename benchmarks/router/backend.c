/* A mock engine of vLLM's shape, fast enough never to be what is measured: one epoll process that listens on several
 * ports.
 *
 *     backend PORTS [--nameless] [--tls CERTIFICATE KEY]
 *     backend --at PORT
 *
 * It binds PORTS ports of its own on loopback, or one on all addresses, and prints them in one line of JSON. POST /v1/chat/completions and
 * /v1/completions are answered at once with 1 KB and a usage, or, with "stream": true, by max_tokens events of about
 * 200 bytes: the first at once, the next every T ms, where the body contains "every-T" ("every-20ms"). As in vLLM,
 * "return_token_ids" adds the ids of prompt and tokens, "include_usage" a usage at the end, "continuous_usage_stats" one
 * to every chunk. /metrics is a page in vLLM's names with the requests that run; the other GETs are what routers ask
 * of an engine before they use it. GET /counts returns the requests, connections and running streams of each port.
 *
 * With --nameless, /metrics is 404 and no request gets ids: an engine whose kind and load a router cannot find out. With
 * --tls it takes connections of TLS as well, on the same ports.
 */
#include "tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { MAX_FDS = 65536, MAX_PORTS = 64, WHEEL_MS = 4096, READ_BYTES = 65536, REPLY_BYTES = 131072, PAGE_BYTES = 98304 };
static const uint64_t NS_PER_MS = 1000000;

typedef struct {
    int port;
    uint64_t requests, connections, running;
} Port;

typedef struct Conn {
    int fd; /* -1: closed, and freed when the wheel lets go of it */
    Port *port;
    char *in, *out; /* read and not understood yet; written and not taken yet */
    size_t in_used, in_size, out_used, out_size;
    bool streaming;
    Stream stream;
    unsigned next_event;
    uint64_t interval_ms, due_ms;
    struct Conn *next; /* in its slot of the wheel */
} Conn;

static Port ports[MAX_PORTS];
static int n_ports;
static bool nameless;
static Port *listeners[MAX_FDS];
static Conn *conns[MAX_FDS];
static Conn *wheel[WHEEL_MS]; /* streams by the millisecond of their next event */
static uint64_t wheel_ms;
static int poller;
static Holes answer_holes;

/* --- writing */

static void forget(Conn *c) {
    if (c->fd >= 0) {
        conns[c->fd] = NULL;
        link_close(c->fd);
        c->fd = -1;
        if (c->streaming) c->port->running--;
    }
    if (c->streaming) return; /* the wheel still points at it */
    free(c->in);
    free(c->out);
    free(c);
}

static void watch(Conn *c, uint32_t events) {
    struct epoll_event e = {.events = events, .data.fd = c->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

/* Sends, and keeps what the socket does not take. Errors show up as the end of the connection when it is read. */
static void put(Conn *c, const char *bytes, size_t n) {
    if (!c->out_used) {
        ssize_t sent = link_send(c->fd, bytes, n);
        if (sent < 0 && errno != EAGAIN) return;
        if (sent > 0) bytes += sent, n -= (size_t)sent;
        if (!n) return;
        watch(c, EPOLLIN | EPOLLOUT);
    }
    if (c->out_used + n > c->out_size) {
        c->out_size = 2 * (c->out_used + n);
        c->out = realloc(c->out, c->out_size);
        if (!c->out) die("realloc");
    }
    memcpy(c->out + c->out_used, bytes, n);
    c->out_used += n;
}

static void flush(Conn *c) {
    ssize_t sent = link_send(c->fd, c->out, c->out_used);
    if (sent <= 0) return;
    c->out_used -= (size_t)sent;
    memmove(c->out, c->out + sent, c->out_used);
    if (!c->out_used) watch(c, EPOLLIN);
}

static void reply(Conn *c, const char *status, const char *type, const char *body, size_t n) {
    static char text[REPLY_BYTES];
    int head = snprintf(text, sizeof text,
                        "HTTP/1.1 %s\r\ndate: Tue, 14 Nov 2023 22:13:20 GMT\r\nserver: uvicorn\r\n"
                        "content-length: %zu\r\ncontent-type: %s\r\n\r\n",
                        status, n, type);
    if ((size_t)head + n > sizeof text) fail("a response longer than REPLY_BYTES");
    memcpy(text + head, body, n);
    put(c, text, (size_t)head + n);
}

static void reply_text(Conn *c, const char *status, const char *type, const char *body) {
    reply(c, status, type, body, strlen(body));
}

/* --- streams */

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\ndate: Tue, 14 Nov 2023 22:13:20 GMT\r\nserver: uvicorn\r\n"
                                  "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

static size_t frame(char *to, const char *bytes, size_t n) {
    int head = sprintf(to, "%zx\r\n", n);
    memcpy(to + head, bytes, n);
    memcpy(to + head + n, "\r\n", 2);
    return (size_t)head + n + 2;
}

static void into_wheel(Conn *c) {
    if (c->due_ms <= wheel_ms) c->due_ms = wheel_ms + 1;
    Conn **slot = &wheel[c->due_ms % WHEEL_MS];
    c->next = *slot;
    *slot = c;
}

/* The next token of a stream; the role goes before the first one, and everything else after the last one. */
static void step(Conn *c) {
    char out[MAX_EVENT_BYTES + 2048], text[MAX_EVENT_BYTES];
    size_t n = 0;
    unsigned tokens = c->stream.tokens, end = stream_events(&c->stream), from = c->next_event;
    c->next_event = from == 0 ? (tokens ? 2 : 1) : from <= tokens ? from + 1 : end;
    for (unsigned i = from; i < c->next_event; i++) n += frame(out + n, text, write_event(text, &c->stream, i));
    if (c->next_event == end) {
        memcpy(out + n, "0\r\n\r\n", 5);
        n += 5;
        c->streaming = false;
        c->port->running--;
    }
    put(c, out, n);
}

/* Whether the body has this field, and it is true. */
static bool requests_field(const char *body, size_t n, const char *name) {
    const char *at = find(body, n, name);
    if (!at) return false;
    at += strlen(name);
    while (at < body + n && (*at == ' ' || *at == ':')) at++;
    return body + n - at >= 4 && !memcmp(at, "true", 4);
}

/* The number after the first of these marks that is there, or `otherwise`. */
static unsigned number_after(const char *body, size_t n, const char *mark, unsigned otherwise) {
    const char *at = find(body, n, mark);
    if (!at) return otherwise;
    at += strlen(mark);
    while (at < body + n && (*at == ' ' || *at == ':')) at++;
    return (unsigned)strtoul(at, NULL, 10);
}

static void complete(Conn *c, const char *body, size_t n) {
    c->port->requests++;
    c->stream = (Stream){.port = (unsigned)c->port->port};
    memset(c->stream.nonce, '0', NONCE_DIGITS);
    const char *nonce = find(body, n, NONCE_MARK);
    if (nonce && nonce + strlen(NONCE_MARK) + NONCE_DIGITS <= body + n)
        memcpy(c->stream.nonce, nonce + strlen(NONCE_MARK), NONCE_DIGITS);

    if (!requests_field(body, n, "\"stream\"")) {
        char text[ANSWER_BYTES];
        memcpy(text, answer_template(), ANSWER_BYTES);
        memcpy(text + answer_holes.nonce, c->stream.nonce, NONCE_DIGITS);
        put_digits(text + answer_holes.port, c->stream.port, PORT_DIGITS);
        reply(c, "200 OK", "application/json", text, ANSWER_BYTES);
        return;
    }
    /* Some routers rename the one to the other. */
    c->stream.tokens = number_after(body, n, "\"max_tokens\"", number_after(body, n, "\"max_completion_tokens\"", 16));
    c->stream.ids = !nameless && requests_field(body, n, "\"return_token_ids\"");
    c->stream.usage = requests_field(body, n, "\"include_usage\"");
    c->stream.counts = c->stream.usage && requests_field(body, n, "\"continuous_usage_stats\"");
    c->interval_ms = number_after(body, n, "every-", 20);
    c->next_event = 0;
    c->streaming = true;
    c->port->running++;
    put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    step(c);
    c->due_ms = monotonic_ns() / NS_PER_MS + c->interval_ms;
    into_wheel(c);
}

/* --- what else is asked of an engine */

static void counts(Conn *c) {
    char text[MAX_PORTS * 112];
    int n = 0;
    for (int i = 0; i < n_ports; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s\"%d\":{\"requests\":%lu,\"connections\":%lu,\"running\":%lu}",
                      i ? "," : "{", ports[i].port, ports[i].requests, ports[i].connections, ports[i].running);
    text[n++] = '}';
    reply(c, "200 OK", "application/json", text, (size_t)n);
}

static size_t append_series(char *to, size_t room, const char *name, const char *more, double value) {
    return (size_t)snprintf(to, room, "vllm:%s{engine=\"0\",%smodel_name=\"mock\"} %.1f\n", name, more, value);
}

/* The histograms and counters of a vLLM that has just started: no router uses them, but each has to skip them. */
static const char *histograms(void) {
    static char page[PAGE_BYTES];
    static const char *const names[] = {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
        "request_params_max_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total",
    };
    static const char *const bounds[] = {"0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25", "0.5", "0.75",
                                         "1.0", "2.5", "5.0", "7.5", "10.0", "20.0", "40.0", "80.0", "160.0", "640.0", "+Inf"};
    if (page[0]) return page;
    size_t n = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char series[128], label[64];
        n += (size_t)snprintf(page + n, PAGE_BYTES - n, "# HELP vllm:%s Histogram.\n# TYPE vllm:%s histogram\n", names[i], names[i]);
        snprintf(series, sizeof series, "%s_bucket", names[i]);
        for (size_t k = 0; k < sizeof bounds / sizeof *bounds; k++) {
            snprintf(label, sizeof label, "le=\"%s\",", bounds[k]);
            n += append_series(page + n, PAGE_BYTES - n, series, label, 0);
        }
        snprintf(series, sizeof series, "%s_count", names[i]);
        n += append_series(page + n, PAGE_BYTES - n, series, "", 0);
        snprintf(series, sizeof series, "%s_sum", names[i]);
        n += append_series(page + n, PAGE_BYTES - n, series, "", 0);
    }
    return page;
}

/* No request waits here: each runs from the moment it arrives. */
static void metrics(Conn *c) {
    static char page[PAGE_BYTES];
    const struct {
        const char *name, *more;
        double value;
    } gauges[] = {
        {"num_requests_running", "", (double)c->port->running},
        {"num_requests_waiting", "", 0},
        {"num_requests_waiting_by_reason", "reason=\"capacity\",", 0},
        {"num_requests_waiting_by_reason", "reason=\"deferred\",", 0},
        {"kv_cache_usage_perc", "", 0.1},
    };
    const char *previous = "";
    size_t n = 0;
    for (size_t i = 0; i < sizeof gauges / sizeof *gauges; i++) {
        const char *name = gauges[i].name;
        if (strcmp(name, previous))
            n += (size_t)snprintf(page + n, PAGE_BYTES - n, "# HELP vllm:%s Gauge.\n# TYPE vllm:%s gauge\n", name, name);
        n += append_series(page + n, PAGE_BYTES - n, name, gauges[i].more, gauges[i].value);
        previous = name;
    }
    snprintf(page + n, PAGE_BYTES - n, "%s", histograms());
    reply_text(c, "200 OK", "text/plain; version=0.0.4; charset=utf-8", page);
}

static void handle(Conn *c, char *method, char *path, const char *body, size_t n) {
    char *query = strchr(path, '?');
    if (query) *query = 0;
    if (!strcmp(method, "POST") && (!strcmp(path, "/v1/chat/completions") || !strcmp(path, "/v1/completions")))
        complete(c, body, n);
    else if (!strcmp(path, "/counts"))
        counts(c);
    else if (!strcmp(path, "/health") || !strcmp(path, "/") || !strcmp(path, "/health_generate"))
        reply_text(c, "200 OK", "text/plain", "");
    else if (!strcmp(path, "/v1/models"))
        reply_text(c, "200 OK", "application/json",
                   "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"
                   "\"owned_by\":\"mock\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":32768}]}");
    else if (!strcmp(path, "/get_model_info") || !strcmp(path, "/model_info"))
        reply_text(c, "200 OK", "application/json",
                   "{\"model_path\":\"mock\",\"tokenizer_path\":\"mock\",\"served_model_name\":\"mock\",\"is_generation\":true}");
    else if (!strcmp(path, "/get_server_info") || !strcmp(path, "/server_info"))
        reply_text(c, "200 OK", "application/json",
                   "{\"model_path\":\"mock\",\"model_id\":\"mock\",\"served_model_name\":\"mock\",\"tp_size\":1,\"dp_size\":1,"
                   "\"version\":\"0.5.0\",\"max_running_requests\":4096}");
    else if (!strcmp(path, "/version"))
        reply_text(c, "200 OK", "application/json", "{\"version\":\"0.11.0\"}");
    else if (!nameless && !strcmp(path, "/metrics"))
        metrics(c);
    else
        reply_text(c, "404 Not Found", "application/json", "{\"detail\":\"Not Found\"}");
}

/* --- reading */

static const char *header(const char *head, const char *end, const char *name) {
    size_t n = strlen(name);
    for (const char *line = head; (line = memmem(line, (size_t)(end - line), "\r\n", 2));) {
        line += 2;
        if ((size_t)(end - line) > n && !strncasecmp(line, name, n) && line[n] == ':') return line + n + 1;
    }
    return NULL;
}

/* A chunked body, unframed in place once it is whole: bytes it took with its framing, 0 before that. */
static size_t unchunk(char *body, size_t n, size_t *length) {
    size_t at = 0, out = 0;
    for (int moving = 0; moving < 2; moving++) {
        size_t size = 1;
        for (at = out = 0; size; at += size + 2) {
            const char *line = memmem(body + at, n - at, "\r\n", 2);
            if (!line) return 0;
            size = strtoul(body + at, NULL, 16);
            at = (size_t)(line - body) + 2;
            if (n < at + size + 2) return 0; /* no router sends trailers: the last chunk ends with an empty line */
            if (moving) memmove(body + out, body + at, size);
            out += size;
        }
    }
    *length = out;
    return at;
}

/* Answers the requests that are whole. One that comes in while a stream runs waits for its end. */
static void understand(Conn *c) {
    while (c->in_used && !c->streaming) {
        char *end = memmem(c->in, c->in_used, "\r\n\r\n", 4);
        if (!end) return;
        char *body = end + 4;
        size_t there = c->in_used - (size_t)(body - c->in), length = 0, framed = 0;
        const char *given = header(c->in, end + 2, "content-length");
        const char *coding = header(c->in, end + 2, "transfer-encoding");
        if (coding) {
            framed = unchunk(body, there, &length);
            if (!framed) return;
        } else {
            framed = length = given ? strtoul(given, NULL, 10) : 0;
            if (there < length) {
                if (!there && header(c->in, end + 2, "expect")) put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
                return;
            }
        }
        char method[8] = "", path[256] = "";
        sscanf(c->in, "%7s %255s", method, path);
        handle(c, method, path, body, length);
        size_t whole = (size_t)(body - c->in) + framed;
        c->in_used -= whole;
        memmove(c->in, c->in + whole, c->in_used);
    }
}

static void readable(Conn *c) {
    if (c->in_size - c->in_used < READ_BYTES) {
        c->in_size = 2 * c->in_size + READ_BYTES;
        c->in = realloc(c->in, c->in_size + 1);
        if (!c->in) die("realloc");
    }
    link_accept(c->fd);
    ssize_t n = link_recv(c->fd, c->in + c->in_used, c->in_size - c->in_used);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        forget(c);
        return;
    }
    c->in_used += (size_t)n;
    c->in[c->in_used] = 0;
    understand(c);
}

static void turn_wheel(uint64_t now_ms) {
    while (wheel_ms < now_ms) {
        Conn **slot = &wheel[++wheel_ms % WHEEL_MS], *c = *slot;
        *slot = NULL;
        while (c) {
            Conn *next = c->next;
            if (c->fd < 0) {
                c->streaming = false;
                forget(c);
            } else if (c->due_ms > wheel_ms) { /* a later turn of the wheel */
                c->next = *slot;
                *slot = c;
            } else {
                step(c);
                c->due_ms += c->interval_ms;
                if (c->streaming) into_wheel(c);
                else understand(c);
            }
            c = next;
        }
    }
}

static void accept_all(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FDS) die("too many connections");
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        c->port = listeners[listener];
        c->port->connections++;
        conns[fd] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}

/* On a free port of loopback; on `number` of all addresses, if there is one. */
static void listen_for(Port *port, int number) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)number),
                                  .sin_addr.s_addr = htonl(number ? INADDR_ANY : INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int on = 1; /* connections that wait for their end do not keep the port */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, length) || listen(fd, 4096)) die("listen");
    getsockname(fd, (struct sockaddr *)&address, &length);
    port->port = ntohs(address.sin_port);
    listeners[fd] = port;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
}

int main(int argc, char **argv) {
    int number = argc == 3 && !strcmp(argv[1], "--at") ? atoi(argv[2]) : 0;
    n_ports = number ? 1 : argc > 1 ? atoi(argv[1]) : 0;
    int at = number ? 3 : 2;
    if (at < argc && !strcmp(argv[at], "--nameless")) nameless = true, at++;
    bool tls = argc - at == 3 && !strcmp(argv[at], "--tls");
    if (n_ports < 1 || n_ports > MAX_PORTS || (at < argc && !tls)) {
        fprintf(stderr, "usage: backend PORTS [--nameless] [--tls CERTIFICATE KEY], or backend --at PORT\n");
        return 2;
    }
    if (tls) tls_serve(argv[at + 1], argv[at + 2]);
    signal(SIGPIPE, SIG_IGN);
    answer_holes = find_holes(answer_template());
    poller = epoll_create1(0);
    printf("{\"ports\":[");
    for (int i = 0; i < n_ports; i++) {
        listen_for(&ports[i], number);
        printf("%s%d", i ? "," : "", ports[i].port);
    }
    printf("]}\n");
    fflush(stdout);

    int ticker = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec every_ms = {{0, (long)NS_PER_MS}, {0, (long)NS_PER_MS}};
    timerfd_settime(ticker, 0, &every_ms, NULL);
    struct epoll_event tick = {.events = EPOLLIN, .data.fd = ticker};
    epoll_ctl(poller, EPOLL_CTL_ADD, ticker, &tick);
    wheel_ms = monotonic_ns() / NS_PER_MS;

    struct epoll_event events[512];
    for (;;) {
        int n = epoll_wait(poller, events, 512, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == ticker) {
                uint64_t missed;
                if (read(ticker, &missed, sizeof missed) > 0) turn_wheel(monotonic_ns() / NS_PER_MS);
            } else if (listeners[fd]) {
                accept_all(fd);
            } else if (conns[fd]) {
                if (events[i].events & EPOLLOUT) flush(conns[fd]);
                if (events[i].events & ~(uint32_t)EPOLLOUT) readable(conns[fd]);
            }
        }
    }
}
