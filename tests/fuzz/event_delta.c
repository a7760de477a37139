/* Random streams through lb/proxy/_event_delta.h: what comes out is what went in, and damaged blocks do no harm.
 *
 *     cc -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -I lb/proxy tests/fuzz/event_delta.c -o fuzz
 *     ./fuzz CASES [SEED]
 *
 * A case is a stream of up to 40 reads, of events that differ a little, of delimiters in any order, or of any bytes. In between
 * parts of it are moved, joined and taken, as lb/stream/transcript.py does. */
#define _GNU_SOURCE
#include <stdio.h>

#include "_event_delta.h"

static uint64_t state;

static uint64_t random_below(uint64_t limit) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545F4914F6CDD1Dull % limit;
}

static size_t event(char *to) {
    static const char *const TEXTS[] = {" the", "a", "", "\\\"", "\\n", "\\\\", ",", "]}", " \\u00e9t\\u00e9", "1", "12]", "e", "007", "20", "4294967296", "123456789", "0", "\xc3\xa9", "{\\\"a\\\": [1, 2]}"};
    static const char *const FIELDS[] = {"", ",\"logprobs\":null", ",\"finish_reason\":\"stop\"", ",\"usage\":{\"completion_tokens\":17}"};
    char text[512];
    int n = sprintf(text, "data: {\"id\":\"chatcmpl-123\",\"choices\":[{\"delta\":{\"content\":\"%s\"}%s,\"token_ids\":[%d",
                    TEXTS[random_below(sizeof TEXTS / sizeof *TEXTS)], FIELDS[random_below(8) ? 0 : random_below(4)], (int)random_below(random_below(4) ? 130000 : 20));
    while (!random_below(6)) n += sprintf(text + n, ",%d", (int)random_below(1000));
    n += sprintf(text + n, "]}]}\n\n");
    if (!random_below(12)) n = sprintf(text, ": still here\n\n");
    if (!random_below(12)) n = sprintf(text, "event: delta\ndata: {\"type\":\"delta\"}\n\n");
    return (size_t)sprintf(to, "%x\r\n%s\r\n", (unsigned)n, text);
}

/* One read, of at most `room` bytes. */
static size_t make_read(char *to, size_t room, const char *before, size_t before_size) {
    static const char FEW[] = "\"]},\r\n\\0aa";
    size_t size = 0, wanted;
    switch (random_below(12)) {
    case 0: /* any bytes */
        wanted = random_below(random_below(20) ? 300 : room);
        for (; size < wanted; size++) to[size] = (char)random_below(256);
        break;
    case 1: /* those that mean something */
    case 2:
        wanted = random_below(random_below(20) ? 60 : 20000);
        for (; size < wanted; size++) to[size] = FEW[random_below(sizeof FEW - 1)];
        break;
    case 3: /* the same again */
        memcpy(to, before, size = before_size);
        break;
    case 4: /* the same but for some bytes */
        memcpy(to, before, size = before_size);
        for (size_t i = random_below(8); i && size; i--) to[random_below(size)] = FEW[random_below(sizeof FEW - 1)];
        break;
    case 5: /* one byte, many times */
        wanted = random_below(random_below(8) ? 5 : room);
        memset(to, FEW[random_below(sizeof FEW - 1)], size = wanted);
        break;
    default:
        do size += event(to + size);
        while (!random_below(4) && size + 1024 < room);
        if (!random_below(10)) size = random_below(size + 1); /* cut anywhere */
    }
    return size;
}

static void check(int held, const char *what) {
    if (!held) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* Unpack one block into memory of exactly its size, and compare. */
static size_t compare(const Block *block, const char *expected) {
    char *out = malloc(block->raw ? block->raw : 1);
    check(block_unpack(block, out), "a block cannot be unpacked");
    check(!memcmp(out, expected, block->raw), "a block is not what went in");
    free(out);
    return block->raw;
}

/* Unpack a block some of whose bytes were changed, or that is cut, or whose size is wrong. */
static void damage(const Block *block) {
    Block *copy = malloc(sizeof(Block) + block->used);
    memcpy(copy, block, sizeof(Block) + block->used);
    for (size_t i = random_below(4); i && copy->used; i--) copy->steps[random_below(copy->used)] = (unsigned char)(random_below(3) ? random_below(256) : 255);
    if (!random_below(3)) copy->used = (uint32_t)random_below(copy->used + 1);
    if (!random_below(3)) copy->raw = random_below(2 * copy->raw + 1);
    copy = realloc(copy, sizeof(Block) + copy->used);
    char *out = malloc(copy->raw ? copy->raw : 1);
    block_unpack(copy, out);
    free(out);
    free(copy);
}

static size_t held(const EventDelta *delta) {
    size_t memory = delta->reference_room;
    for (const Block *block = delta->first; block; block = block->next) memory += block_memory(block);
    return memory;
}

static void run_case(char *raw, size_t room) {
    EventDelta kept = {0}, passing = {0};
    size_t begin = 0, size = 0, last = 0; /* what is kept is raw[begin..size) */
    for (uint64_t reads = 1 + random_below(40); reads; reads--) {
        size_t left = room - size;
        size_t now = left < 8192 || last > left ? 0 : make_read(raw + size, left < 70000 ? left : 70000, raw + size - last, last);
        check(delta_add(&passing, raw + size, now), "no memory");
        size += now;
        if (now) last = now;
        if (!random_below(5)) check(delta_join(&kept, &passing), "no memory");
        if (!random_below(12) && kept.first) {
            check(delta_flush(&kept), "no memory");
            Block *block = delta_pop(&kept);
            begin += compare(block, raw + begin);
            free(block);
        }
        check(kept.held_bytes == held(&kept) && passing.held_bytes == held(&passing), "memory is counted wrongly");
        check(kept.raw_bytes + passing.raw_bytes == size - begin, "bytes are counted wrongly");
    }
    check(delta_join(&kept, &passing) && delta_flush(&kept), "no memory");
    size_t packed = 0, blocks = 0;
    for (const Block *block = kept.first; block; block = block->next, blocks++) {
        packed += block->used;
        damage(block);
        begin += compare(block, raw + begin);
    }
    check(begin == size, "something is missing");
    check(packed <= kept.raw_bytes + kept.raw_bytes / 2 + 64 * (blocks + 40), "the packed form is much longer");
    delta_free(&kept);
    delta_free(&passing);
}

int main(int argc, char **argv) {
    size_t room = 400000;
    char *raw = malloc(room);
    uint64_t cases = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000, seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (uint64_t i = 0; i < cases; i++) {
        state = (seed + i) * 0x9E3779B97F4A7C15ull | 1;
        run_case(raw, room);
    }
    free(raw);
    printf("%llu cases\n", (unsigned long long)cases);
    return 0;
}
