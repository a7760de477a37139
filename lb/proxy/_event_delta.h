/* Keeps the events of a stream packed: each read as its difference from the one before.
 *
 * The events of an engine are alike but for the size of their chunk, their text and their token ids: of 260 bytes some 14 are
 * left. The packed form is a list of blocks, each of which can be unpacked without the others. A block is a list of steps:
 *
 *     copy N bytes of the reference, pass over S bytes of it, then take the L bytes that follow
 *
 * as N in a byte, S and L in half a byte each, and what does not fit there after them (`put_number`). In the place of bytes that
 * are digits their number follows: most token ids take 3 bytes. The reference is the piece of the stream before the present piece;
 * at its end the present piece becomes the reference, and another piece begins. A copy goes on across such ends, so what most
 * events have in common costs nothing. A piece is a chunk where the chunks are alike, as the first one of a block is, which has no
 * reference; and the end of a read is always one of a piece.
 *
 * Where two pieces differ, the writer looks for the end of the field in both (`pass_differences`). Finding it makes the packed form
 * short and is not needed to read it: any bytes come back as they were.
 *
 * Nothing here is of Python, and nothing is shared between streams. */
#ifndef EVENT_DELTA_H
#define EVENT_DELTA_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK_BYTES 4096              /* of memory; another is started where this many are used, */
#define BLOCK_RAW_BYTES (128 * 1024)  /* or so many are packed in it: they are unpacked at once */
#define REFERENCE_BYTES (16 * 1024)   /* the most that is kept of a piece */
#define LEAST_COPY 3                  /* shorter ones are longer as a step */
#define SHORT_TEXT 8                   /* copied at once */
#define MOST_DIGITS 9                 /* of a text that is kept as its number */
#define STEP_BYTES 32                 /* the most that a step takes without its text: three numbers and two bytes */

typedef struct Block {
    struct Block *next;
    size_t raw;        /* bytes it holds packed */
    uint32_t used, room;
    unsigned char steps[];
} Block;

typedef struct {
    Block *first, *last;
    size_t raw_bytes;  /* kept in all */
    size_t held_bytes; /* of memory */
    size_t copy;       /* of the step that is not written yet */
    char *reference;
    size_t reference_bytes, reference_room;
    size_t reference_at; /* not 0: it is there in the last block, not copied yet; many streams are silent after their first event */
} EventDelta;

enum { AS_NUMBER = 14, LONG = 15 }; /* in the place of the size of a text; of bytes to pass over: LONG */
enum { ENDS_LINE = 1, ENDS_TEXT = 2, IN_NUMBER = 4, ENDS_NUMBER = 8, DIGIT = 16, ESCAPES = 32 };

static const unsigned char CHARACTER_KINDS[256] = {
    ['\r'] = ENDS_LINE | ENDS_TEXT, ['\n'] = ENDS_LINE | ENDS_TEXT, ['"'] = ENDS_TEXT, [','] = ENDS_NUMBER, [']'] = ENDS_NUMBER,
    ['}'] = ENDS_NUMBER, ['.'] = IN_NUMBER, ['-'] = IN_NUMBER, ['+'] = IN_NUMBER, ['e'] = IN_NUMBER, ['E'] = IN_NUMBER,
    ['0'] = IN_NUMBER | DIGIT, ['1'] = IN_NUMBER | DIGIT, ['2'] = IN_NUMBER | DIGIT, ['3'] = IN_NUMBER | DIGIT,
    ['4'] = IN_NUMBER | DIGIT, ['5'] = IN_NUMBER | DIGIT, ['6'] = IN_NUMBER | DIGIT, ['7'] = IN_NUMBER | DIGIT,
    ['8'] = IN_NUMBER | DIGIT, ['9'] = IN_NUMBER | DIGIT, ['\\'] = ESCAPES,
};

static inline unsigned kinds_of(char c) { return CHARACTER_KINDS[(unsigned char)c]; }

/* How many bytes are equal from two places on. */
static inline size_t common_bytes(const char *one, const char *one_end, const char *other, const char *other_end) {
    size_t most = (size_t)(one_end - one) < (size_t)(other_end - other) ? (size_t)(one_end - one) : (size_t)(other_end - other);
    size_t count = 0;
#ifdef __SSE2__
    for (; most - count >= 16; count += 16) {
        __m128i a = _mm_loadu_si128((const __m128i *)(one + count)), b = _mm_loadu_si128((const __m128i *)(other + count));
        unsigned equal = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(a, b));
        if (equal != 0xffff) return count + (size_t)__builtin_ctz(~equal);
    }
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; most - count >= 8; count += 8) {
        uint64_t a, b;
        memcpy(&a, one + count, 8);
        memcpy(&b, other + count, 8);
        if (a != b) return count + (size_t)(__builtin_ctzll(a ^ b) >> 3);
    }
