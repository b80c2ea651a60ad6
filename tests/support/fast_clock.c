/* A machine on which time passes faster, for programs that wait for minutes: preloaded, with FAST_CLOCK=20.

Monotonic time and time since boot run so many times faster, and whoever waits waits so much shorter. The time of day stays as it is. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static int64_t speed(void)
{
    static int64_t known;
    if (known == 0) {
        const char *wanted = getenv("FAST_CLOCK");
        known = wanted == NULL || atoi(wanted) < 1 ? 1 : atoi(wanted);
    }
    return known;
}

static int64_t nanoseconds(const struct timespec *time)
{
    return time->tv_sec * SECOND + time->tv_nsec;
}

static struct timespec timespec_of(int64_t time)
{
    return (struct timespec){.tv_sec = time / SECOND, .tv_nsec = time % SECOND};
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_MONOTONIC || clock == CLOCK_BOOTTIME))
        *now = timespec_of(nanoseconds(now) * speed());
    return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    int (*real)(clockid_t, int, const struct timespec *, struct timespec *) = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec shorter = clock == CLOCK_MONOTONIC ? timespec_of(nanoseconds(until) / speed()) : *until;
    return real(clock, flags, &shorter, left);
}

int poll(struct pollfd *those, nfds_t count, int milliseconds)
{
    int (*real)(struct pollfd *, nfds_t, int) = dlsym(RTLD_NEXT, "poll");
    /* Rounded up: whoever comes too early has to wait again. */
    return real(those, count, milliseconds > 0 ? (int)((milliseconds + speed() - 1) / speed()) : milliseconds);
}
