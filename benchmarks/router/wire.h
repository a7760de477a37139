/* What the mock engine writes and the load generator expects, byte for byte. Both sides build it from here.
 *
 * The shape is vLLM's, field by field. Token ids and the usage are written only if the request asks for them. The load
 * generator never asks for ids, so it expects none: a proxy that asks for them has to take them out again.
 */
#ifndef WIRE_H
#define WIRE_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Every request has NONCE_MARK and 16 hex digits in its body. The id of the response repeats them, so that a response
 * to another request is noticed. The last five digits of the id are the port of the target that responded. */
#define NONCE_MARK "nonce-"
#define NONCE_DIGITS 16
#define PORT_DIGITS 5
#define SEQUENCE_DIGITS 6

#define NONCE_HOLE "NNNNNNNNNNNNNNNN"
#define PORT_HOLE "PPPPP"
#define SEQUENCE_HOLE "SSSSSS"
#define ID "{\"id\":\"chatcmpl-" NONCE_HOLE "00000000000" PORT_HOLE "\","
#define MODEL "\"created\":1700000000,\"model\":\"mock\","

#define PROMPT_TOKENS 250 /* of any prompt: a quarter of 1 KB */
#define FIRST_TOKEN_ID 100000

/* --- a response that is no stream */

#define ANSWER_BYTES 1024
#define ANSWER_HEAD                                                                                                    \
    ID "\"object\":\"chat.completion\"," MODEL                                                                         \
       "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\""
#define ANSWER_TAIL                                                                                                    \
    "\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"tool_calls\":[],"                \
    "\"reasoning_content\":null},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],"                 \
    "\"service_tier\":null,\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":250,\"total_tokens\":410,"         \
    "\"completion_tokens\":160,\"prompt_tokens_details\":null},\"prompt_logprobs\":null,"                              \
    "\"kv_transfer_params\":null}"

/* Where the variable digits are. */
typedef struct {
    size_t nonce, port;
} Holes;

static inline Holes find_holes(const char *text) {
    return (Holes){(size_t)(strstr(text, NONCE_HOLE) - text), (size_t)(strstr(text, PORT_HOLE) - text)};
}

static inline void put_digits(char *at, unsigned value, int digits) {
    for (int i = digits - 1; i >= 0; i--, value /= 10) at[i] = (char)('0' + value % 10);
}

/* The response with its holes, ANSWER_BYTES long. */
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

/* --- a stream: the role, `tokens` tokens, the finish reason, the usage if it was requested, the sentinel */

#define EVENT_HEAD "data: " ID "\"object\":\"chat.completion.chunk\"," MODEL "\"choices\":["
#define EVENT_OPEN EVENT_HEAD "{\"index\":0,\"delta\":{"
#define UNFINISHED "\"},\"logprobs\":null,\"finish_reason\":null"
#define ROLE EVENT_OPEN "\"role\":\"assistant\",\"content\":\"" UNFINISHED
#define TOKEN EVENT_OPEN "\"content\":\" t" SEQUENCE_HOLE UNFINISHED
#define FINISH EVENT_OPEN "\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null"
#define SENTINEL "data: [DONE]\n\n"

enum {
    EVENT_PORT_AT = sizeof "data: {\"id\":\"chatcmpl-" - 1 + NONCE_DIGITS + 11, /* in every event but the sentinel */
    MAX_EVENT_BYTES = 512 + PROMPT_TOKENS * 7,                                   /* the first, with the prompt's ids */
};

typedef struct {
    char nonce[NONCE_DIGITS];
    unsigned port, tokens;
    bool ids, usage, counts; /* requested: token ids, the usage at the end, the usage with every chunk */
} Stream;

/* The number of its events. */
static inline unsigned stream_events(const Stream *s) {
    return s->tokens + 3 + s->usage;
}

static inline char *append(char *to, const char *text, size_t n) {
    memcpy(to, text, n);
    return to + n;
}
#define APPEND(to, literal) append(to, literal, sizeof literal - 1)

static inline char *append_usage(char *to, unsigned tokens) {
    return to + sprintf(to, ",\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%u,\"completion_tokens\":%u}", PROMPT_TOKENS,
                        PROMPT_TOKENS + tokens, tokens);
}

static inline char *append_ids(char *to, const char *name, unsigned first, unsigned count) {
    to = append(to, name, strlen(name));
    for (unsigned i = 0; i < count; i++, to += 7) {
        to[0] = i ? ',' : '[';
        put_digits(to + 1, FIRST_TOKEN_ID + (first + i) % 50000, 6);
    }
    return APPEND(to, "]");
}

/* Writes event `number` (from 0) and returns its length. */
static inline size_t write_event(char *to, const Stream *s, unsigned number) {
    enum { NONCE_AT = sizeof "data: {\"id\":\"chatcmpl-" - 1, SEQUENCE_AT = sizeof EVENT_OPEN "\"content\":\" t" - 1 };
    if (number + 1 >= stream_events(s)) return (size_t)(APPEND(to, SENTINEL) - to);

    bool is_role = !number, is_token = number && number <= s->tokens, is_finish = number == s->tokens + 1;
    char *end = is_role ? APPEND(to, ROLE) : is_token ? APPEND(to, TOKEN) : is_finish ? APPEND(to, FINISH) : APPEND(to, EVENT_HEAD);
    memcpy(to + NONCE_AT, s->nonce, NONCE_DIGITS);
    put_digits(to + EVENT_PORT_AT, s->port, PORT_DIGITS);
    if (is_token) put_digits(to + SEQUENCE_AT, number - 1, SEQUENCE_DIGITS);
    if (s->ids && (is_token || is_finish)) end = append_ids(end, ",\"token_ids\":", number - 1, 1);
    end = is_role || is_token || is_finish ? APPEND(end, "}]") : APPEND(end, "]");
    bool is_usage = number == s->tokens + 2;
    if (is_usage || s->counts) end = append_usage(end, number <= s->tokens ? number : s->tokens);
    if (s->ids && is_role) end = append_ids(end, ",\"prompt_token_ids\":", 0, PROMPT_TOKENS);
    return (size_t)(APPEND(end, "}\n\n") - to);
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