#endif
    while (count < most && one[count] == other[count]) count++;
    return count;
}

/* The end of the text of JSON at `at`, or of its line. */
static inline const char *end_of_text(const char *at, const char *end) {
    for (; at < end; at++) {
        unsigned kinds = kinds_of(*at);
        if (kinds & ENDS_TEXT) break;
        if (kinds & ESCAPES && end - at > 1) at++;
    }
    return at;
}

static inline const char *end_of_number(const char *at, const char *end) {
    while (at < end && kinds_of(*at) & IN_NUMBER) at++;
    return at;
}

static inline const char *end_of_line(const char *at, const char *end) {
    while (at < end && !(kinds_of(*at) & ENDS_LINE)) at++;
    return at;
}

/* Pass what differs at two places, neither of which is at an end: a number, or the rest of a text. Moves at least one. */
static inline void pass_difference(const char **old, const char *old_end, const char **now, const char *now_end, int escaped) {
    unsigned was = kinds_of(**old), is = kinds_of(**now);
    if ((was | is) & DIGIT && was & (IN_NUMBER | ENDS_NUMBER) && is & (IN_NUMBER | ENDS_NUMBER)) {
        *old = end_of_number(*old, old_end);
        *now = end_of_number(*now, now_end);
        return;
    }
    if (was & is & ENDS_TEXT && !escaped) {
        /* A line has more fields than the other. */
        if (is & ENDS_LINE && !(was & ENDS_LINE)) {
            *old = end_of_line(*old, old_end);
        } else {
            *now = end_of_text(*now + 1, now_end);
        }
        return;
    }
    *old = end_of_text(*old + escaped, old_end);
    *now = end_of_text(*now + escaped, now_end);
}

/* Pass what differs at two places up to where enough is equal again; how much that is. */
static inline size_t pass_differences(const char **old, const char *old_end, const char **now, const char *now_end, int escaped) {
    for (;;) {
        pass_difference(old, old_end, now, now_end, escaped);
        size_t same = common_bytes(*old, old_end, *now, now_end);
        if (same >= LEAST_COPY || *old + same == old_end || *now + same == now_end) return same;
        *old += same;
        *now += same;
        escaped = same && (*now)[-1] == '\\';
    }
}

/* --- blocks */

static inline size_t block_memory(const Block *block) { return sizeof(Block) + block->room; }

/* Have room for a step with a text of that size; 0 if there is no memory. */
static int delta_room(EventDelta *delta, size_t size) {
    Block *block = delta->last;
    size_t wanted = sizeof(Block) + block->used + STEP_BYTES + size, memory = block_memory(block);
    if (wanted <= memory) return 1;
    memory = 2 * memory < BLOCK_BYTES ? 2 * memory : BLOCK_BYTES;
    if (memory < wanted) memory = wanted;
    if (memory - sizeof(Block) > UINT32_MAX) return 0;
    Block *larger = realloc(block, memory);
    if (!larger) return 0;
    delta->held_bytes += memory - sizeof(Block) - larger->room;
    larger->room = (uint32_t)(memory - sizeof(Block));
    if (delta->first == block) {
        delta->first = larger;
    } else {
        Block *before = delta->first;
        while (before->next != block) before = before->next;
        before->next = larger;
    }
    delta->last = larger;
    return 1;
}

static inline unsigned char *put_number(unsigned char *to, size_t number) {
    for (; number >= 128; number >>= 7) *to++ = (unsigned char)(number | 128);
    *to++ = (unsigned char)number;
    return to;
}

/* The number that a text of digits is; 0 if it is anything else, or would be written otherwise. */
static inline size_t number_of(const char *text, size_t size) {
    if (size < 2 || size > MOST_DIGITS || *text == '0') return 0;
    size_t number = 0;
    for (const char *end = text + size; text < end; text++) {
        unsigned digit = (unsigned char)*text - (unsigned)'0';
        if (digit > 9) return 0;
        number = 10 * number + digit;
    }
    return number;
}

