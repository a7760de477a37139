/* What the mock engine says and the load generator expects, byte for byte. Both sides build it from here. */
#ifndef WIRE_H
#define WIRE_H

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Every request carries NONCE_MARK and 16 hex digits somewhere in its body, and the answer repeats the digits: an
 * answer that was meant for somebody else is seen. The five digits of the port say which target gave it. */
#define NONCE_MARK "nonce-"
#define NONCE_DIGITS 16
#define PORT_DIGITS 5
#define SEQUENCE_DIGITS 6

#define NONCE_HOLE "NNNNNNNNNNNNNNNN"
#define PORT_HOLE "PPPPP"
#define SEQUENCE_HOLE "SSSSSS"

#define IDENTITY "\"created\":1700000000,\"model\":\"mock\",\"system_fingerprint\":\"fp_" PORT_HOLE "\","
#define ANSWER_BYTES 1024
#define ANSWER_HEAD                                                                                                    \
    "{\"id\":\"chatcmpl-" NONCE_HOLE "\",\"object\":\"chat.completion\"," IDENTITY                                     \
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\""
#define ANSWER_TAIL                                                                                                    \
    "\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"                                                              \
    "\"usage\":{\"prompt_tokens\":250,\"completion_tokens\":160,\"total_tokens\":410}}"

/* A stream: events 0..n-1, the end event, the sentinel; each in a chunk of its own. */
#define EVENT_HEAD "data: {\"id\":\"chatcmpl-" NONCE_HOLE "\",\"object\":\"chat.completion.chunk\"," IDENTITY
#define EVENT                                                                                                          \
    EVENT_HEAD "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" t" SEQUENCE_HOLE "\"},\"finish_reason\":null}]}\n\n"
#define EVENT_END EVENT_HEAD "\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
#define SENTINEL "data: [DONE]\n\n"
#define EVENT_BYTES (sizeof EVENT - 1)
#define EVENT_END_BYTES (sizeof EVENT_END - 1)
#define SENTINEL_BYTES (sizeof SENTINEL - 1)

/* Where the holes are: the same in every event. */
typedef struct {
    size_t nonce, port, sequence;
} Holes;

static inline Holes find_holes(const char *text) {
    const char *nonce = strstr(text, NONCE_HOLE), *port = strstr(text, PORT_HOLE), *sequence = strstr(text, SEQUENCE_HOLE);
    return (Holes){(size_t)(nonce - text), (size_t)(port - text), sequence ? (size_t)(sequence - text) : 0};
}

static inline void put_digits(char *at, unsigned value, int digits) {
    for (int i = digits - 1; i >= 0; i--, value /= 10) at[i] = (char)('0' + value % 10);
}

/* The answer with its holes, ANSWER_BYTES long. */
static inline const char *answer_template(void) {
    static char text[ANSWER_BYTES + 1];
    if (!text[0]) {
        size_t head = sizeof ANSWER_HEAD - 1, tail = sizeof ANSWER_TAIL - 1;
        memcpy(text, ANSWER_HEAD, head);
        for (size_t i = head; i < ANSWER_BYTES - tail; i++) text[i] = " the quick brown fox"[(i - head) % 20];
        memcpy(text + ANSWER_BYTES - tail, ANSWER_TAIL, tail);
    }
    return text;
}

static inline uint64_t monotonic_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline void fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

/* A byte string in another, like strstr without the ending zero. */
static inline char *find(const char *in, size_t n, const char *what) {
    return memmem(in, n, what, strlen(what));
}

#endif
