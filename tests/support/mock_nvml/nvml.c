/* A libnvidia-ml.so.1 without a GPU. It answers from a file that the test maps too: see layout.py.
 *
 * Where NVML's documentation leaves a choice, the answer is the one that makes a careless caller fail. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "generated.h"

#define API __attribute__((visibility("default")))
#define LENGTH(array) (sizeof(array) / sizeof *(array))
#define LOAD(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define SWAP_IF(word, is, wanted) \
    __atomic_compare_exchange_n(word, is, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    VERSION_MISMATCH_WITH_DRIVER = 18,
    OUT_OF_MEMORY = 20,
    VERSION_MISMATCH_OF_ARGUMENT = 25,
};

enum { SLOT_FREE = 0, SLOT_FRESH = 2 };
enum { KIND_COMPUTE, KIND_GRAPHICS, KIND_MPS };
enum { SAMPLES_RING, SAMPLES_GENERATED, SAMPLES_EMPTY };
enum { SAMPLING_GPU_UTILIZATION = 1, SAMPLING_MEMORY_UTILIZATION = 2, VALUE_UNSIGNED_INT = 1 };
enum { CLOCK_OF_SM = 1, ERRORS_UNCORRECTED = 1, COUNTER_VOLATILE = 0, EVENT_XID = 8 };

/* The driver takes about six samples a second and remembers about a hundred. */
enum { SAMPLE_PERIOD_US = 1000000 / 6, SAMPLES_REMEMBERED = 100 };
enum { MAX_MIG_DEVICES = 7 };

/* What callers pass in: sizes and order are NVML's. */

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} AbiProcess;

typedef struct {
    unsigned pid;
    unsigned long long timestamp;
    unsigned sm, memory, encoder, decoder;
} AbiProcessUtilization;

typedef struct {
    unsigned long long timestamp;
    union {
        double real;
        unsigned integer;
        unsigned long long wide;
    } value;
} AbiSample;

typedef struct {
    unsigned gpu, memory;
} AbiUtilization;

typedef struct {
    unsigned long long total, free, used;
} AbiMemory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} AbiMemoryV2;

typedef struct {
    unsigned version;
    unsigned sensor;
    int temperature;
} AbiTemperature;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} AbiPci;

typedef struct {
    unsigned version, supported;
} AbiGpmSupport;

typedef struct {
    const Device *device;
    uint64_t taken_us;
} GpmSample;

typedef struct {
    unsigned id, code;
    double value;
    struct {
        const char *short_name, *long_name, *unit;
    } info;
} AbiGpmMetric;

typedef struct {
    unsigned version, count;
    const GpmSample *first, *second;
    AbiGpmMetric metrics[];
} AbiGpmMetrics;

typedef struct {
    const Device *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} AbiEvent;

typedef struct {
    uint32_t next;
    bool registered[LENGTH(((State *)NULL)->devices)];
} EventSet;

_Static_assert(sizeof(AbiEvent) == 32, "nvmlEventData_t");
_Static_assert(sizeof(AbiProcess) == 24, "nvmlProcessInfo_v2_t");
_Static_assert(sizeof(AbiProcessUtilization) == 32, "nvmlProcessUtilizationSample_t");
_Static_assert(sizeof(AbiSample) == 16, "nvmlSample_t");
_Static_assert(sizeof(AbiMemoryV2) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(AbiTemperature) == 12, "nvmlTemperature_v1_t");
_Static_assert(sizeof(AbiPci) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(AbiGpmMetric) == 40, "nvmlGpmMetric_t");

#define VERSIONED(type, version) ((unsigned)sizeof(type) | (version) << 24)

static State *machine;
static struct stat machine_file;
static int users; /* initialisations without their shutdown */

static uint64_t clock_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* ---- Attaching to the state ---- */

static int map_state(void)
{
    const char *path = getenv("MOCK_NVML_STATE");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return DRIVER_NOT_LOADED;
    struct stat about;
    State *mapped = MAP_FAILED;
    if (fstat(file, &about) == 0 && about.st_size == sizeof(State)) {
        /* Initialising and shutting down a thousand times must not use up the address space. */
        if (machine != NULL && about.st_dev == machine_file.st_dev && about.st_ino == machine_file.st_ino) {
            close(file);
            return SUCCESS;
        }
        mapped = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (mapped == MAP_FAILED || mapped->magic != MAGIC || mapped->size != sizeof(State)
        || mapped->fingerprint != FINGERPRINT) {
        fprintf(stderr, "mock NVML: %s was not made for this build of the mock\n", path);
        return VERSION_MISMATCH_WITH_DRIVER;
    }
    /* An earlier mapping is left: whoever still holds its handles must get an error, not crash. */
    machine = mapped;
    machine_file = about;
    return SUCCESS;
}

static int attach(void)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one_at_a_time);
    int code = LOAD(users) > 0 ? SUCCESS : map_state();
    pthread_mutex_unlock(&one_at_a_time);
    return code;
}

