/* The load generator: it checks every byte that comes back, and measures the proxy over exactly the window it counts.
 *
 *     load unary   -P PORT -f BODIES -c CONNECTIONS [-r PER_SECOND]    closed loop, or paced by a schedule
 *     load streams -P PORT -f BODIES -c STREAMS -R RAMP_S    long streams, opened one after the other
 *     load idle    -P PORT -f BODIES -c STREAMS -R RAMP_S    streams that have started and then wait: memory
 *       -F BODIES -l PER_SECOND    beside the streams, new ones by a schedule, each over a connection of its own: the
 *                                  time to their first event
 *       -w WARM_S -d WINDOW_S    what is under way after the window has DRAIN_S to end, and is checked as well
 *       -p PID,PID  -b PID       the processes of the proxy and of the backend, whose CPU time is read
 *       -t                       with TLS; the proxy's certificate is not checked
 *       -k KEYS                  that many API keys, in turn (default 1)
 *       -T                       each request has a traceparent of its own
 *       -H 'NAME: VALUE'         one more line in every head
 *       -A ADDRESS               the proxy's (default 127.0.0.1)
 *       -g GROUPS                line i of BODIES is of group i modulo GROUPS: does a group stay on one target?
 *
 * BODIES has one JSON body per line with "nonce-" and 16 digits in it, which every request replaces by its own; the
 * "max_tokens" of a stream is its length. Answers are compared whole with wire.h: status, framing, nonce, sequence
 * numbers, text, usage, sentinel. One line of JSON is printed.
 * CPU time is that of the processes' own clocks (clock_getcpuclockid): nanoseconds, threads that ended included.
 */
#include "client.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

static const uint64_t NS_PER_S = 1000000000;
static const double DRAIN_S = 20;

enum { MAX_LATE = 512 }; /* late streams at a time */

struct Given given = {.connections = 1, .groups = 1, .keys = 1, .warm_s = 1, .window_s = 3};

static Requests requests, late_requests;
static int poller;

/* --- what the machine was doing */

typedef struct {
    uint64_t at_ns;
    double proxy_s, backend_s, load_s, machine_s;
    long proxy_rss_kib;
} Usage;

static double cpu_s(const char *pids, long *rss_kib) {
    double total = 0;
    char *list = strdup(pids ? pids : ""), *rest = NULL;
    for (char *pid = strtok_r(list, ",", &rest); pid; pid = strtok_r(NULL, ",", &rest)) {
        clockid_t clock;
        struct timespec t;
        if (clock_getcpuclockid(atoi(pid), &clock) || clock_gettime(clock, &t)) die("a measured process is gone");
        total += (double)t.tv_sec + (double)t.tv_nsec / 1e9;
        char path[64];
        long pages;
        snprintf(path, sizeof path, "/proc/%d/statm", atoi(pid));
        FILE *file = fopen(path, "r");
        if (!file || fscanf(file, "%*d %ld", &pages) != 1) die(path);
        fclose(file);
        *rss_kib += pages * (sysconf(_SC_PAGESIZE) / 1024);
    }
    free(list);
    return total;
}

/* All cores, all processes: user, nice, system, interrupts; neither idle nor stolen. */
static double machine_s(void) {
    unsigned long user, nice, system, hard, soft;
    FILE *file = fopen("/proc/stat", "r");
    if (!file || fscanf(file, "cpu %lu %lu %lu %*u %*u %lu %lu", &user, &nice, &system, &hard, &soft) != 5)
        die("/proc/stat");
    fclose(file);
    return (double)(user + nice + system + hard + soft) / (double)sysconf(_SC_CLK_TCK);
}

static Usage usage(void) {
    Usage u = {.at_ns = monotonic_ns(), .machine_s = machine_s()};
    long ignored = 0;
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    u.load_s = (double)t.tv_sec + (double)t.tv_nsec / 1e9;
    u.proxy_s = cpu_s(given.proxy_pids, &u.proxy_rss_kib);
    u.backend_s = cpu_s(given.backend_pids, &ignored);
    return u;
}

/* --- the run */

