/* Small programs that try to get away from whoever started them: `escapes WAY FD [ARGUMENT...]`.
 *
 * Every process of them holds the pipe end FD for as long as it lives, so that the end of the pipe is the kernel's own
 * word that none is left. Each that is where it wants to be writes one byte to it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LIFE = 100 }; /* seconds */

static int pipe_end;
static time_t born;

static void say_ready(void)
{
    if (write(pipe_end, "r", 1) != 1)
        _exit(1);
}

/* Ends by itself after a while: a containment that fails its test must not leave the machine full of these. */
static void linger(void)
{
    for (unsigned left = LIFE; left > 0; left = sleep(left))
        ;
    _exit(9);
}

static void sit(void)
{
    say_ready();
    linger();
}

static void double_fork(int new_session)
{
    if (fork() == 0) {
        if (new_session)
            setsid();
        if (fork() == 0)
            sit();
        _exit(0);
    }
    wait(NULL);
    sit();
}

/* One process at a time, that is another one every moment: gone before a list of processes that names it is read. */
static void comet(void)
{
    struct timespec now;
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while (now.tv_sec < born + LIFE && fork() == 0);
    _exit(0);
}

static void storm(int comets)
{
    for (int i = 0; i < comets; i++)
        if (fork() == 0)
            comet();
}

static void storm_on_term(int signum)
{
    (void)signum;
    storm(3);
}

static void say_asked(int signum)
{
    (void)signum;
    say_ready();
}

/* Doubles, again and again, up to 2 to the given power. */
static void breed(int generations)
{
    signal(SIGTERM, SIG_IGN);
    for (int i = 0; i < generations; i++)
        fork();
    sit();
}

static void *sit_in_thread(void *unused)
{
    (void)unused;
    if (fork() == 0)
        sit();
    sit();
    return NULL;
}

/* The first thread ends, the process does not: it looks like a zombie. */
static void leave_thread(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, sit_in_thread, NULL);
    pthread_exit(NULL);
}

static void rename_self(char **argv)
{
    char *name = argv[3];
    prctl(PR_SET_NAME, name);
    for (char **word = argv; *word; word++)
        memset(*word, 'x', strlen(*word));
    if (fork() == 0) {
        setsid();
        sit();
    }
    sit();
}

static void zombies(void)
{
    for (int i = 0; i < 3; i++)
        if (fork() == 0)
            _exit(0);
    if (fork() == 0) {
        if (fork() == 0)
            _exit(0);
        sit();
    }
    sit();
}

static void stop_self(void)
{
    if (fork() == 0) {
        setsid();
        say_ready();
        for (;;)
            raise(SIGSTOP);
    }
    sit();
}

static void own_subreaper(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGTERM, SIG_IGN);
    double_fork(1);
}

/* Blocks every signal and, when its standard input ends, says which came. Dies or stops only of what cannot be blocked. */
static void bystander(void)
{
    sigset_t set;
    char byte;
    sigfillset(&set);
    sigprocmask(SIG_SETMASK, &set, NULL);
    say_ready();
    while (read(0, &byte, 1) > 0)
        ;
    sigpending(&set);
    for (int signum = 1; signum < 32; signum++)
        if (sigismember(&set, signum))
            printf("%d ", signum);
    fflush(stdout);
}

/* Two children that end when somebody kills them, and are collected then. */
static void with_children(void)
{
    for (int i = 0; i < 2; i++)
        if (fork() == 0)
            sit();
    say_ready();
    while (wait(NULL) > 0)
        ;
    linger();
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    const char *way = argv[1];
    pipe_end = atoi(argv[2]);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    born = now.tv_sec;
    if (!strcmp(way, "sit"))
        sit();
    else if (!strcmp(way, "double-fork"))
        double_fork(0);
    else if (!strcmp(way, "setsid"))
        double_fork(1);
    else if (!strcmp(way, "storm")) {
        storm(3);
        sit();
    } else if (!strcmp(way, "storm-on-term")) {
        signal(SIGTERM, storm_on_term);
        sit();
    } else if (!strcmp(way, "says-when-asked")) {
        signal(SIGTERM, say_asked);
        sit();
    } else if (!strcmp(way, "breed"))
        breed(atoi(argv[3]));
    else if (!strcmp(way, "stopped"))
        stop_self();
    else if (!strcmp(way, "deaf")) {
        for (int signum = 1; signum < 65; signum++)
            signal(signum, SIG_IGN);
        sit();
    } else if (!strcmp(way, "zombies"))
        zombies();
    else if (!strcmp(way, "renamed"))
        rename_self(argv);
    else if (!strcmp(way, "thread"))
        leave_thread();
    else if (!strcmp(way, "subreaper"))
        own_subreaper();
    else if (!strcmp(way, "with-children"))
        with_children();
    else if (!strcmp(way, "bystander"))
        bystander();
    else
        return 2;
    return 0;
}