/* ---- Hanging ---- */

static bool runs(int32_t pid)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    const char *after_name = strrchr(text, ')');
    return after_name != NULL && after_name[1] == ' ' && strchr("ZX", after_name[2]) == NULL;
}

static int32_t *note_hang(void)
{
    int32_t *mine = NULL;
    uint32_t others = 0;
    for (size_t i = 0; i < LENGTH(machine->hangs); i++) {
        int32_t holder = LOAD(machine->hangs[i]);
        if (holder != 0 && runs(holder))
            others++;
        else if (mine == NULL && SWAP_IF(&machine->hangs[i], &holder, getpid()))
            mine = &machine->hangs[i];
    }
    uint32_t most = LOAD(machine->max_in_flight);
    while (most < others + 1 && !SWAP_IF(&machine->max_in_flight, &most, others + 1))
        ;
    return mine;
}

/* As in an uninterruptible sleep no signal gets through, except that a mock cannot hold off SIGKILL. */
static void hang(const Fault *fault, uint32_t serial)
{
    const struct timespec step = {.tv_nsec = 10 * 1000 * 1000};
    uint64_t end = clock_us(CLOCK_MONOTONIC) + (uint64_t)fault->hang_ms * 1000;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int32_t *noted = note_hang();
    while (LOAD(fault->serial) == serial && clock_us(CLOCK_MONOTONIC) < end)
        nanosleep(&step, NULL);
    if (noted != NULL)
        __atomic_store_n(noted, 0, __ATOMIC_RELEASE);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- What every call begins with ---- */

static bool spend(int32_t *calls)
{
    int32_t left = LOAD(*calls);
    while (left > 0)
        if (SWAP_IF(calls, &left, left - 1))
            return true;
    return false;
}

static bool is_due(Fault *fault, int function, int device)
{
    if (fault->function >= 0 && fault->function != function)
        return false;
    if (fault->device >= 0 && fault->device != device)
        return false;
    return !spend(&fault->calls_before) && (LOAD(fault->calls_left) < 0 || spend(&fault->calls_left));
}

__attribute__((noinline)) static int suffer(int function, int device)
{
    for (size_t i = 0; i < LENGTH(machine->faults); i++) {
        Fault *fault = &machine->faults[i];
        uint32_t serial = LOAD(fault->serial);
        if (serial == 0 || !is_due(fault, function, device))
            continue;
        int code = fault->code;
        if (fault->hang_ms > 0)
            hang(fault, serial);
        return LOAD(fault->serial) == serial ? code : SUCCESS;
    }
    return SUCCESS;
}

static int begin(int function, int device)
{
    if (machine == NULL || LOAD(users) <= 0)
        return UNINITIALIZED;
    __atomic_fetch_add(&machine->calls[function], 1, __ATOMIC_RELAXED);
    return LOAD(machine->fault_count) == 0 ? SUCCESS : suffer(function, device);
}

/* The entry of a handle, or -1 if it never was one. */
static int entry_of(const Device *device)
{
    if (machine == NULL || device < machine->devices || device >= machine->devices + machine->entry_count)
        return -1;
    return ((const char *)device - (const char *)machine->devices) % sizeof(Device) == 0
               ? (int)(device - machine->devices)
               : -1;
}

static int begin_on(int function, const Device *device)
{
    int entry = entry_of(device);
    int code = begin(function, entry);
    return code == SUCCESS && entry < 0 ? INVALID_ARGUMENT : code;
}

#define ATTEMPT(call) \
    do { \
        int code_ = (call); \
        if (code_ != SUCCESS) \
            return code_; \
    } while (0)
#define BEGIN(name) ATTEMPT(begin(F_##name, -1))
#define BEGIN_ON(name, device) ATTEMPT(begin_on(F_##name, device))
#define REQUIRE(condition, code) \
    do { \
        if (!(condition)) \
            return code; \
    } while (0)

static bool is_mig(const Device *device)
{
    return device->parent >= 0;
}

static const Device *board_of(const Device *device)
{
    return is_mig(device) ? &machine->devices[device->parent] : device;
}

/* A MIG device, or a GPU that is cut into them, has no utilization of its own. */
static bool is_whole(const Device *device)
{
    return !is_mig(device) && !device->mig_mode;
}

static int put_text(char *to, unsigned room, const char *text)
{
    size_t length = strlen(text) + 1;
    REQUIRE(to != NULL, INVALID_ARGUMENT);
    REQUIRE(length <= room, INSUFFICIENT_SIZE);
    memcpy(to, text, length);
    return SUCCESS;
}

static int put_number(unsigned *to, unsigned number)
{
    REQUIRE(to != NULL, INVALID_ARGUMENT);
    *to = number;
    return SUCCESS;
}

/* ---- Library and system ---- */

/* As the real library does: whoever reads the GPUs has their nodes open until he ends. */
static void hold_nodes(void)
{
    static bool held;
    const char *paths = getenv("MOCK_NVML_NODES");
    char path[PATH_MAX];
    while (!held && paths != NULL && *paths != '\0') {
        size_t length = strcspn(paths, ":");
        snprintf(path, sizeof path, "%.*s", (int)length, paths);
        (void)!open(path, O_RDONLY | O_CLOEXEC);
        paths += length + (paths[length] == ':');
    }
    held = true;
}

static int initialise(int function)
{
    hold_nodes();
    ATTEMPT(attach());
    __atomic_fetch_add(&machine->calls[function], 1, __ATOMIC_RELAXED);
    if (LOAD(machine->fault_count) != 0)
        ATTEMPT(suffer(function, -1));
    REQUIRE(machine->init_error == SUCCESS, machine->init_error);
    __atomic_fetch_add(&users, 1, __ATOMIC_ACQ_REL);
    return SUCCESS;
}

API int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return initialise(F_nvmlInitWithFlags);
}