/* As the official Python client sends it: a router that reads or copies heads pays for all of it. */
static const char REQUEST_HEAD[] =
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept-Encoding: gzip, deflate\r\n"
    "Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    "User-Agent: AsyncOpenAI/Python 1.60.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 1.60.0\r\n"
    "X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
    "X-Stainless-Runtime-Version: 3.11.7\r\nAuthorization: Bearer benchmark-key-000000\r\n"
    "X-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\n"
    "%s%s%sContent-Length: %zd\r\n\r\n";
static const char KEY_MARK[] = "benchmark-key-", TRACE_MARK[] = "traceparent: 00-";
static const char TRACE_LINE[] = "traceparent: 00-00000000000000000000000000000000-0000000000000000-01\r\n";
static const char MAX_TOKENS[] = "\"max_tokens\":";
enum { HEAD_ROOM = 2048 };

/* The place after a mark in a head; 0: the mark is not there. */
static size_t after(const char *head, const char *mark) {
    const char *at = strstr(head, mark);
    return at ? (size_t)(at - head) + strlen(mark) : 0;
}

static Requests load_requests(const char *path) {
    Requests loaded = {0};
    FILE *file = fopen(path, "r");
    if (!file) die(path);
    char *line = NULL;
    size_t size = 0;
    ssize_t n;
    while ((n = getline(&line, &size, file)) > 0) {
        if (line[n - 1] == '\n') n--;
        loaded.all = realloc(loaded.all, (loaded.n + 1) * sizeof *loaded.all);
        char *text = malloc((size_t)n + HEAD_ROOM);
        if (!loaded.all || !text) die("malloc");
        int head = snprintf(text, HEAD_ROOM, REQUEST_HEAD, given.port, given.traced ? TRACE_LINE : "",
                            given.line ? given.line : "", given.line ? "\r\n" : "", n);
        if (head >= HEAD_ROOM) fail("a head longer than HEAD_ROOM");
        size_t key_at = after(text, KEY_MARK), trace_at = after(text, TRACE_MARK);
        memcpy(text + head, line, (size_t)n);
        char *nonce = find(text + head, (size_t)n, NONCE_MARK);
        if (!nonce || nonce + strlen(NONCE_MARK) + NONCE_DIGITS > text + head + n) fail("a body without a nonce");
        const char *tokens = find(text + head, (size_t)n, MAX_TOKENS);
        if (given.streaming && !tokens) fail("a stream without max_tokens");
        loaded.all[loaded.n++] = (Request){
            .text = text,
            .bytes = (size_t)(head + n),
            .nonce_at = (size_t)(nonce - text) + strlen(NONCE_MARK),
            .key_at = key_at,
            .trace_at = trace_at,
            .tokens = tokens ? (unsigned)strtoul(tokens + strlen(MAX_TOKENS), NULL, 10) : 0,
            .usage = find(text + head, (size_t)n, "\"include_usage\":true"),
        };
    }
    free(line);
    fclose(file);
    if (!loaded.n) fail("no bodies");
    return loaded;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double latency_us(double share) {
    return seen.n_latencies ? (double)seen.latencies_ns[(size_t)(share * (double)(seen.n_latencies - 1))] / 1e3 : -1;
}

static void report(const Usage *start, const Usage *from, const Usage *to) {
    uint64_t favourite = 0, all = 0;
    for (unsigned g = 0; g < given.groups; g++) {
        unsigned most = 0;
        for (int t = 0; t < seen.n_targets; t++) {
            if (seen.answers[g][t] > most) most = seen.answers[g][t];
            all += seen.answers[g][t];
        }
        favourite += most;
    }
    qsort(seen.latencies_ns, seen.n_latencies, sizeof *seen.latencies_ns, by_size);
    printf("{\"window_s\":%.6f,\"sent\":%lu,\"answered\":%lu,\"failed\":%lu,\"wrong\":%lu,\"cut\":%lu,"
           "\"unfinished\":%d,\"reconnected\":%lu,\"requests\":%lu,\"events\":%lu,\"reads\":%lu,"
           "\"proxy_cpu_s\":%.6f,\"backend_cpu_s\":%.6f,\"load_cpu_s\":%.6f,\"machine_cpu_s\":%.3f,\"rss_before_kib\":%ld,\"rss_kib\":%ld,"
           "\"latencies\":%zu,\"p50_us\":%.1f,\"p90_us\":%.1f,\"p99_us\":%.1f,\"affinity\":%.4f,\"by_target\":{",
           (double)(to->at_ns - from->at_ns) / 1e9, seen.sent, seen.answered, seen.failed, seen.wrong, seen.cut,
           seen.busy, seen.reconnected, seen.requests, seen.events, seen.reads, to->proxy_s - from->proxy_s,
           to->backend_s - from->backend_s, to->load_s - from->load_s, to->machine_s - from->machine_s,
           start->proxy_rss_kib, to->proxy_rss_kib, seen.n_latencies, latency_us(0.5), latency_us(0.9), latency_us(0.99),
           all ? (double)favourite / (double)all : -1);
    for (int t = 0; t < seen.n_targets; t++) {
        unsigned n = 0;
        for (unsigned g = 0; g < given.groups; g++) n += seen.answers[g][t];
        printf("%s\"%d\":%u", t ? "," : "", seen.targets[t], n);
    }
    printf("}}\n");
}

/* Starts requests or streams on a schedule; a timer counts those that are due. */
typedef struct {
    int timer;
    uint64_t step_ns, epoch_ns, due, fired, most;
    const Requests *requests;
    Conn *conns;
    int n_conns, next; /* connection to try */
} Schedule;

/* `most`: how many it starts in all. */
static void schedule_start(Schedule *s, double from_s, double step_s, uint64_t most) {
    uint64_t from_ns = (uint64_t)(from_s * 1e9);
    s->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    s->step_ns = (uint64_t)(step_s * 1e9) + 1;
    s->epoch_ns = monotonic_ns() + from_ns;
    s->most = most;
    uint64_t first_ns = from_ns + s->step_ns;
    struct itimerspec every = {.it_interval = {(time_t)(s->step_ns / NS_PER_S), (long)(s->step_ns % NS_PER_S)},
                               .it_value = {(time_t)(first_ns / NS_PER_S), (long)(first_ns % NS_PER_S)}};
    timerfd_settime(s->timer, 0, &every, NULL);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = s};
    epoll_ctl(poller, EPOLL_CTL_ADD, s->timer, &e);
}

