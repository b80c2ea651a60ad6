/* A stand-in for nvidia-smi that does none of the driver's work: what spawning alone costs. */
#include <stdio.h>

int main(void) {
    for (int gpu = 0; gpu < 8; gpu++)
        printf("GPU-%08d-0000-0000-0000-000000000000, 37, 20480, 81559, 351.00\n", gpu);
    return 0;
}