/* Write a step with the copy that is pending; 0 if there is no memory. */
static int delta_write_any(EventDelta *delta, size_t passed, const char *text, size_t size) {
    if (!delta_room(delta, size)) return 0;
    Block *block = delta->last;
    size_t copy = delta->copy, number = number_of(text, size);
    unsigned char *to = block->steps + block->used;
    *to++ = (unsigned char)(copy < 255 ? copy : 255);
    if (copy >= 255) to = put_number(to, copy - 255);
    *to++ = (unsigned char)((passed < LONG ? passed : LONG) << 4 | (number ? AS_NUMBER : size < AS_NUMBER ? size : LONG));
    if (passed >= LONG) to = put_number(to, passed - LONG);
    if (number) {
        to = put_number(to, number);
        size = 0;
    } else if (size >= AS_NUMBER) {
        to = put_number(to, size - AS_NUMBER);
    }
    if (size) memcpy(to, text, size);
    block->used = (uint32_t)(to + size - block->steps);
    delta->copy = 0;
    return 1;
}

/* The same, quicker for the usual step, whose numbers are small. Up to `end` there is more that can be read. */
static inline int delta_write(EventDelta *delta, size_t passed, const char *text, size_t size, const char *end) {
    Block *block = delta->last;
    int short_text = size <= SHORT_TEXT && end - text >= SHORT_TEXT;
    if (!short_text || delta->copy >= 255 || passed >= LONG || block->room - block->used < 2 + SHORT_TEXT) {
        return delta_write_any(delta, passed, text, size);
    }
    unsigned char *to = block->steps + block->used;
    to[0] = (unsigned char)delta->copy;
    to[1] = (unsigned char)(passed << 4 | size);
    size_t number = number_of(text, size);
    if (number) {
        to[1] = (unsigned char)(passed << 4 | AS_NUMBER);
        size = (size_t)(put_number(to + 2, number) - to - 2);
    } else {
        memcpy(to + 2, text, SHORT_TEXT); /* what is too much is written over later */
    }
    block->used += (uint32_t)(2 + size);
    delta->copy = 0;
    return 1;
}

/* Write what is pending, so that all blocks can be unpacked. */
static inline int delta_flush(EventDelta *delta) { return !delta->copy || delta_write_any(delta, 0, NULL, 0); }

/* With room for a first piece of that size; it is doubled as needed. */
static inline int delta_begin_block(EventDelta *delta, size_t size) {
    if (!delta_flush(delta)) return 0;
    size_t room = STEP_BYTES + (size < BLOCK_BYTES / 2 ? size : 0);
    Block *block = malloc(sizeof(Block) + room);
    if (!block) return 0;
    *block = (Block){.room = (uint32_t)room};
    if (delta->last) {
        delta->last->next = block;
    } else {
        delta->first = block;
    }
    delta->last = block;
    delta->held_bytes += block_memory(block);
    delta->reference_bytes = delta->reference_at = 0;
    return 1;
}

/* Keep the piece with which the next one is compared. */
static inline int delta_refer(EventDelta *delta, const char *piece, size_t size) {
    if (size > delta->reference_room || delta->reference_room > 2 * size + 1024) {
        size_t room = (size + 63) / 64 * 64;
        char *other = malloc(room);
        if (!other) return 0;
        free(delta->reference);
        delta->reference = other;
        delta->held_bytes += room - delta->reference_room;
        delta->reference_room = room;
    }
    memcpy(delta->reference, piece, size);
    delta->reference_bytes = size;
    delta->reference_at = 0;
    return 1;
}

/* The end of the reference is reached: the present piece takes its place. */
static inline void next_piece(const char **piece, const char *now, const char **old, const char **old_end) {
    size_t size = (size_t)(now - *piece);
    *old = *piece;
    *old_end = *piece + (size < REFERENCE_BYTES ? size : REFERENCE_BYTES);
    *piece = now;
}

/* --- for a stream */

/* Keep the next bytes of the stream; 0 if there is no memory, after which it is of no use. */
static inline int delta_add(EventDelta *delta, const char *data, size_t size) {
    if (!size) return 1;
    const Block *last = delta->last;
    if (!last || last->used + sizeof(Block) + 2 * STEP_BYTES > BLOCK_BYTES || last->raw >= BLOCK_RAW_BYTES) {
        if (!delta_begin_block(delta, size)) return 0;
    } else if (delta->reference_at) {
        if (!delta_refer(delta, (const char *)last->steps + delta->reference_at, delta->reference_bytes)) return 0;
    }
    const char *begin = data, *end = data + size, *piece = data;
    const char *old = delta->reference, *old_end = old + delta->reference_bytes;
    while (data < end) {
        if (old == old_end) { /* the first piece of a block */
            const char *event_end = memmem(data, (size_t)(end - data), "\n\n\r\n", 4), *text = data;
            data = event_end ? event_end + 4 : end;
            if (!delta_write_any(delta, 0, text, (size_t)(data - text))) return 0;
        } else {
            size_t same = common_bytes(old, old_end, data, end);
            for (;;) {
                delta->copy += same;
                old += same;
                data += same;
                if (old == old_end || data == end) break;
                const char *text = data, *from = old;
                same = pass_differences(&old, old_end, &data, end, data > begin && data[-1] == '\\');
                if (!delta_write(delta, (size_t)(old - from), text, (size_t)(data - text), end)) return 0;
            }
        }
        if (data == end && old < old_end && piece < end) { /* a read that ends within the reference */
            if (!delta_write_any(delta, (size_t)(old_end - old), NULL, 0)) return 0;
            old = old_end;
        }
        if (old == old_end) next_piece(&piece, data, &old, &old_end);
    }
    size_t kept = (size_t)(old_end - old);
    const Block *block = delta->last;
    if (!block->raw && kept == size && block->used > size && !memcmp(block->steps + block->used - size, old, size)) {
        delta->reference_at = block->used - size; /* the first piece alone, as it came */
        delta->reference_bytes = size;
    } else if (!delta_refer(delta, old, kept)) {
        return 0;
    }
    delta->last->raw += size;
    delta->raw_bytes += size;
    return 1;
}

