/* Faults in the system calls of one process, by LD_PRELOAD.
 *
 * FAULT_CALLS   names, comma-separated: pread preadv pwrite read write fsync fdatasync ftruncate fallocate rename link unlink rmdir
 *               mkdir flock; open (to write) and openread; fsyncdir (only of directories)
 * FAULT_PATH    only calls on a path that holds this text
 * FAULT_NTH     from 1: the call that fails, counted over all that match; 0: none fails
 * FAULT_DO      a number: fail with that errno; "short": transfer half of it; "end": transfer nothing; "kill": die before it
 * FAULT_EVERY   set: every call from the nth on fails
 * FAULT_COUNT   a file that receives the number of calls that matched when the process ends
 *
 * A process that forks itself calls fault_arm in the fork instead; fault_count is for a fork with one thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, FAIL, SHORT, END };

static atomic_long calls;
static struct {
    int armed, every;
    long nth;
    char calls[256], path[PATH_MAX], action[16];
} armed;

void fault_arm(const char *names, const char *path, long nth, const char *action, int every) {
    snprintf(armed.calls, sizeof armed.calls, "%s", names);
    snprintf(armed.path, sizeof armed.path, "%s", path);
    snprintf(armed.action, sizeof armed.action, "%s", action);
    armed.nth = nth;
    armed.every = every;
    atomic_store(&calls, 0);
    armed.armed = 1;
}

/* How many calls of one name matched so far, to learn before what there is to fail. */
static struct { const char *name; atomic_long count; } tally[32];

long fault_count(const char *name) {
    for (int i = 0; i < 32 && tally[i].name; i++)
        if (!strcmp(tally[i].name, name)) return atomic_load(&tally[i].count);
    return 0;
}

static void count(const char *name) {
    for (int i = 0; i < 32; i++) {
        if (!tally[i].name) tally[i].name = name;
        if (!strcmp(tally[i].name, name)) {
            atomic_fetch_add(&tally[i].count, 1);
            return;
        }
    }
}

static int listed(const char *name) {
    const char *list = armed.armed ? armed.calls : getenv("FAULT_CALLS");
    size_t length = strlen(name);
    while (list && *list) {
        size_t word = strcspn(list, ",");
        if (word == length && !strncmp(list, name, length)) return 1;
        list += word + (list[word] == ',');
    }
    return 0;
}

