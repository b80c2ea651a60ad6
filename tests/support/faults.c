/* A machine whose kernel refuses things and whose clocks are set: preloaded into Stoker's own processes.

   CHAOS_FAULTS names a file that every process of one machine maps: which calls fail there, how often and with which
   error, and how far the clocks are off. Only Python is affected: a job that is another program is the user's. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define LAG (2 * SECOND)
#define RULES 10

/* The same numbers as in faults.py. */
enum { OPEN = 1, WRITE = 2, SYNC = 4, READ = 8, NAME = 16, SOCKET = 32, HANDLE = 64, FORK = 128 };

struct rule {
    uint32_t active;
    uint32_t calls;
    int32_t error;  /* ENOENT: only files that are young; below 0: no failure, but a delay of that many milliseconds */
    uint32_t per_million;
    uint64_t fired;
    char role[16];  /* how the process is called, to its end; every process when empty */
    char path[216]; /* what the path begins with; every path when empty */
};

struct control {
    int64_t wall;     /* nanoseconds that the time of day is ahead */
    int64_t suspended; /* nanoseconds that the machine slept: the time of day and the time since boot are ahead */
    uint64_t draws;
    uint64_t unused;
    struct rule rules[RULES];
};

static struct control *control;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void)
{
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    const char *path = getenv("CHAOS_FAULTS");
    if (length <= 0 || path == NULL)
        return;
    program[length] = '\0';
    const char *name = strrchr(program, '/');
    if (name == NULL || strncmp(name + 1, "python", 6) != 0)
        return;
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        control = mapped;
}

static int drawn(const struct rule *rule)
{
    uint64_t draw = __atomic_add_fetch(&control->draws, 1, __ATOMIC_RELAXED) * 0x9E3779B97F4A7C15ULL;
    draw ^= draw >> 29;
    draw *= 0xBF58476D1CE4E5B9ULL;
    return (draw >> 32) % 1000000 < rule->per_million;
}

static int is_played_here(const struct rule *rule)
{
    char name[16] = "";
    if (rule->role[0] == '\0')
        return 1;
    prctl(PR_GET_NAME, name);
    return strncmp(name, rule->role, sizeof name) == 0;
}

/* A file that another client of a network file system may not see yet; one that is replaced keeps its old content. */
static int is_young(const char *path)
{
    struct stat found;
    struct timespec now;
    const char *name = strrchr(path, '/');
    if (name == NULL || strcmp(name, "/status.json") == 0 || fstatat(AT_FDCWD, path, &found, 0) != 0)
        return 0;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    return (now.tv_sec - found.st_ctim.tv_sec) * SECOND + now.tv_nsec - found.st_ctim.tv_nsec < LAG;
}

/* Whether this call is to fail now; `errno` is set then. Of `path` and `descriptor` one is given, or neither. */
static int fails(uint32_t call, const char *path, int descriptor, int creates)
{
    if (control == NULL)
        return 0;
    for (int number = 0; number < RULES; number++) {
        struct rule *rule = &control->rules[number];
        char known[PATH_MAX];
        if (!__atomic_load_n(&rule->active, __ATOMIC_ACQUIRE) || !(rule->calls & call) || !is_played_here(rule))
            continue;
        if ((rule->error == ENOSPC && !creates) || (rule->error == ENOENT && (creates || path == NULL)))
            continue;
        if (rule->path[0] != '\0' && (path != NULL || descriptor >= 0)) {
            if (path == NULL) {
                char link[64];
                snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
                ssize_t length = readlink(link, known, sizeof known - 1);
                known[length > 0 ? length : 0] = '\0';
                path = known;
            }
            if (strncmp(path, rule->path, strlen(rule->path)) != 0)
                continue;
        }
        if ((rule->error == ENOENT && !is_young(path)) || !drawn(rule))
            continue;
        __atomic_add_fetch(&rule->fired, 1, __ATOMIC_RELAXED);
        if (rule->error < 0) {
            struct timespec pause = {-rule->error / 1000, -rule->error % 1000 * 1000000L};
            nanosleep(&pause, NULL);
            continue;
        }
        errno = rule->error;
        return 1;
    }
    return 0;
}

/* Files */

#define OPENS(name, first, path_of, ...) \
    int name first \
    { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        REAL(name); \
        return fails(OPEN, path_of, -1, flags & O_CREAT) ? -1 : real(__VA_ARGS__, flags, mode); \
    }

OPENS(open, (const char *path, int flags, ...), path, path)
OPENS(open64, (const char *path, int flags, ...), path, path)
OPENS(openat, (int place, const char *path, int flags, ...), path, place, path)
OPENS(openat64, (int place, const char *path, int flags, ...), path, place, path)

#define ON_FILE(kind, call, creates, name, first, ...) \
    kind name first \
    { \
        REAL(name); \
        return fails(call, NULL, file, creates) ? -1 : real(__VA_ARGS__); \
    }