static inline int get_number(const unsigned char **at, const unsigned char *end, size_t *number) {
    size_t more = 0;
    for (unsigned shift = 0; *at < end && shift < 63; shift += 7) {
        unsigned char byte = *(*at)++;
        more |= (size_t)(byte & 127) << shift;
        if (byte < 128) {
            *number += more;
            return 1;
        }
    }
    return 0;
}

/* Unpack a block into `out`, which has room for its raw bytes; 0 if it is damaged. */
static inline int block_unpack(const Block *block, char *out) {
    const unsigned char *at = block->steps, *end = at + block->used;
    const char *piece = out, *old = out, *old_end = out, *out_end = out + block->raw;
    while (at < end) {
        size_t copy = *at++;
        if (copy == 255 && !get_number(&at, end, &copy)) return 0;
        if (at == end) return 0;
        size_t passed = *at >> 4, size = *at & 15;
        at++;
        if (passed == LONG && !get_number(&at, end, &passed)) return 0;
        char digits[24];
        const char *text = NULL;
        if (size == AS_NUMBER) {
            size_t number = 0;
            if (!get_number(&at, end, &number)) return 0;
            text = digits + sizeof(digits);
            for (size = 0; number; number /= 10, size++) *(char *)--text = (char)('0' + number % 10);
        } else if (size == LONG) {
            size = AS_NUMBER;
            if (!get_number(&at, end, &size)) return 0;
        }
        while (copy) {
            size_t part = (size_t)(old_end - old) < copy ? (size_t)(old_end - old) : copy;
            if (!part || part > (size_t)(out_end - out)) return 0;
            out = mempcpy(out, old, part);
            old += part;
            copy -= part;
            if (old == old_end) next_piece(&piece, out, &old, &old_end);
        }
        if (passed > (size_t)(old_end - old) || size > (size_t)(out_end - out)) return 0;
        if (!text) {
            if (size > (size_t)(end - at)) return 0;
            text = (const char *)at;
            at += size;
        }
        out = mempcpy(out, text, size);
        old += passed;
        if (old == old_end) next_piece(&piece, out, &old, &old_end);
    }
    return out == out_end;
}

/* --- whole streams */

/* Unpack all blocks from this one on, one after the other; 0 if one is damaged. */
static inline int blocks_unpack(const Block *block, char *out) {
    for (; block; out += block->raw, block = block->next) {
        if (!block_unpack(block, out)) return 0;
    }
    return 1;
}

/* Take the first block away from the others; the caller frees it. The last one goes with what it was compared with. */
static inline Block *delta_pop(EventDelta *delta) {
    Block *block = delta->first;
    delta->raw_bytes -= block->raw;
    delta->held_bytes -= block_memory(block);
    delta->first = block->next;
    if (!delta->first) {
        delta->last = NULL;
        delta->reference_bytes = delta->reference_at = 0;
    }
    return block;
}

static inline void delta_free(EventDelta *delta) {
    while (delta->first) free(delta_pop(delta));
    free(delta->reference);
    *delta = (EventDelta){0};
}

/* Move all of the other one to the end, which goes on from there; 0 if there is no memory. */
static inline int delta_join(EventDelta *delta, EventDelta *other) {
    if (!other->first) return 1;
    if (!delta_flush(delta)) return 0;
    EventDelta joined = *other;
    if (delta->last) {
        delta->last->next = other->first;
        joined.first = delta->first;
        joined.raw_bytes += delta->raw_bytes;
        joined.held_bytes += delta->held_bytes - delta->reference_room;
    }
    free(delta->reference);
    *other = (EventDelta){0};
    *delta = joined;
    return 1;
}

#endif