static int fault_on(const char *name, const char *path) {
    if (!listed(name)) return NOTHING;
    const char *wanted = armed.armed ? armed.path : getenv("FAULT_PATH");
    if (!wanted || !path || !strstr(path, wanted)) return NOTHING;
    const char *nth = getenv("FAULT_NTH"), *action = armed.armed ? armed.action : getenv("FAULT_DO");
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (armed.armed) count(name);
    long failing = armed.armed ? armed.nth : nth ? atol(nth) : 0;
    int every = armed.armed ? armed.every : getenv("FAULT_EVERY") != NULL;
    if (!failing || number < failing || (number > failing && !every)) return NOTHING;
    if (!strcmp(action, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(action, "short")) return SHORT;
    if (!strcmp(action, "end")) return END;
    errno = atoi(action);
    return FAIL;
}

static int fault(const char *name, int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return NOTHING;
    path[length] = 0;
    return fault_on(name, path);
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("FAULT_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", atomic_load(&calls));
    fclose(file);
}

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define TRANSFER(symbol, name, type, buffer)                                              \
    ssize_t symbol(int fd, buffer data, size_t size, off_t offset) {                      \
        int what = fault(name, fd);                                                       \
        if (what == FAIL) return -1;                                                      \
        if (what == END) return 0;                                                        \
        if (what == SHORT) size = (size + 1) / 2;                                         \
        return REAL(ssize_t, #symbol, int, buffer, size_t, off_t)(fd, data, size, offset); \
    }

TRANSFER(pread, "pread", ssize_t, void *)
TRANSFER(pread64, "pread", ssize_t, void *)
TRANSFER(pwrite, "pwrite", ssize_t, const void *)
TRANSFER(pwrite64, "pwrite", ssize_t, const void *)

#define VECTOR(symbol, MORE, ...)                                                                       \
    ssize_t symbol(int fd, const struct iovec *parts, int count, off_t offset MORE) {                   \
        int what = fault("preadv", fd);                                                                 \
        if (what == FAIL) return -1;                                                                    \
        if (what == END) return 0;                                                                      \
        struct iovec first = parts[0];                                                                  \
        if (what == SHORT) {                                                                            \
            first.iov_len = (first.iov_len + 1) / 2;                                                    \
            parts = &first;                                                                             \
            count = 1;                                                                                  \
        }                                                                                               \
        return REAL(ssize_t, #symbol, int, const struct iovec *, int, off_t, ...)(__VA_ARGS__);         \
    }
#define NONE
#define FLAGS , int flags

VECTOR(preadv, NONE, fd, parts, count, offset)
VECTOR(preadv64, NONE, fd, parts, count, offset)
VECTOR(preadv2, FLAGS, fd, parts, count, offset, flags)
VECTOR(preadv64v2, FLAGS, fd, parts, count, offset, flags)

/* A call on ``path`` below the directory that the descriptor is. */
static int fault_below(const char *name, int directory, const char *path) {
    if (directory == AT_FDCWD || path[0] == '/') return fault_on(name, path);
    char link[64], whole[2 * PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, whole, PATH_MAX);
    if (length < 0) return NOTHING;
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return fault_on(name, whole);
}

ssize_t read(int fd, void *data, size_t size) {
    int what = listed("read") ? fault("read", fd) : NOTHING;
    if (what == FAIL) return -1;
    if (what == END) return 0;
    if (what == SHORT) size = (size + 1) / 2;
    return REAL(ssize_t, "read", int, void *, size_t)(fd, data, size);
}

int flock(int fd, int operation) {
    if (fault("flock", fd) != NOTHING) return -1;
    return REAL(int, "flock", int, int)(fd, operation);
}

int link(const char *from, const char *to) {
    if (fault_on("link", to) != NOTHING) return -1;
    return REAL(int, "link", const char *, const char *)(from, to);
}

int linkat(int one, const char *from, int other, const char *to, int flags) {
    if (fault_below("link", other, to) != NOTHING) return -1;
    return REAL(int, "linkat", int, const char *, int, const char *, int)(one, from, other, to, flags);
}

int renameat(int one, const char *from, int other, const char *to) {
    if (fault_below("rename", one, from) != NOTHING) return -1;
    return REAL(int, "renameat", int, const char *, int, const char *)(one, from, other, to);
}

int unlinkat(int directory, const char *path, int flags) {
    if (fault_below(flags & AT_REMOVEDIR ? "rmdir" : "unlink", directory, path) != NOTHING) return -1;
    return REAL(int, "unlinkat", int, const char *, int)(directory, path, flags);
}

ssize_t write(int fd, const void *data, size_t size) {
    int what = fault("write", fd);
    if (what == FAIL) return -1;
    if (what == SHORT) size = (size + 1) / 2;
    return REAL(ssize_t, "write", int, const void *, size_t)(fd, data, size);
}

#define ON_DESCRIPTOR(symbol, name)                              \
    int symbol(int fd) {                                         \
        if (fault(name, fd) != NOTHING) return -1;               \
        return REAL(int, #symbol, int)(fd);                      \
    }

int fsync(int fd) {
    struct stat status;
    if (fault("fsync", fd) != NOTHING) return -1;
    if (!fstat(fd, &status) && S_ISDIR(status.st_mode) && fault("fsyncdir", fd) != NOTHING) return -1;
    return REAL(int, "fsync", int)(fd);
}

ON_DESCRIPTOR(fdatasync, "fdatasync")

#define TRUNCATE(symbol)                                         \
    int symbol(int fd, off_t size) {                             \
        if (fault("ftruncate", fd) != NOTHING) return -1;        \
        return REAL(int, #symbol, int, off_t)(fd, size);         \
    }

TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(symbol)                                                     \
    int symbol(int fd, off_t begin, off_t size) {                            \
        if (fault("fallocate", fd) != NOTHING) return errno;                 \
        return REAL(int, #symbol, int, off_t, off_t)(fd, begin, size);       \
    }

ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)

int rename(const char *from, const char *to) {
    if (fault_on("rename", from) != NOTHING) return -1;
    return REAL(int, "rename", const char *, const char *)(from, to);
}

int renameat2(int one, const char *from, int other, const char *to, unsigned int flags) {
    if (fault_on("rename", from) != NOTHING) return -1;
    return REAL(int, "renameat2", int, const char *, int, const char *, unsigned int)(one, from, other, to, flags);
}

int unlink(const char *path) {
    if (fault_on("unlink", path) != NOTHING) return -1;
    return REAL(int, "unlink", const char *)(path);
}

int rmdir(const char *path) {
    if (fault_on("rmdir", path) != NOTHING) return -1;
    return REAL(int, "rmdir", const char *)(path);
}

int mkdir(const char *path, mode_t mode) {
    if (fault_on("mkdir", path) != NOTHING) return -1;
    return REAL(int, "mkdir", const char *, mode_t)(path, mode);
}

static int fault_open(int directory, const char *path, int flags) {
    return fault_below(flags & (O_WRONLY | O_RDWR) ? "open" : "openread", directory, path);
}

#define OPEN(symbol)                                                         \
    int symbol(const char *path, int flags, ...) {                           \
        va_list more;                                                        \
        va_start(more, flags);                                               \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;            \
        va_end(more);                                                        \
        if (fault_open(AT_FDCWD, path, flags) != NOTHING) return -1;         \
        return REAL(int, #symbol, const char *, int, ...)(path, flags, mode); \
    }

OPEN(open)
OPEN(open64)

#define OPEN_AT(symbol)                                                      \
    int symbol(int directory, const char *path, int flags, ...) {            \
        va_list more;                                                        \
        va_start(more, flags);                                               \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;            \
        va_end(more);                                                        \
        if (fault_open(directory, path, flags) != NOTHING) return -1;        \
        return REAL(int, #symbol, int, const char *, int, ...)(directory, path, flags, mode); \
    }

OPEN_AT(openat)
OPEN_AT(openat64)