static Conn *free_conn(Schedule *s) {
    for (int tried = 0; tried < s->n_conns; tried++) {
        Conn *c = &s->conns[s->next++ % s->n_conns];
        if (!c->busy) return c;
    }
    return NULL;
}

/* Those that are due, as far as connections are free. */
static void fire_due(Schedule *s) {
    Conn *c;
    while (s->fired < s->due && s->fired < s->most && (c = free_conn(s)))
        client_fire(c, s->requests, s->epoch_ns + ++s->fired * s->step_ns);
}

static Conn *new_conns(int n, bool late) {
    Conn *conns = calloc((size_t)n, sizeof *conns);
    if (!conns) die("calloc");
    for (int i = 0; i < n; i++) conns[i].fd = -1, conns[i].late = late;
    return conns;
}

static void run(void) {
    bool idle = !strcmp(given.mode, "idle"), paced = given.streaming || given.rate > 0, started = false, stopping = false;
    bool has_late = given.late_rate > 0, waits = idle || has_late; /* until all streams have started */
    Conn *all = new_conns(given.connections, false);
    Schedule schedule = {.requests = &requests, .conns = all, .n_conns = given.connections};
    Schedule late = {.requests = &late_requests, .conns = new_conns(MAX_LATE, true), .n_conns = MAX_LATE};

    Usage start = usage(), from = start, to = start;
    if (given.streaming) schedule_start(&schedule, 0, given.ramp_s / given.connections, (uint64_t)given.connections);
    else if (paced) schedule_start(&schedule, 0, 1 / given.rate, UINT64_MAX);
    else
        for (int i = 0; i < given.connections; i++) client_fire(&all[i], &requests, monotonic_ns());
    if (has_late) schedule_start(&late, given.ramp_s, 1 / given.late_rate, UINT64_MAX);

    uint64_t begin_ns = monotonic_ns() + (uint64_t)((given.ramp_s + given.warm_s) * 1e9);
    uint64_t end_ns = begin_ns + (uint64_t)(given.window_s * 1e9), stop_ns = end_ns + (uint64_t)(DRAIN_S * 1e9);
    for (;;) {
        uint64_t now_ns = monotonic_ns();
        if (waits && !started && seen.started < given.connections) { /* the window begins when all streams have */
            if (now_ns > stop_ns) fail("not every stream began");
            begin_ns = now_ns + (uint64_t)(given.warm_s * 1e9);
            end_ns = begin_ns + (uint64_t)(given.window_s * 1e9);
        }
        if (!started && now_ns >= begin_ns) {
            started = seen.measuring = true;
            from = usage();
        } else if (seen.measuring && now_ns >= end_ns) {
            to = usage();
            seen.measuring = false;
            stopping = true;
        }
        if (stopping && (idle || !seen.busy || now_ns > stop_ns)) break;

        uint64_t edge_ns = stopping ? stop_ns : seen.measuring ? end_ns : begin_ns;
        struct epoll_event events[512];
        int n = epoll_wait(poller, events, 512, edge_ns > now_ns ? (int)((edge_ns - now_ns) / 1000000 + 1) : 0);
        for (int i = 0; i < n; i++) {
            Schedule *timed = events[i].data.ptr == &schedule ? &schedule : events[i].data.ptr == &late ? &late : NULL;
            Conn *c = events[i].data.ptr;
            uint64_t more;
            if (timed) {
                if (read(timed->timer, &more, sizeof more) > 0) timed->due += more;
                continue;
            }
            if (c->fd >= 0 && events[i].events & EPOLLOUT) client_writable(c);
            if (c->fd >= 0 && events[i].events & ~(uint32_t)EPOLLOUT) client_readable(c);
            if (!paced && !stopping && !c->busy) client_fire(c, &requests, monotonic_ns());
        }
        if (stopping) continue;
        if (paced) fire_due(&schedule);
        if (has_late) fire_due(&late);
    }
    report(&start, &from, &to);
}

