/* The job of the benchmarks of dispatch: it starts as fast as a program can.
 *
 *   job FILE              appends "START END" in nanoseconds to FILE
 *   job FILE GO           appends "START START", and ends when the file GO exists, or after ten minutes
 *   job FILE - [RESULT]   appends "START END" after a second. With the text of a result it is a stand-in for Stoker's
 *                         shim on a Slurm node: it owns the attempt in the current directory, and leaves the result.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static long long now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void put(const char *name, const char *text)
{
    char temporary[64];
    snprintf(temporary, sizeof temporary, ".%s.new", name);
    FILE *file = fopen(temporary, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0 || rename(temporary, name) != 0)
        exit(1);
}

int main(int argc, char **argv)
{
    long long started = now();
    char line[128];
    struct timespec pause = {0, 5000000}, second = {1, 0};
    int waits = argc > 2 && strcmp(argv[2], "-") != 0;
    if (argc < 2)
        return 1;
    if (argc > 3) {
        const char *job = getenv("SLURM_JOB_ID"), *node = getenv("SLURMD_NODENAME");
        snprintf(line, sizeof line, "{\"slurm_job\":%s,\"restart\":0,\"host\":\"%s\"}", job ? job : "0", node ? node : "");
        put("owner.json", line);
    }
    if (argc > 2 && !waits)
        nanosleep(&second, NULL);
    int file = open(argv[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int length = snprintf(line, sizeof line, "%lld %lld\n", started, now());
    if (file < 0 || write(file, line, length) != length)
        return 1;
    if (argc > 3)
        put("result.json", argv[3]);
    while (waits && access(argv[2], F_OK) != 0 && now() - started < 600000000000LL)
        nanosleep(&pause, NULL);
    return 0;
}