ON_FILE(ssize_t, WRITE, 1, write, (int file, const void *data, size_t size), file, data, size)
ON_FILE(ssize_t, WRITE, 1, pwrite, (int file, const void *data, size_t size, off_t at), file, data, size, at)
ON_FILE(ssize_t, WRITE, 1, pwrite64, (int file, const void *data, size_t size, off64_t at), file, data, size, at)
ON_FILE(ssize_t, WRITE, 1, writev, (int file, const struct iovec *parts, int count), file, parts, count)
ON_FILE(ssize_t, READ, 0, read, (int file, void *data, size_t size), file, data, size)
ON_FILE(ssize_t, READ, 0, pread, (int file, void *data, size_t size, off_t at), file, data, size, at)
ON_FILE(ssize_t, READ, 0, pread64, (int file, void *data, size_t size, off64_t at), file, data, size, at)
ON_FILE(int, SYNC, 1, fsync, (int file), file)
ON_FILE(int, SYNC, 1, fdatasync, (int file), file)
ON_FILE(int, WRITE, 1, ftruncate, (int file, off_t size), file, size)
ON_FILE(int, WRITE, 1, ftruncate64, (int file, off64_t size), file, size)

#define ON_NAME(name, first, creates, path, ...) \
    int name first \
    { \
        REAL(name); \
        return fails(NAME, path, -1, creates) ? -1 : real(__VA_ARGS__); \
    }

ON_NAME(mkdir, (const char *path, mode_t mode), 1, path, path, mode)
ON_NAME(rename, (const char *from, const char *to), 1, to, from, to)
ON_NAME(link, (const char *from, const char *to), 1, to, from, to)
ON_NAME(unlink, (const char *path), 0, path, path)
ON_NAME(rmdir, (const char *path), 0, path, path)
ON_NAME(utimensat, (int place, const char *path, const struct timespec at[2], int flags), 0, path, place, path, at, flags)

/* What a process holds */

#define ANYWHERE(call, name, first, ...) \
    int name first \
    { \
        REAL(name); \
        return fails(call, NULL, -1, 0) ? -1 : real(__VA_ARGS__); \
    }

ANYWHERE(SOCKET, socket, (int domain, int type, int protocol), domain, type, protocol)
ANYWHERE(SOCKET, socketpair, (int domain, int type, int protocol, int ends[2]), domain, type, protocol, ends)
ANYWHERE(SOCKET, connect, (int line, const struct sockaddr *to, socklen_t size), line, to, size)
ANYWHERE(SOCKET, accept4, (int line, struct sockaddr *from, socklen_t *size, int flags), line, from, size, flags)
ANYWHERE(HANDLE, pipe, (int ends[2]), ends)
ANYWHERE(HANDLE, pipe2, (int ends[2], int flags), ends, flags)
int epoll_create1(int flags);
ANYWHERE(HANDLE, epoll_create1, (int flags), flags)
int eventfd(unsigned int count, int flags);
ANYWHERE(HANDLE, eventfd, (unsigned int count, int flags), count, flags)
int inotify_init1(int flags);
ANYWHERE(HANDLE, inotify_init1, (int flags), flags)

/* Processes */

pid_t fork(void)
{
    REAL(fork);
    return fails(FORK, NULL, -1, 0) ? -1 : real();
}

/* The frame that calls it would be gone when the child returns: for the tests a fork does as well. */
pid_t vfork(void)
{
    return fork();
}

long syscall(long number, ...)
{
    va_list rest;
    long a[6];
    static long (*real)(long, ...);
    if (real == NULL)
        real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_start(rest, number);
    for (int place = 0; place < 6; place++)
        a[place] = va_arg(rest, long);
    va_end(rest);
    if ((number == SYS_pidfd_open && fails(HANDLE, NULL, -1, 0)) || (number == SYS_clone3 && fails(FORK, NULL, -1, 0)))
        return -1;
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Clocks */

static int64_t ahead(clockid_t clock)
{
    if (control == NULL)
        return 0;
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
        return __atomic_load_n(&control->wall, __ATOMIC_ACQUIRE) + __atomic_load_n(&control->suspended, __ATOMIC_ACQUIRE);
    case CLOCK_BOOTTIME:
        return __atomic_load_n(&control->suspended, __ATOMIC_ACQUIRE);
    }
    return 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    REAL(clock_gettime);
    int result = real(clock, now);
    int64_t off = result == 0 ? ahead(clock) : 0;
    if (off != 0) {
        int64_t time = now->tv_sec * SECOND + now->tv_nsec + off;
        *now = (struct timespec){.tv_sec = time / SECOND, .tv_nsec = time % SECOND};
    }
    return result;
}

/* The kernel knows nothing of how far the clocks are off here. */
int timerfd_settime(int timer, int flags, const struct itimerspec *when, struct itimerspec *before)
{
    struct itimerspec known = *when;
    REAL(timerfd_settime);
    int64_t due = known.it_value.tv_sec * SECOND + known.it_value.tv_nsec;
    if ((flags & TFD_TIMER_ABSTIME) && due > 0) {
        due = due > ahead(CLOCK_BOOTTIME) ? due - ahead(CLOCK_BOOTTIME) : 1;
        known.it_value = (struct timespec){.tv_sec = due / SECOND, .tv_nsec = due % SECOND};
    }
    return real(timer, flags, &known, before);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec time;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &time) != 0)
        return -1;
    *now = (struct timeval){.tv_sec = time.tv_sec, .tv_usec = time.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now != NULL)
        *now = found.tv_sec;
    return found.tv_sec;
}