int main(int argc, char **argv) {
    int option;
    given.mode = argc > 1 ? argv[1] : "";
    given.address = htonl(INADDR_LOOPBACK);
    optind = 2;
    while ((option = getopt(argc, argv, "A:P:f:F:c:r:l:R:w:d:p:b:g:tk:TH:")) != -1) switch (option) {
        case 'A': given.address = inet_addr(optarg); break;
        case 'P': given.port = atoi(optarg); break;
        case 'f': given.bodies = optarg; break;
        case 'c': given.connections = atoi(optarg); break;
        case 'F': given.late_bodies = optarg; break;
        case 'r': given.rate = atof(optarg); break;
        case 'l': given.late_rate = atof(optarg); break;
        case 'R': given.ramp_s = atof(optarg); break;
        case 'w': given.warm_s = atof(optarg); break;
        case 'd': given.window_s = atof(optarg); break;
        case 'p': given.proxy_pids = optarg; break;
        case 'b': given.backend_pids = optarg; break;
        case 'g': given.groups = (unsigned)atoi(optarg); break;
        case 't': given.tls = true; break;
        case 'k': given.keys = (unsigned)atoi(optarg); break;
        case 'T': given.traced = true; break;
        case 'H': given.line = optarg; break;
        default: return 2;
        }
    given.streaming = !strcmp(given.mode, "streams") || !strcmp(given.mode, "idle");
    bool known = given.streaming || !strcmp(given.mode, "unary");
    bool has_late = given.late_rate > 0;
    bool sane = given.bodies && has_late == !!given.late_bodies && (given.streaming || !has_late) && given.port > 0 && given.connections > 0 && given.groups - 1 < MAX_GROUPS && given.keys - 1 < MAX_KEYS;
    if (!known || !sane || optind < argc) {
        fprintf(stderr, "usage: load unary|streams|idle -P PORT -f BODIES -c CONNECTIONS ... (see the top of load.c)\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(0);
    requests = load_requests(given.bodies);
    if (has_late) late_requests = load_requests(given.late_bodies);
    clients_start(poller);
    run();
    return 0;
}