API int nvmlInit_v2(void)
{
    return initialise(F_nvmlInit_v2);
}

API int nvmlShutdown(void)
{
    BEGIN(nvmlShutdown);
    __atomic_fetch_sub(&users, 1, __ATOMIC_ACQ_REL);
    return SUCCESS;
}

API const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case VERSION_MISMATCH_WITH_DRIVER: return "Driver/library version mismatch";
    case VERSION_MISMATCH_OF_ARGUMENT: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

API int nvmlSystemGetDriverVersion(char *version, unsigned room)
{
    BEGIN(nvmlSystemGetDriverVersion);
    return put_text(version, room, machine->driver_version);
}

API int nvmlSystemGetNVMLVersion(char *version, unsigned room)
{
    BEGIN(nvmlSystemGetNVMLVersion);
    return put_text(version, room, machine->nvml_version);
}

static int put_cuda_version(int *version)
{
    REQUIRE(version != NULL, INVALID_ARGUMENT);
    *version = machine->cuda_version;
    return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion(int *version)
{
    BEGIN(nvmlSystemGetCudaDriverVersion);
    return put_cuda_version(version);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    BEGIN(nvmlSystemGetCudaDriverVersion_v2);
    return put_cuda_version(version);
}

/* ---- Finding devices ---- */

static int hand_out(int function, const Device *found, int otherwise, const Device **device)
{
    ATTEMPT(begin(function, found == NULL ? -1 : entry_of(found)));
    REQUIRE(device != NULL, INVALID_ARGUMENT);
    REQUIRE(found != NULL, otherwise);
    *device = found;
    return SUCCESS;
}

/* A MIG device is there only while its GPU is in MIG mode. */
static bool is_there(const Device *device)
{
    const Device *board = board_of(device);
    return board < machine->devices + machine->device_count && (!is_mig(device) || board->mig_mode);
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    BEGIN(nvmlDeviceGetCount_v2);
    return put_number(count, machine->device_count);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, const Device **device)
{
    const Device *found = machine != NULL && index < machine->device_count ? &machine->devices[index] : NULL;
    return hand_out(F_nvmlDeviceGetHandleByIndex_v2, found, INVALID_ARGUMENT, device);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, const Device **device)
{
    const Device *found = NULL;
    for (size_t i = 0; machine != NULL && uuid != NULL && i < machine->entry_count; i++)
        if (is_there(&machine->devices[i]) && strcmp(machine->devices[i].uuid, uuid) == 0)
            found = &machine->devices[i];
    return hand_out(F_nvmlDeviceGetHandleByUUID, found, NOT_FOUND, device);
}

typedef struct {
    unsigned domain, bus, device, function;
} PciAddress;

static bool read_pci(const char *text, PciAddress *address)
{
    *address = (PciAddress){0};
    return sscanf(text, "%x:%x:%x.%x", &address->domain, &address->bus, &address->device, &address->function)
           == 4;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, const Device **device)
{
    const Device *found = NULL;
    PciAddress wanted, here;
    bool valid = bus_id != NULL && read_pci(bus_id, &wanted);
    for (size_t i = 0; machine != NULL && valid && i < machine->device_count; i++)
        if (read_pci(machine->devices[i].pci_bus_id, &here) && memcmp(&wanted, &here, sizeof here) == 0)
            found = &machine->devices[i];
    return hand_out(F_nvmlDeviceGetHandleByPciBusId_v2, found, valid ? NOT_FOUND : INVALID_ARGUMENT, device);
}

/* ---- What a device is ---- */

API int nvmlDeviceGetName(const Device *device, char *name, unsigned room)
{
    BEGIN_ON(nvmlDeviceGetName, device);
    return put_text(name, room, device->name);
}

API int nvmlDeviceGetUUID(const Device *device, char *uuid, unsigned room)
{
    BEGIN_ON(nvmlDeviceGetUUID, device);
    return put_text(uuid, room, device->uuid);
}

API int nvmlDeviceGetIndex(const Device *device, unsigned *index)
{
    BEGIN_ON(nvmlDeviceGetIndex, device);
    return put_number(index, device->index);
}

API int nvmlDeviceGetMinorNumber(const Device *device, unsigned *number)
{
    BEGIN_ON(nvmlDeviceGetMinorNumber, device);
    return put_number(number, board_of(device)->minor_number);
}

API int nvmlDeviceGetPciInfo_v3(const Device *device, AbiPci *pci)
{
    BEGIN_ON(nvmlDeviceGetPciInfo_v3, device);
    REQUIRE(pci != NULL, INVALID_ARGUMENT);
    PciAddress address;
    REQUIRE(read_pci(board_of(device)->pci_bus_id, &address), NOT_SUPPORTED);
    memset(pci, 0, sizeof *pci);
    pci->domain = address.domain;
    pci->bus = address.bus;
    pci->device = address.device;
    pci->device_id = 0x233010DE; /* H100 SXM5 */
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.%X", address.domain & 0xFFFF,
             address.bus & 0xFF, address.device & 0xFF, address.function & 0xF);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", board_of(device)->pci_bus_id);
    return SUCCESS;
}

