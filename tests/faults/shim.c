/* Numbers every call that changes files below given folders, and lets the n-th of them fail or kill the process.
 *
 * Loaded with LD_PRELOAD. Nothing happens until faults_arm(control) is called, or a process starts with the name of a
 * control file in EVENHAND_FAULTS. The control file is a struct control, shared by all processes that are armed with it;
 * shim.py writes it. The log has one line a call: number, kind, path, and for a new name the old one; number 0 is a call outside.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, TRUNCATE = 64, LINK = 128 };
enum action { COUNT, KILL_BEFORE, KILL_AFTER, KILL_MIDDLE, FAIL_ONCE, FAIL_ONWARDS, FULL };

struct control {
    _Atomic uint32_t calls;  /* numbered so far */
    uint32_t at;             /* the call at which something happens */
    uint32_t action;
    int32_t error;
    uint32_t kinds;          /* kinds of call that fail */
    _Atomic uint32_t failed; /* calls that were made to fail */
    uint64_t room;           /* bytes that may be written, for FULL */
    _Atomic uint64_t written;
    char folders[4096];      /* one a line */
    char log[1024];
};

static struct control *control;
static int log_file = -1;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

int faults_arm(const char *path) {
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (file < 0) return -1;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (found == MAP_FAILED) return -1;
    struct control *next = found;
    int opened = syscall(SYS_openat, AT_FDCWD, next->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (opened < 0) return -1;
    log_file = fcntl(opened, F_DUPFD_CLOEXEC, 700);
    syscall(SYS_close, opened);
    setenv("EVENHAND_FAULTS", path, 1);
    control = next;
    return 0;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("EVENHAND_FAULTS");
    if (path != NULL) faults_arm(path);
}

static int below(const char *path) {
    const char *folder = control->folders;
    while (*folder) {
        size_t length = strcspn(folder, "\n");
        if (length && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0)) return 1;
        folder += length + (folder[length] == '\n');
    }
    return 0;
}

static _Thread_local const char *from_name = "";

