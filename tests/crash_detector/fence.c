/* Loaded before libc: gives torch its memory between two pages that cannot be touched, so that a kernel which writes
   outside of its result ends there. Bytes between the end of a block and the page after it, which alignment leaves,
   are filled with a pattern that is compared when the block is freed. Blocks are never used again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define ARENA ((size_t)1 << 40)
#define LARGEST ((size_t)1 << 24)
#define PATTERN 0xA5

struct block { size_t bytes, inside; }; /* at the start of the first page, which cannot be read while the block lives */

static char *arena, *next;
static void (*real_free)(void *);

void fence_start(void) {
    arena = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    next = arena == MAP_FAILED ? (arena = NULL) : arena;
}

static int is_fenced(const void *p) { return arena && (const char *)p >= arena && (const char *)p < arena + ARENA; }

int posix_memalign(void **result, size_t alignment, size_t bytes) {
    static int (*real)(void **, size_t, size_t);
    if (!arena || bytes == 0 || bytes > LARGEST || alignment > PAGE) {
        if (!real) real = dlsym(RTLD_NEXT, "posix_memalign");
        return real(result, alignment, bytes);
    }
    size_t inside = (bytes + PAGE - 1) / PAGE * PAGE;
    char *first = __atomic_fetch_add(&next, inside + 2 * PAGE, __ATOMIC_SEQ_CST);
    if (first + inside + 2 * PAGE > arena + ARENA) return ENOMEM;
    if (mprotect(first, PAGE + inside, PROT_READ | PROT_WRITE)) return ENOMEM;
    *(struct block *)first = (struct block){bytes, inside};
    char *start = first + PAGE + (inside - bytes) / alignment * alignment;
    memset(start + bytes, PATTERN, first + PAGE + inside - start - bytes);
    if (mprotect(first, PAGE, PROT_NONE)) return ENOMEM;
    *result = start;
    return 0;
}

static void stop(const char *message) {
    if (write(2, message, strlen(message)) >= 0) abort();
    abort();
}

void free(void *p) {
    if (!is_fenced(p)) {
        if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
        real_free(p);
        return;
    }
    char *start = p, *first = (char *)((uintptr_t)start / PAGE * PAGE) - PAGE;
    if (mprotect(first, PAGE, PROT_READ | PROT_WRITE)) stop("fence: freed memory that was not allocated\n");
    struct block block = *(struct block *)first;
    for (char *q = start + block.bytes; q < first + PAGE + block.inside; q++)
        if ((unsigned char)*q != PATTERN) stop("fence: written behind the end of a result\n");
    mmap(first, PAGE + block.inside, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