API int nvmlDeviceGetCudaComputeCapability(const Device *device, int *major, int *minor)
{
    BEGIN_ON(nvmlDeviceGetCudaComputeCapability, device);
    REQUIRE(major != NULL && minor != NULL, INVALID_ARGUMENT);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

/* ---- What a device does ---- */

enum { LINK_NVLINK = 1, LEVEL_SYSTEM = 50, P2P_OF_NVLINK = 2, P2P_OK = 0, P2P_NOT_SUPPORTED = 5 };

static uint32_t link_of(const Device *first, const Device *second)
{
    const size_t devices = LENGTH(machine->devices);
    return machine->links[(size_t)entry_of(first) * devices + (size_t)entry_of(second)];
}

API int nvmlDeviceGetTopologyCommonAncestor(const Device *first, const Device *second, unsigned *level)
{
    BEGIN_ON(nvmlDeviceGetTopologyCommonAncestor, first);
    REQUIRE(entry_of(second) >= 0 && level != NULL, INVALID_ARGUMENT);
    REQUIRE(!is_mig(first) && !is_mig(second), NOT_SUPPORTED);
    /* A driver does not tell NVLink here: boards with it are often of different nodes. */
    uint32_t link = link_of(first, second);
    *level = link > LINK_NVLINK ? link : LEVEL_SYSTEM;
    return SUCCESS;
}

API int nvmlDeviceGetP2PStatus(const Device *first, const Device *second, unsigned capability, unsigned *status)
{
    BEGIN_ON(nvmlDeviceGetP2PStatus, first);
    REQUIRE(entry_of(second) >= 0 && status != NULL, INVALID_ARGUMENT);
    REQUIRE(!is_mig(first) && !is_mig(second), NOT_SUPPORTED);
    *status = capability == P2P_OF_NVLINK && link_of(first, second) == LINK_NVLINK ? P2P_OK : P2P_NOT_SUPPORTED;
    return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(const Device *device, AbiUtilization *utilization)
{
    BEGIN_ON(nvmlDeviceGetUtilizationRates, device);
    REQUIRE(utilization != NULL, INVALID_ARGUMENT);
    REQUIRE(is_whole(device), NOT_SUPPORTED);
    *utilization = (AbiUtilization){device->utilization, device->memory_utilization};
    return SUCCESS;
}

/* The first version counts reserved memory as used. */
API int nvmlDeviceGetMemoryInfo(const Device *device, AbiMemory *memory)
{
    BEGIN_ON(nvmlDeviceGetMemoryInfo, device);
    REQUIRE(memory != NULL, INVALID_ARGUMENT);
    uint64_t used = device->memory_used + device->memory_reserved;
    *memory = (AbiMemory){device->memory_total, device->memory_free, used};
    return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(const Device *device, AbiMemoryV2 *memory)
{
    BEGIN_ON(nvmlDeviceGetMemoryInfo_v2, device);
    REQUIRE(memory != NULL, INVALID_ARGUMENT);
    REQUIRE(memory->version == VERSIONED(AbiMemoryV2, 2), VERSION_MISMATCH_OF_ARGUMENT);
    memory->total = device->memory_total;
    memory->reserved = device->memory_reserved;
    memory->free = device->memory_free;
    memory->used = device->memory_used;
    return SUCCESS;
}

API int nvmlDeviceGetTemperature(const Device *device, unsigned sensor, unsigned *temperature)
{
    BEGIN_ON(nvmlDeviceGetTemperature, device);
    REQUIRE(sensor == 0, INVALID_ARGUMENT);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    return put_number(temperature, (unsigned)device->temperature);
}

API int nvmlDeviceGetTemperatureV(const Device *device, AbiTemperature *temperature)
{
    BEGIN_ON(nvmlDeviceGetTemperatureV, device);
    REQUIRE(temperature != NULL, INVALID_ARGUMENT);
    REQUIRE(temperature->version == VERSIONED(AbiTemperature, 1), VERSION_MISMATCH_OF_ARGUMENT);
    REQUIRE(temperature->sensor == 0, INVALID_ARGUMENT);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    temperature->temperature = device->temperature;
    return SUCCESS;
}

static Meter meter_of(const Device *device)
{
    return device->meters[LOAD(device->meter_in_use) % LENGTH(device->meters)];
}

API int nvmlDeviceGetPowerUsage(const Device *device, unsigned *milliwatts)
{
    BEGIN_ON(nvmlDeviceGetPowerUsage, device);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    return put_number(milliwatts, meter_of(device).power_mw);
}

API int nvmlDeviceGetEnforcedPowerLimit(const Device *device, unsigned *milliwatts)
{
    BEGIN_ON(nvmlDeviceGetEnforcedPowerLimit, device);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    return put_number(milliwatts, device->enforced_limit_mw);
}

API int nvmlDeviceGetPowerManagementLimit(const Device *device, unsigned *milliwatts)
{
    BEGIN_ON(nvmlDeviceGetPowerManagementLimit, device);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    return put_number(milliwatts, device->management_limit_mw);
}

API int nvmlDeviceGetTotalEnergyConsumption(const Device *device, unsigned long long *millijoules)
{
    BEGIN_ON(nvmlDeviceGetTotalEnergyConsumption, device);
    REQUIRE(millijoules != NULL, INVALID_ARGUMENT);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    Meter meter = meter_of(device);
    *millijoules = meter.energy_mj;
    if (meter.integrates)
        *millijoules += (clock_us(CLOCK_MONOTONIC) - meter.since_us) * meter.power_mw / 1000000;
    return SUCCESS;
}

/* ---- Samples that the driver took between two looks ---- */

static unsigned samples_from_ring(const Ring *ring, uint64_t last_seen, AbiSample *samples, unsigned room)
{
    unsigned found = 0;
    for (uint32_t i = 0; i < ring->count && i < LENGTH(ring->samples) && found < room; i++) {
        if (ring->samples[i].timestamp <= last_seen)
            continue;
        if (samples != NULL)
            samples[found] = (AbiSample){ring->samples[i].timestamp, {.wide = ring->samples[i].value}};
        found++;
    }
    return found;
}

/* On a grid in time, so that a caller who asks again gets the same samples and not new ones. */
static unsigned samples_from_clock(uint64_t value, uint64_t last_seen, AbiSample *samples, unsigned room)
{
    uint64_t newest = clock_us(CLOCK_REALTIME) / SAMPLE_PERIOD_US;
    uint64_t oldest = newest - SAMPLES_REMEMBERED + 1;
    if (last_seen / SAMPLE_PERIOD_US >= oldest)
        oldest = last_seen / SAMPLE_PERIOD_US + 1;
    unsigned found = 0;
    for (uint64_t tick = oldest; tick <= newest && found < room; tick++, found++)
        if (samples != NULL)
            samples[found] = (AbiSample){tick * SAMPLE_PERIOD_US, {.wide = value}};
    return found;
}

API int nvmlDeviceGetSamples(const Device *device, unsigned type, unsigned long long last_seen,
                             unsigned *value_type, unsigned *count, AbiSample *samples)
{
    BEGIN_ON(nvmlDeviceGetSamples, device);
    REQUIRE(value_type != NULL && count != NULL && (samples == NULL || *count > 0), INVALID_ARGUMENT);
    bool of_memory = type == SAMPLING_MEMORY_UTILIZATION;
    REQUIRE(is_whole(device) && (of_memory || type == SAMPLING_GPU_UTILIZATION), NOT_SUPPORTED);
    const Ring *ring = of_memory ? &device->memory_rings[LOAD(device->memory_ring_in_use) % 2]
                                 : &device->rings[LOAD(device->ring_in_use) % 2];
    unsigned room = samples == NULL ? (unsigned)-1 : *count;
    unsigned found = 0;
    if (device->samples_mode == SAMPLES_RING)
        found = samples_from_ring(ring, last_seen, samples, room);
    else if (device->samples_mode == SAMPLES_GENERATED)
        found = samples_from_clock(of_memory ? device->memory_utilization : device->utilization, last_seen,
                                   samples, room);
    REQUIRE(found > 0, NOT_FOUND);
    *value_type = VALUE_UNSIGNED_INT;
    *count = found;
    return SUCCESS;
}

/* ---- Clocks and faults: of boards, not of MIG devices ---- */

API int nvmlDeviceGetClockInfo(const Device *device, unsigned type, unsigned *megahertz)
{
    BEGIN_ON(nvmlDeviceGetClockInfo, device);
    REQUIRE(!is_mig(device) && type == CLOCK_OF_SM, NOT_SUPPORTED);
    return put_number(megahertz, device->sm_clock);
}

static int put_throttling(const Device *device, unsigned long long *mask)
{
    REQUIRE(mask != NULL, INVALID_ARGUMENT);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    *mask = device->throttling;
    return SUCCESS;
}

API int nvmlDeviceGetCurrentClocksEventReasons(const Device *device, unsigned long long *mask)
{
    BEGIN_ON(nvmlDeviceGetCurrentClocksEventReasons, device);
    return put_throttling(device, mask);
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(const Device *device, unsigned long long *mask)
{
    BEGIN_ON(nvmlDeviceGetCurrentClocksThrottleReasons, device);
    return put_throttling(device, mask);
}

API int nvmlDeviceGetTotalEccErrors(const Device *device, unsigned type, unsigned counter,
                                    unsigned long long *count)
{
    BEGIN_ON(nvmlDeviceGetTotalEccErrors, device);
    REQUIRE(count != NULL, INVALID_ARGUMENT);
    REQUIRE(!is_mig(device) && type == ERRORS_UNCORRECTED && counter == COUNTER_VOLATILE, NOT_SUPPORTED);
    *count = device->uncorrected_errors;
    return SUCCESS;
}

API int nvmlDeviceGetRemappedRows(const Device *device, unsigned *corrected, unsigned *uncorrected,
                                  unsigned *pending, unsigned *failed)
{
    BEGIN_ON(nvmlDeviceGetRemappedRows, device);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    ATTEMPT(put_number(corrected, 0));
    ATTEMPT(put_number(uncorrected, device->rows_pending));
    ATTEMPT(put_number(pending, device->rows_pending));
    return put_number(failed, device->rows_failed);
}

API int nvmlDeviceGetRetiredPagesPendingStatus(const Device *device, unsigned *pending)
{
    BEGIN_ON(nvmlDeviceGetRetiredPagesPendingStatus, device);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    return put_number(pending, device->pages_pending);
}

API int nvmlEventSetCreate(EventSet **set)
{
    BEGIN(nvmlEventSetCreate);
    REQUIRE(set != NULL, INVALID_ARGUMENT);
    *set = calloc(1, sizeof **set);
    REQUIRE(*set != NULL, OUT_OF_MEMORY);
    (*set)->next = LOAD(machine->event_count);
    return SUCCESS;
}

API int nvmlEventSetFree(EventSet *set)
{
    BEGIN(nvmlEventSetFree);
    REQUIRE(set != NULL, INVALID_ARGUMENT);
    free(set);
    return SUCCESS;
}

API int nvmlDeviceRegisterEvents(const Device *device, unsigned long long types, EventSet *set)
{
    BEGIN_ON(nvmlDeviceRegisterEvents, device);
    REQUIRE(set != NULL && types == EVENT_XID, INVALID_ARGUMENT);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    set->registered[entry_of(device)] = true;
    return SUCCESS;
}

/* Whoever waits longer than not at all is made to wait. */
API int nvmlEventSetWait_v2(EventSet *set, AbiEvent *event, unsigned milliseconds)
{
    BEGIN(nvmlEventSetWait_v2);
    REQUIRE(set != NULL && event != NULL, INVALID_ARGUMENT);
    const struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    if (milliseconds > 0)
        nanosleep(&pause, NULL);
    while (set->next != LOAD(machine->event_count)) {
        const Event *next = &machine->events[set->next++ % LENGTH(machine->events)];
        if (!set->registered[next->device])
            continue;
        *event = (AbiEvent){&machine->devices[next->device], EVENT_XID, next->xid, next->gpu_instance,
                            (unsigned)-1};
        return SUCCESS;
    }
    return TIMEOUT;
}

/* ---- Processes ---- */

static unsigned collect_processes(const Device *device, uint32_t kind, AbiProcess *processes, unsigned room)
{
    unsigned found = 0;
    for (size_t i = 0; i < LENGTH(device->processes); i++) {
        const Process *process = &device->processes[i];
        if (LOAD(process->slot) == SLOT_FREE || process->kind != kind)
            continue;
        if (processes != NULL && found < room)
            processes[found] = (AbiProcess){process->pid, process->memory, process->gpu_instance,
                                            process->compute_instance};
        found++;
    }
    return found;
}

/* A GPU in MIG mode lists what runs on its MIG devices too. */
static int list_processes(const Device *device, uint32_t kind, unsigned *count, AbiProcess *processes)
{
    REQUIRE(count != NULL, INVALID_ARGUMENT);
    unsigned room = processes == NULL ? 0 : *count;
    unsigned found = collect_processes(device, kind, processes, room);
    for (size_t i = 0; !is_mig(device) && device->mig_mode && i < machine->entry_count; i++) {
        const Device *part = &machine->devices[i];
        if (!is_mig(part) || board_of(part) != device)
            continue;
        bool full = processes == NULL || found >= room;
        found += collect_processes(part, kind, full ? NULL : processes + found, full ? 0 : room - found);
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define LISTS_PROCESSES(name, kind) \
    API int name(const Device *device, unsigned *count, AbiProcess *processes) \
    { \
        BEGIN_ON(name, device); \
        return list_processes(device, kind, count, processes); \
    }

LISTS_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, KIND_COMPUTE)
LISTS_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, KIND_COMPUTE)
LISTS_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, KIND_GRAPHICS)
LISTS_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, KIND_GRAPHICS)
LISTS_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, KIND_MPS)
LISTS_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, KIND_MPS)

