/* A Slurm node that is so busy that its slurmstepd gets from one process of a job to the next late: preloaded into slurmd,
with SLOW_KILL=20 for 20 ms after each SIGTERM. Slurm signals the processes of a job one by one, the youngest first. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

int kill(pid_t pid, int signal)
{
    int result = (int)syscall(SYS_kill, pid, signal);
    const char *wait = getenv("SLOW_KILL");
    if (signal == SIGTERM && wait != NULL)
        usleep((useconds_t)atoi(wait) * 1000);
    return result;
}
