/* Counts the bytes that a process has asked of malloc and not freed, and their peak: exact where pages are too coarse.

   Put before glibc with LD_PRELOAD. What is counted is what malloc really gave, its rounding up included; not what it
   holds free, nor what is mapped past it, nor both places while realloc moves something. */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void *__libc_valloc(size_t);
extern void *__libc_pvalloc(size_t);
extern void __libc_free(void *);

static atomic_long live, peak;

long live_bytes(void) { return atomic_load(&live); }
long live_peak(void) { return atomic_load(&peak); }
void live_restart(void) { atomic_store(&peak, atomic_load(&live)); }

static void *added(void *place) {
    long size = (long)malloc_usable_size(place), now = atomic_fetch_add(&live, size) + size, before = atomic_load(&peak);
    while (now > before && !atomic_compare_exchange_weak(&peak, &before, now)) continue;
    return place;
}

void *malloc(size_t size) { return added(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return added(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }
void *valloc(size_t size) { return added(__libc_valloc(size)); }
void *pvalloc(size_t size) { return added(__libc_pvalloc(size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **place, size_t alignment, size_t size) {
    void *found = memalign(alignment, size);
    if (found == NULL) return ENOMEM;
    *place = found;
    return 0;
}

void free(void *place) {
    atomic_fetch_sub(&live, (long)malloc_usable_size(place));
    __libc_free(place);
}

void *realloc(void *place, size_t size) {
    long before = (long)malloc_usable_size(place);
    void *found = __libc_realloc(place, size);
    if (found == NULL && size) return NULL;
    atomic_fetch_sub(&live, before);
    return added(found);
}