API int nvmlDeviceGetProcessUtilization(const Device *device, AbiProcessUtilization *samples, unsigned *count,
                                        unsigned long long last_seen)
{
    BEGIN_ON(nvmlDeviceGetProcessUtilization, device);
    REQUIRE(count != NULL, INVALID_ARGUMENT);
    REQUIRE(is_whole(device), NOT_SUPPORTED);
    unsigned room = samples == NULL ? 0 : *count;
    unsigned found = 0;
    uint64_t now = clock_us(CLOCK_REALTIME);
    for (size_t i = 0; i < LENGTH(device->utilizations); i++) {
        const ProcessUtilization *one = &device->utilizations[i];
        uint32_t slot = LOAD(one->slot);
        uint64_t timestamp = slot == SLOT_FRESH ? now : one->timestamp;
        if (slot == SLOT_FREE || timestamp <= last_seen)
            continue;
        if (found < room)
            samples[found] = (AbiProcessUtilization){one->pid,    timestamp,    one->sm,
                                                     one->memory, one->encoder, one->decoder};
        found++;
    }
    REQUIRE(found > 0, NOT_FOUND);
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ---- MIG ---- */

API int nvmlDeviceGetMigMode(const Device *device, unsigned *current, unsigned *pending)
{
    BEGIN_ON(nvmlDeviceGetMigMode, device);
    REQUIRE(!is_mig(device), INVALID_ARGUMENT);
    ATTEMPT(put_number(current, device->mig_mode));
    return put_number(pending, device->mig_mode);
}

API int nvmlDeviceGetMaxMigDeviceCount(const Device *device, unsigned *count)
{
    BEGIN_ON(nvmlDeviceGetMaxMigDeviceCount, device);
    REQUIRE(!is_mig(device), INVALID_ARGUMENT);
    return put_number(count, MAX_MIG_DEVICES);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(const Device *device, unsigned index, const Device **part)
{
    BEGIN_ON(nvmlDeviceGetMigDeviceHandleByIndex, device);
    REQUIRE(!is_mig(device) && part != NULL, INVALID_ARGUMENT);
    for (size_t i = 0; i < machine->entry_count; i++) {
        const Device *found = &machine->devices[i];
        if (is_mig(found) && board_of(found) == device && found->index == index && is_there(found)) {
            *part = found;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

API int nvmlDeviceIsMigDeviceHandle(const Device *device, unsigned *answer)
{
    BEGIN_ON(nvmlDeviceIsMigDeviceHandle, device);
    return put_number(answer, is_mig(device));
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const Device *part, const Device **device)
{
    BEGIN_ON(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part);
    REQUIRE(is_mig(part) && device != NULL, INVALID_ARGUMENT);
    *device = board_of(part);
    return SUCCESS;
}

API int nvmlDeviceGetGpuInstanceId(const Device *device, unsigned *id)
{
    BEGIN_ON(nvmlDeviceGetGpuInstanceId, device);
    REQUIRE(is_mig(device), INVALID_ARGUMENT);
    return put_number(id, device->gpu_instance);
}

API int nvmlDeviceGetComputeInstanceId(const Device *device, unsigned *id)
{
    BEGIN_ON(nvmlDeviceGetComputeInstanceId, device);
    REQUIRE(is_mig(device), INVALID_ARGUMENT);
    return put_number(id, device->compute_instance);
}

/* ---- GPM ---- */

API int nvmlGpmQueryDeviceSupport(const Device *device, AbiGpmSupport *support)
{
    BEGIN_ON(nvmlGpmQueryDeviceSupport, device);
    REQUIRE(support != NULL, INVALID_ARGUMENT);
    REQUIRE(support->version == 1, VERSION_MISMATCH_OF_ARGUMENT);
    support->supported = board_of(device)->gpm_supported != 0;
    return SUCCESS;
}

API int nvmlGpmSampleAlloc(GpmSample **sample)
{
    BEGIN(nvmlGpmSampleAlloc);
    REQUIRE(sample != NULL, INVALID_ARGUMENT);
    *sample = calloc(1, sizeof **sample);
    return *sample == NULL ? OUT_OF_MEMORY : SUCCESS;
}

API int nvmlGpmSampleFree(GpmSample *sample)
{
    BEGIN(nvmlGpmSampleFree);
    REQUIRE(sample != NULL, INVALID_ARGUMENT);
    free(sample);
    return SUCCESS;
}

static int take_gpm(const Device *device, GpmSample *sample)
{
    REQUIRE(sample != NULL, INVALID_ARGUMENT);
    REQUIRE(board_of(device)->gpm_supported, NOT_SUPPORTED);
    *sample = (GpmSample){device, clock_us(CLOCK_MONOTONIC)};
    return SUCCESS;
}

API int nvmlGpmSampleGet(const Device *device, GpmSample *sample)
{
    BEGIN_ON(nvmlGpmSampleGet, device);
    REQUIRE(!is_mig(device), NOT_SUPPORTED);
    return take_gpm(device, sample);
}

API int nvmlGpmMigSampleGet(const Device *device, unsigned gpu_instance, GpmSample *sample)
{
    BEGIN_ON(nvmlGpmMigSampleGet, device);
    REQUIRE(!is_mig(device) && device->mig_mode, NOT_SUPPORTED);
    for (size_t i = 0; i < machine->entry_count; i++) {
        const Device *part = &machine->devices[i];
        if (is_mig(part) && board_of(part) == device && part->gpu_instance == gpu_instance)
            return take_gpm(part, sample);
    }
    return INVALID_ARGUMENT;
}

API int nvmlGpmMetricsGet(AbiGpmMetrics *wanted)
{
    const GpmSample *first = wanted == NULL ? NULL : wanted->first;
    const GpmSample *second = wanted == NULL ? NULL : wanted->second;
    const Device *device = first == NULL ? NULL : first->device;
    ATTEMPT(begin(F_nvmlGpmMetricsGet, entry_of(device)));
    REQUIRE(wanted != NULL, INVALID_ARGUMENT);
    REQUIRE(wanted->version == 1, VERSION_MISMATCH_OF_ARGUMENT);
    REQUIRE(device != NULL && second != NULL && second->device == device, INVALID_ARGUMENT);
    REQUIRE(first != second && first->taken_us <= second->taken_us && wanted->count > 0, INVALID_ARGUMENT);
    for (unsigned i = 0; i < wanted->count; i++) {
        AbiGpmMetric *metric = &wanted->metrics[i];
        bool known = metric->id < LENGTH(device->gpm) && !isnan(device->gpm[metric->id]);
        metric->code = known ? SUCCESS : NOT_SUPPORTED;
        metric->value = known ? device->gpm[metric->id] : 0.0;
    }
    return SUCCESS;
}

/* ---- Everything else that nvidia-ml-py may look up ---- */

__attribute__((noinline)) static int unsupported(int function)
{
    ATTEMPT(begin(function, -1));
    return NOT_SUPPORTED;
}

#define STUB(name) \
    API int name(void) \
    { \
        return unsupported(F_##name); \
    }

STUBS
