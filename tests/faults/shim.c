/* Faults in the system calls of one process, by LD_PRELOAD.
 *
 * FAULT_CALLS   names, comma-separated: pread preadv pwrite write fsync fdatasync ftruncate fallocate rename unlink rmdir mkdir open
 * FAULT_PATH    only calls on a path that holds this text
 * FAULT_NTH     from 1: the call that fails, counted over all that match; 0: none fails
 * FAULT_DO      a number: fail with that errno; "short": transfer half of it; "end": transfer nothing; "kill": die before it
 * FAULT_EVERY   set: every call from the nth on fails
 * FAULT_COUNT   a file that receives the number of calls that matched when the process ends
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
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, FAIL, SHORT, END };

static atomic_long calls;

static int listed(const char *name) {
    const char *list = getenv("FAULT_CALLS");
    size_t length = strlen(name);
    while (list && *list) {
        size_t word = strcspn(list, ",");
        if (word == length && !strncmp(list, name, length)) return 1;
        list += word + (list[word] == ',');
    }
    return 0;
}

static int fault_on(const char *name, const char *path) {
    const char *wanted = getenv("FAULT_PATH"), *nth = getenv("FAULT_NTH"), *action = getenv("FAULT_DO");
    if (!listed(name) || !wanted || !path || !strstr(path, wanted)) return NOTHING;
    long number = atomic_fetch_add(&calls, 1) + 1, failing = nth ? atol(nth) : 0;
    if (!failing || number < failing || (number > failing && !getenv("FAULT_EVERY"))) return NOTHING;
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

ON_DESCRIPTOR(fsync, "fsync")
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

#define OPEN(symbol)                                                         \
    int symbol(const char *path, int flags, ...) {                           \
        va_list more;                                                        \
        va_start(more, flags);                                               \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;            \
        va_end(more);                                                        \
        if (flags & (O_WRONLY | O_RDWR) && fault_on("open", path) != NOTHING) return -1; \
        return REAL(int, #symbol, const char *, int, ...)(path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
