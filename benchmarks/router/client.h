/* One connection of the load generator: what it sends, and how every byte that comes back is judged. */
#ifndef CLIENT_H
#define CLIENT_H

#include "wire.h"

#include <arpa/inet.h>
#include <stdbool.h>

enum { MAX_GROUPS = 1024, MAX_TARGETS = 64, HEAD_BYTES = 8192, BODY_BYTES = 4096, KEY_DIGITS = 6, MAX_KEYS = 1000000 };

/* How far an answer has been read. */
typedef enum { HEAD, FIXED, CHUNK_SIZE, CHUNK_DATA, CHUNK_CRLF, TRAILER, WHOLE } Framing;

typedef struct {
    int fd; /* -1: not connected */
    bool busy, blocked, wrong, last /* the answer ends the connection */;
    bool late; /* opened while other streams run: the time to its first event is measured */
    unsigned group;
    uint64_t began_ns; /* of a paced request: when it was due */
    char *request;
    size_t request_bytes, sent;
    Framing framing;
    int status, port;
    size_t left, head_used, line_used, body_used, expected_bytes, expected_at;
    unsigned event;
    Stream stream; /* what the engine writes, of which `event` is the next */
    char nonce[NONCE_DIGITS + 1];
    char line[64];
    char expected[512]; /* the event that must come now */
    char head[HEAD_BYTES], body[BODY_BYTES];
} Conn;

/* A whole request, where its nonce, its API key and its trace go (0: it has none), and how many tokens and whether a usage
 * it asks for. */
typedef struct {
    char *text;
    size_t bytes, nonce_at, key_at, trace_at;
    unsigned tokens;
    bool usage;
} Request;

typedef struct {
    Request *all;
    size_t n;
} Requests;

/* What the command line says. */
extern struct Given {
    const char *mode, *bodies, *late_bodies, *proxy_pids, *backend_pids, *line;
    int port, connections;
    in_addr_t address;
    unsigned groups, keys;
    double rate, late_rate, ramp_s, warm_s, window_s;
    bool streaming, tls, traced;
} given;

/* What the clients have seen so far. */
extern struct Seen {
    uint64_t sent, answered, failed, wrong, cut, reconnected; /* from the first request to the last */
    bool measuring;                                           /* within the window, in which these are counted: */
    uint64_t requests, events, reads;
    int busy, started; /* connections that wait for an answer; streams that have had an event */
    int targets[MAX_TARGETS], n_targets;
    unsigned answers[MAX_GROUPS][MAX_TARGETS];
    uint64_t *latencies_ns; /* of whole responses, or of the first events of late streams */
    size_t n_latencies;
} seen;

/* Before the first request; every connection is added to `epoll`, with the Conn as its data. */
void clients_start(int epoll);
/* Sends one of the requests, drawn at random, over a connection that is not busy. */
void client_fire(Conn *c, const Requests *from, uint64_t due_ns);
/* Its socket takes more; there is something to read. */
void client_writable(Conn *c);
void client_readable(Conn *c);

#endif
