/* A job that keeps a diary of its own, beside what it prints: when it lived, and what it had printed by then.

   marking_job DIARY SECONDS [EXIT-CODE [deaf]]

   Every entry is one write to a file that is only ever appended to: ATTEMPT PID WORD NUMBER TIME PLACE RANK RESTART. The
   time is since boot, so that nobody can set it; the place is the node of a cluster, or `-`; the rank is that of the
   node in a job over several, and Slurm counts its restarts of the job. `start` comes first,
   `line N` after line N was printed, `end` last, before the exit with EXIT-CODE. It ends after SECONDS, or when there is
   a file DIARY.end. `deaf` ignores SIGTERM, and that nobody reads what it prints. */

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int diary;
static const char *attempt;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_BOOTTIME, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static const char *variable(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value != NULL && *value != 0 ? value : otherwise;
}

static void note(const char *word, int number)
{
    char entry[200];
    int length = snprintf(entry, sizeof entry, "%s %d %s %d %.6f %s %s %s\n", attempt, (int)getpid(), word, number, now(),
                          variable("SLURMD_NODENAME", "-"), variable("STOKER_NODE_RANK", "0"),
                          variable("SLURM_RESTART_COUNT", "0"));
    if (write(diary, entry, (size_t)length) != length)
        _exit(99);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 98;
    attempt = getenv("STOKER_ATTEMPT");
    diary = open(argv[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (attempt == NULL || diary < 0)
        return 97;
    int deaf = argc > 4 && strcmp(argv[4], "deaf") == 0;
    if (deaf) {
        signal(SIGTERM, SIG_IGN);
        signal(SIGPIPE, SIG_IGN);
    }
    char enough[4096];
    snprintf(enough, sizeof enough, "%s.end", argv[1]);
    note("start", 0);
    double end = now() + atof(argv[2]);
    for (int number = 1; now() < end && access(enough, F_OK) != 0; number++) {
        char line[100];
        int length = snprintf(line, sizeof line, "attempt %s says line %d\n", attempt, number);
        if (write(1, line, (size_t)length) != length && !deaf)
            return 96;
        note("line", number);
        struct timespec pause = {0, 10 * 1000 * 1000};
        nanosleep(&pause, NULL);
    }
    note("end", 0);
    return argc > 3 ? atoi(argv[3]) : 0;
}