static void note(uint32_t number, const char *kind, const char *path) {
    char line[2 * PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%u\t%s\t%s\t%s\n", number, kind, path, from_name);
    if (length > 0) syscall(SYS_write, log_file, line, (size_t)length < sizeof line ? (size_t)length : sizeof line - 1);
}

static void of_descriptor(int file, char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void absolute(int folder, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    char start[PATH_MAX];
    if (folder != AT_FDCWD) of_descriptor(folder, start);
    else if (getcwd(start, sizeof start) == NULL) start[0] = 0;
    if (snprintf(path, PATH_MAX, "%s/%s", start, name) >= PATH_MAX) path[0] = 0;
}

static void die(void) { syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); }

/* Numbers a call; returns 0 if it does not matter, its number if it is to go on, and -1 with errno if it fails. */
static int64_t enter(enum kind kind, const char *name, const char *path) {
    if (control == NULL || path[0] != '/') return 0;
    if (!below(path)) {
        if (kind != WRITE && kind != SYNC && strncmp(path, "/dev/", 5) && strncmp(path, "/proc/", 6))
            note(0, name, path);
        return 0;
    }
    uint32_t number = atomic_fetch_add(&control->calls, 1) + 1;
    note(number, name, path);
    if (number == control->at && control->action == KILL_BEFORE) die();
    if (number < control->at || !(kind & control->kinds)) return number;
    if (control->action == FAIL_ONWARDS
        || (control->action == FAIL_ONCE && atomic_fetch_add(&control->failed, 1) == 0)) {
        errno = control->error;
        return -1;
    }
    return number;
}

static void leave(int64_t number) {
    if (number > 0 && number == control->at && control->action == KILL_AFTER) {
        int before = errno;
        die();
        errno = before;
    }
}

/* How many bytes of a write may be written. */
static size_t allowed(int64_t number, size_t count) {
    if (number <= 0 || control->action != FULL) return count;
    uint64_t before = atomic_load(&control->written);
    uint64_t left = control->room > before ? control->room - before : 0;
    size_t now = count < left ? count : left;
    atomic_fetch_add(&control->written, now);
    return now;
}

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

static int64_t enter_open(int folder, const char *name, int flags) {
    if (control == NULL || !writes(flags)) return 0;
    char path[PATH_MAX];
    absolute(folder, name, path);
    return enter(OPEN, "open", path);
}

/* A link that led out of the folders is a write outside. */
static void opened(int64_t number, int file) {
    char path[PATH_MAX];
    if (number > 0 && file >= 0) {
        of_descriptor(file, path);
        if (path[0] == '/' && !below(path)) note(0, "open", path);
    }
    leave(number);
}

#define MODE                                                       \
    mode_t mode = 0;                                               \
    if (flags & (O_CREAT | O_TMPFILE)) {                           \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        mode = va_arg(rest, mode_t);                               \
        va_end(rest);                                              \
    }

static int open_any(int folder, const char *name, int flags, mode_t mode) {
    int64_t number = enter_open(folder, name, flags);
    if (number < 0) return -1;
    int file = syscall(SYS_openat, folder, name, flags, mode);
    if (number) {
        int before = errno;
        opened(number, file);
        errno = before;
    }
    return file;
}

int open(const char *name, int flags, ...) { MODE return open_any(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return open_any(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE return open_any(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE return open_any(folder, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_any(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return open_any(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

#define OPEN_STREAM(function)                                                                 \
    FILE *function(const char *name, const char *mode) {                                      \
        int64_t number = mode[0] == 'r' && !strchr(mode, '+') ? 0 : enter_open(AT_FDCWD, name, O_WRONLY); \
        if (number < 0) return NULL;                                                          \
        FILE *stream = REAL(function)(name, mode);                                            \
        opened(number, stream ? fileno(stream) : -1);                                         \
        return stream;                                                                        \
    }
OPEN_STREAM(fopen)
OPEN_STREAM(fopen64)

static int64_t enter_file(enum kind kind, const char *name, int file) {
    if (control == NULL || file == log_file) return 0;
    char path[PATH_MAX];
    of_descriptor(file, path);
    return enter(kind, name, path);
}

/* Number, size after cuts, and the write itself in the order in which faults can fall. */
#define WRITE_WITH(file, count, call)                                               \
    int64_t number = enter_file(WRITE, "write", file);                              \
    if (number < 0) return -1;                                                      \
    if (number > 0) {                                                               \
        int half = number == control->at && control->action == KILL_MIDDLE;         \
        size_t size = half ? (count) / 2 : allowed(number, count);                  \
        if (size == 0 && (count) && !half) {                                        \
            errno = ENOSPC;                                                         \
            return -1;                                                              \
        }                                                                           \
        ssize_t done = (call);                                                      \
        if (half) die();                                                            \
        leave(number);                                                              \
        return done;                                                                \
    }                                                                               \
    size_t size = (count);                                                          \
    return (call);

ssize_t write(int file, const void *data, size_t count) {
    WRITE_WITH(file, count, syscall(SYS_write, file, data, size))
}
ssize_t pwrite(int file, const void *data, size_t count, off_t offset) {
    WRITE_WITH(file, count, syscall(SYS_pwrite64, file, data, size, offset))
}
ssize_t pwrite64(int file, const void *data, size_t count, off_t offset) {
    WRITE_WITH(file, count, syscall(SYS_pwrite64, file, data, size, offset))
}
ssize_t copy_file_range(int from, off64_t *begin, int file, off64_t *end, size_t count, unsigned flags) {
    WRITE_WITH(file, count, syscall(SYS_copy_file_range, from, begin, file, end, size, flags))
}
ssize_t sendfile(int file, int from, off_t *offset, size_t count) {
    WRITE_WITH(file, count, syscall(SYS_sendfile, file, from, offset, size))
}
ssize_t sendfile64(int file, int from, off64_t *offset, size_t count) {
    WRITE_WITH(file, count, syscall(SYS_sendfile, file, from, offset, size))
}
/* Cut at its first piece, which is a whole write of its own as far as a reader can tell. */
ssize_t writev(int file, const struct iovec *parts, int pieces) {
    WRITE_WITH(file, parts[0].iov_len,
               size == parts[0].iov_len ? syscall(SYS_writev, file, parts, pieces)
                                        : syscall(SYS_write, file, parts[0].iov_base, size))
}

#define ON_FILE(kind, label, file, call)                        \
    int64_t number = enter_file(kind, label, file);             \
    if (number < 0) return -1;                                  \
    int done = (call);                                          \
    leave(number);                                              \
    return done;

int fsync(int file) { ON_FILE(SYNC, "sync", file, syscall(SYS_fsync, file)) }
int fdatasync(int file) { ON_FILE(SYNC, "sync", file, syscall(SYS_fdatasync, file)) }
int ftruncate(int file, off_t size) { ON_FILE(TRUNCATE, "truncate", file, syscall(SYS_ftruncate, file, size)) }
int ftruncate64(int file, off64_t size) { ON_FILE(TRUNCATE, "truncate", file, syscall(SYS_ftruncate, file, size)) }

#define ON_PATH(kind, label, folder, name, call)                \
    char path[PATH_MAX];                                        \
    path[0] = 0;                                                \
    if (control != NULL) absolute(folder, name, path);          \
    int64_t number = enter(kind, label, path);                  \
    if (number < 0) return -1;                                  \
    int done = (call);                                          \
    leave(number);                                              \
    return done;

#define ON_TWO(kind, label, source, from, folder, to, call)     \
    char old[PATH_MAX];                                         \
    old[0] = 0;                                                 \
    if (control != NULL) absolute(source, from, old);           \
    from_name = old;                                            \
    char path[PATH_MAX];                                        \
    path[0] = 0;                                                \
    if (control != NULL) absolute(folder, to, path);            \
    int64_t number = enter(kind, label, path);                  \
    from_name = "";                                             \
    if (number < 0) return -1;                                  \
    int done = (call);                                          \
    leave(number);                                              \
    return done;

int rename(const char *from, const char *to) {
    ON_TWO(RENAME, "rename", AT_FDCWD, from, AT_FDCWD, to, syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0))
}
int renameat(int source, const char *from, int folder, const char *to) {
    ON_TWO(RENAME, "rename", source, from, folder, to, syscall(SYS_renameat2, source, from, folder, to, 0))
}
int renameat2(int source, const char *from, int folder, const char *to, unsigned flags) {
    ON_TWO(RENAME, "rename", source, from, folder, to, syscall(SYS_renameat2, source, from, folder, to, flags))
}
int unlink(const char *name) { ON_PATH(UNLINK, "unlink", AT_FDCWD, name, syscall(SYS_unlinkat, AT_FDCWD, name, 0)) }
int unlinkat(int folder, const char *name, int flags) {
    ON_PATH(UNLINK, "unlink", folder, name, syscall(SYS_unlinkat, folder, name, flags))
}
int rmdir(const char *name) {
    ON_PATH(UNLINK, "rmdir", AT_FDCWD, name, syscall(SYS_unlinkat, AT_FDCWD, name, AT_REMOVEDIR))
}
int mkdir(const char *name, mode_t mode) {
    ON_PATH(MKDIR, "mkdir", AT_FDCWD, name, syscall(SYS_mkdirat, AT_FDCWD, name, mode))
}
int mkdirat(int folder, const char *name, mode_t mode) {
    ON_PATH(MKDIR, "mkdir", folder, name, syscall(SYS_mkdirat, folder, name, mode))
}
int truncate(const char *name, off_t size) {
    ON_PATH(TRUNCATE, "truncate", AT_FDCWD, name, syscall(SYS_truncate, name, size))
}
int link(const char *from, const char *to) {
    ON_TWO(LINK, "link", AT_FDCWD, from, AT_FDCWD, to, syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0))
}
int linkat(int source, const char *from, int folder, const char *to, int flags) {
    ON_TWO(LINK, "link", source, from, folder, to, syscall(SYS_linkat, source, from, folder, to, flags))
}
int symlink(const char *from, const char *to) {
    ON_PATH(LINK, "symlink", AT_FDCWD, to, syscall(SYS_symlinkat, from, AT_FDCWD, to))
}
