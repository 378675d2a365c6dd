/* A libnvidia-ml.so.1 without a driver, steered by the file that RANKSCOPE_NVML_STUB names, which is read again whenever
 * it has changed: `key=value` lines, `#` begins a comment.
 *
 *   gpus=8                             how many (default 1); without a file there is no driver
 *   gpu.temperature=54                 of every GPU; gpu.1.temperature=60 of one; gpu.1.mig.0.memory_used=… of an instance
 *   mig.0=2                            GPU 0 is in MIG mode with two instances
 *   gpu.0.field.74=2000000000          a field value; one that is not named is not supported
 *   gpu.0.gpm.5=57.4                   a GPM metric in its own unit; gpu.gpm=0: an older GPU
 *   gpu.0.processes=412:1048576,413:0  pid:bytes
 *   gpu.1.error.nvmlDeviceGetPowerUsage=3, error.nvmlDeviceGetPowerUsage=3    what a call returns
 *   gpu.1.hang.nvmlDeviceGetTemperature=1, hang.nvmlInitWithFlags=1    a call does not return until the line is gone
 *   gpu.1.lost=1                       every call for it says so
 *   init_error=9, driver_error=1       what nvmlInit, and every call but it, returns
 *   reload=2                           any change: as if the driver had been reloaded; nothing works until a new init
 *   xids=0:79,3:31                     events by GPU, delivered once in order; append to it
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 16, MAX_INSTANCES = 8, MAX_LINES = 512, MAX_CALLS = 96, LINE_BYTES = 512 };
#define XID_CRITICAL 0x8ULL
#define EXPORT __attribute__((visibility("default")))

typedef unsigned long long u64;
typedef struct { int gpu, instance; } device_t;
typedef struct { u64 registered; } event_set_t;
typedef struct { int gpu, instance; double taken; } sample_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char key[LINE_BYTES], value[LINE_BYTES]; } lines[MAX_LINES];
static int line_count;
static struct stat known;
static struct { const char *name; unsigned long count; } calls[MAX_CALLS];
static device_t gpus[MAX_GPUS], instances[MAX_GPUS][MAX_INSTANCES];
static int initialized, live_samples, live_event_sets;
static long loaded_at;
static int delivered_xids;

/* ---- the script; callers hold the lock ---- */

static int read_script(void) {
    const char *path = getenv("RANKSCOPE_NVML_STUB");
    struct stat now;
    if (!path || stat(path, &now)) return line_count = 0, 0;
    if (now.st_ino == known.st_ino && now.st_size == known.st_size && now.st_mtim.tv_sec == known.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == known.st_mtim.tv_nsec)
        return 1;
    FILE *file = fopen(path, "r");
    if (!file) return line_count = 0, 0;
    known = now;
    line_count = 0;
    char line[LINE_BYTES];
    while (fgets(line, sizeof line, file) && line_count < MAX_LINES) {
        char *equals = strchr(line, '=');
        line[strcspn(line, "#\r\n")] = 0;
        if (!equals || line[0] == 0) continue;
        *equals = 0;
        snprintf(lines[line_count].key, sizeof lines[0].key, "%s", line);
        snprintf(lines[line_count++].value, sizeof lines[0].value, "%s", equals + 1);
    }
    fclose(file);
    return 1;
}

static const char *look_up(const char *key) {
    for (int i = line_count; i-- > 0;)
        if (!strcmp(lines[i].key, key)) return lines[i].value;
    return NULL;
}

static const char *device_text(const device_t *device, const char *name) {
    char key[160];
    const char *found = NULL;
    if (device && device->instance >= 0) {
        snprintf(key, sizeof key, "gpu.%d.mig.%d.%s", device->gpu, device->instance, name);
        return look_up(key);
    }
    if (device) {
        snprintf(key, sizeof key, "gpu.%d.%s", device->gpu, name);
        found = look_up(key);
    }
    if (found) return found;
    snprintf(key, sizeof key, "gpu.%s", name);
    return look_up(key);
}

static u64 number(const char *text, u64 otherwise) { return text ? strtoull(text, NULL, 0) : otherwise; }
static u64 device_number(const device_t *device, const char *name, u64 otherwise) {
    return number(device_text(device, name), otherwise);
}
static int gpu_count(void) { return (int)number(look_up("gpus"), 1); }
static int instance_count(int gpu) {
    char key[32];
    snprintf(key, sizeof key, "mig.%d", gpu);
    return (int)number(look_up(key), 0);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Of a call: "error.NAME" or "hang.NAME", for one GPU or for all. */
static u64 scripted(const char *what, const device_t *device, const char *name) {
    char key[128];
    snprintf(key, sizeof key, "%s.%s", what, name);
    u64 of_all = number(look_up(key), 0);
    return of_all || !device ? of_all : device_number(device, key, 0);
}

/* Takes the lock, counts the call and acts out what the script says about it. On success the lock is held. */
static int enter(const char *name, const device_t *device, int needs_init) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_CALLS; i++) {
        if (!calls[i].name) calls[i].name = name;
        if (!strcmp(calls[i].name, name)) { calls[i].count++; break; }
    }
    int there = read_script();
    while (scripted("hang", device, name)) {
        pthread_mutex_unlock(&lock);
        usleep(10000);
        pthread_mutex_lock(&lock);
        there = read_script();
    }
    int result = SUCCESS;
    if (!there) result = needs_init ? UNINITIALIZED : DRIVER_NOT_LOADED;
    else if (needs_init && (!initialized || loaded_at != (long)number(look_up("reload"), 0))) result = UNINITIALIZED;
    else if (needs_init && (result = (int)number(look_up("driver_error"), 0))) ;
    else if (device && device->gpu >= gpu_count()) result = INVALID_ARGUMENT;
    else if (device && device->instance >= instance_count(device->gpu)) result = INVALID_ARGUMENT;
    else if (device && number(device_text(&gpus[device->gpu], "lost"), 0)) result = GPU_IS_LOST;
    else result = (int)scripted("error", device, name);
    if (result) pthread_mutex_unlock(&lock);
    return result;
}

static int leave(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

#define ENTER(device) do { int failed = enter(__func__, device, 1); if (failed) return failed; } while (0)
/* What NVML does not tell of a MIG instance. */
#define ENTER_WHOLE(device) do { ENTER(device); if ((device)->instance >= 0) return leave(NOT_SUPPORTED); } while (0)

/* ---- for tests ---- */

EXPORT unsigned long stub_calls(const char *name) {
    unsigned long count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_CALLS && calls[i].name; i++)
        if (!strcmp(calls[i].name, name)) count = calls[i].count;
    pthread_mutex_unlock(&lock);
    return count;
}
EXPORT void stub_reset(void) {
    pthread_mutex_lock(&lock);
    memset(calls, 0, sizeof calls);
    delivered_xids = initialized = live_samples = live_event_sets = 0;
    pthread_mutex_unlock(&lock);
}
EXPORT int stub_live_samples(void) { return live_samples; }
EXPORT int stub_live_event_sets(void) { return live_event_sets; }
EXPORT int stub_initialized(void) { return initialized; }

/* ---- the library ---- */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int failed = enter(__func__, NULL, 0);
    if (failed) return failed;
    int error = (int)number(look_up("init_error"), 0);
    if (error) return leave(error);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        gpus[gpu] = (device_t){gpu, -1};
        for (int instance = 0; instance < MAX_INSTANCES; instance++) instances[gpu][instance] = (device_t){gpu, instance};
    }
    initialized++;
    loaded_at = (long)number(look_up("reload"), 0);
    return leave(SUCCESS);
}

EXPORT int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int was = initialized;
    if (initialized) initialized--;
    return leave(was ? SUCCESS : UNINITIALIZED);
}

EXPORT const char *nvmlErrorString(int result) { return result == GPU_IS_LOST ? "GPU is lost" : "stub error"; }

static int text_into(char *into, unsigned length, const char *text) {
    if (strlen(text) >= length) return leave(INSUFFICIENT_SIZE);
    strcpy(into, text);
    return leave(SUCCESS);
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(NULL);
    const char *text = look_up("driver_version");
    return text_into(version, length, text ? text : "580.159.04");
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL);
    *count = (unsigned)gpu_count();
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
    if (index >= MAX_GPUS) return INVALID_ARGUMENT;
    device_t asked = {(int)index, -1};
    ENTER(&asked);
    *device = &gpus[index];
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned length) {
    ENTER(device);
    char text[96];
    const char *scripted_uuid = device->instance >= 0 ? device_text(device, "uuid") : NULL;
    if (device->instance < 0) {
        char key[32];
        snprintf(key, sizeof key, "gpu.%d.uuid", device->gpu);
        scripted_uuid = look_up(key);
    }
    if (device->instance >= 0) snprintf(text, sizeof text, "MIG-5c0ffee0-0000-4000-8000-0000000000%d%d", device->gpu, device->instance);
    else snprintf(text, sizeof text, "GPU-5c0ffee0-0000-4000-8000-%012d", device->gpu);
    return text_into(uuid, length, scripted_uuid ? scripted_uuid : text);
}

EXPORT int nvmlDeviceGetName(device_t *device, char *name, unsigned length) {
    ENTER(device);
    const char *text = device_text(device, "name");
    if (!text) text = device->instance >= 0 ? "NVIDIA H200 MIG 1g.18gb" : "NVIDIA H200";
    return text_into(name, length, text);
}

typedef struct { unsigned gpu, memory; } rates_t;

EXPORT int nvmlDeviceGetUtilizationRates(device_t *device, rates_t *rates) {
    ENTER_WHOLE(device);
    rates->gpu = (unsigned)device_number(device, "utilization", 100);
    rates->memory = (unsigned)device_number(device, "memory_utilization", 23);
    return leave(SUCCESS);
}

#define TOTAL_BYTES 150754820096ULL
#define RESERVED_BYTES 644939776ULL
#define USED_BYTES 1267531776ULL

typedef struct { u64 total, free, used; } memory_t;

EXPORT int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
    ENTER(device);
    memory->total = device_number(device, "memory_total", TOTAL_BYTES);
    memory->used = device_number(device, "memory_used", USED_BYTES) + RESERVED_BYTES;
    memory->free = memory->total - memory->used;
    return leave(SUCCESS);
}

typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;

EXPORT int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory) {
    ENTER(device);
    if (memory->version != 0x02000028) return leave(VERSION_MISMATCH);
    memory->total = device_number(device, "memory_total", TOTAL_BYTES);
    memory->reserved = RESERVED_BYTES;
    memory->used = device_number(device, "memory_used", USED_BYTES);
    memory->free = memory->total - memory->used - memory->reserved;
    return leave(SUCCESS);
}

#define WHOLE_NUMBER(function, type, name, otherwise)              \
    EXPORT int function(device_t *device, type *value) {           \
        ENTER_WHOLE(device);                                       \
        *value = (type)device_number(device, name, otherwise);     \
        return leave(SUCCESS);                                     \
    }
WHOLE_NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power", 691806)
WHOLE_NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit", 700000)
WHOLE_NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, "energy", 5724819)
WHOLE_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "reasons", 4)
WHOLE_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "reasons", 4)
WHOLE_NUMBER(nvmlDeviceGetSupportedEventTypes, u64, "event_types", 65439)
WHOLE_NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, "mig_devices_max", 7)

EXPORT int nvmlDeviceGetTemperature(device_t *device, unsigned sensor, unsigned *celsius) {
    ENTER_WHOLE(device);
    if (sensor) return leave(INVALID_ARGUMENT);
    *celsius = (unsigned)device_number(device, "temperature", 65);
    return leave(SUCCESS);
}

typedef struct { unsigned version, sensor; int celsius; } temperature_t;

EXPORT int nvmlDeviceGetTemperatureV(device_t *device, temperature_t *asked) {
    ENTER_WHOLE(device);
    if (asked->version != 0x0100000C) return leave(VERSION_MISMATCH);
    asked->celsius = (int)device_number(device, "temperature", 65);
    return leave(SUCCESS);
}

static int clock_into(device_t *device, unsigned type, unsigned *megahertz, const char *sm, u64 sm_default, const char *memory) {
    if (type == 1) *megahertz = (unsigned)device_number(device, sm, sm_default);
    else if (type == 2) *megahertz = (unsigned)device_number(device, memory, 3201);
    else return leave(INVALID_ARGUMENT);
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetClockInfo(device_t *device, unsigned type, unsigned *megahertz) {
    ENTER_WHOLE(device);
    return clock_into(device, type, megahertz, "sm_clock", 1755, "memory_clock");
}

EXPORT int nvmlDeviceGetMaxClockInfo(device_t *device, unsigned type, unsigned *megahertz) {
    ENTER_WHOLE(device);
    return clock_into(device, type, megahertz, "sm_clock_max", 1980, "memory_clock_max");
}

EXPORT int nvmlDeviceGetPcieThroughput(device_t *device, unsigned counter, unsigned *kilobytes) {
    ENTER_WHOLE(device);
    *kilobytes = (unsigned)device_number(device, counter ? "pcie_receive" : "pcie_transmit", 1235244);
    leave(SUCCESS);
    usleep(20000); /* as the real one */
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTotalEccErrors(device_t *device, unsigned type, unsigned counter, u64 *count) {
    ENTER_WHOLE(device);
    char key[48];
    snprintf(key, sizeof key, "ecc.%s.%s", counter ? "aggregate" : "volatile", type ? "uncorrected" : "corrected");
    *count = device_number(device, key, 0);
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetRemappedRows(device_t *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER_WHOLE(device);
    *corrected = (unsigned)device_number(device, "remapped.correctable", 0);
    *uncorrected = (unsigned)device_number(device, "remapped.uncorrectable", 0);
    *pending = (unsigned)device_number(device, "remapped.pending", 0);
    *failed = (unsigned)device_number(device, "remapped.failed", 0);
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetRetiredPages(device_t *device, unsigned cause, unsigned *count, u64 *addresses) {
    ENTER_WHOLE(device);
    const char *text = device_text(device, cause ? "retired.double_bit" : "retired.single_bit");
    if (!text) return leave(NOT_SUPPORTED);
    unsigned there = (unsigned)number(text, 0), room = *count;
    *count = there;
    if (there && (!addresses || room < there)) return leave(INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < there; i++) addresses[i] = 4096ULL * i;
    return leave(SUCCESS);
}

typedef struct {
    uint32_t id, scope;
    int64_t taken, latency;
    uint32_t type, result;
    u64 value;
} field_t;

EXPORT int nvmlDeviceGetFieldValues(device_t *device, int count, field_t *fields) {
    ENTER_WHOLE(device);
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "field.%u", fields[i].id);
        const char *text = device_text(device, key);
        fields[i].result = text ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 3; /* unsigned long long */
        fields[i].value = number(text, 0);
    }
    return leave(SUCCESS);
}

typedef struct {
    unsigned pid;
    u64 used;
    unsigned gpu_instance, compute_instance;
} process_t;

static int processes_into(device_t *device, const char *name, unsigned *count, process_t *processes) {
    const char *text = device_text(device, name);
    unsigned there = 0, room = *count;
    while (text && *text) {
        char *end;
        unsigned pid = (unsigned)strtoul(text, &end, 10);
        u64 used = *end == ':' ? strtoull(end + 1, &end, 10) : ~0ULL;
        if (processes && there < room)
            processes[there] = (process_t){pid, used, ~0U, ~0U};
        there++;
        text = *end == ',' ? end + 1 : end;
    }
    *count = there;
    return leave(there && (!processes || room < there) ? INSUFFICIENT_SIZE : SUCCESS);
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *processes) {
    ENTER(device);
    return processes_into(device, "processes", count, processes);
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *processes) {
    ENTER(device);
    return processes_into(device, "mps_processes", count, processes);
}

/* ---- MIG ---- */

EXPORT int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending) {
    ENTER_WHOLE(device);
    *current = *pending = instance_count(device->gpu) > 0;
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, device_t **instance) {
    ENTER_WHOLE(device);
    if ((int)index >= instance_count(device->gpu)) return leave(NOT_FOUND);
    *instance = &instances[device->gpu][index];
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceGetGpuInstanceId(device_t *device, unsigned *id) {
    ENTER(device);
    if (device->instance < 0) return leave(NOT_SUPPORTED);
    *id = 7 + (unsigned)device->instance;
    return leave(SUCCESS);
}

/* ---- events ---- */

EXPORT int nvmlEventSetCreate(event_set_t **set) {
    ENTER(NULL);
    *set = calloc(1, sizeof **set);
    live_event_sets++;
    return leave(SUCCESS);
}

EXPORT int nvmlDeviceRegisterEvents(device_t *device, u64 types, event_set_t *set) {
    ENTER_WHOLE(device);
    if (types & ~device_number(device, "event_types", 65439)) return leave(NOT_SUPPORTED);
    set->registered |= 1ULL << device->gpu;
    return leave(SUCCESS);
}

EXPORT int nvmlEventSetFree(event_set_t *set) {
    ENTER(NULL);
    free(set);
    live_event_sets--;
    return leave(SUCCESS);
}

typedef struct {
    device_t *device;
    u64 type, data;
    unsigned gpu_instance, compute_instance;
} event_t;

/* The next that was not delivered; one of a GPU that nobody listens to is gone, as it is in life. */
static int next_xid(const event_set_t *set, event_t *event) {
    const char *text = look_up("xids");
    for (int position = 0; text && *text; position++) {
        char *end;
        unsigned gpu = (unsigned)strtoul(text, &end, 10);
        u64 xid = *end == ':' ? strtoull(end + 1, &end, 10) : 0;
        text = *end == ',' ? end + 1 : end;
        if (position < delivered_xids) continue;
        delivered_xids++;
        if (gpu >= MAX_GPUS || !(set->registered >> gpu & 1)) continue;
        *event = (event_t){&gpus[gpu], XID_CRITICAL, xid, ~0U, ~0U};
        return 1;
    }
    return 0;
}

EXPORT int nvmlEventSetWait_v2(event_set_t *set, event_t *event, unsigned milliseconds) {
    double until = seconds_now() + milliseconds / 1e3;
    for (;;) {
        ENTER(NULL);
        if (next_xid(set, event)) return leave(SUCCESS);
        for (int gpu = 0; gpu < gpu_count(); gpu++)
            if (set->registered >> gpu & 1 && device_number(&gpus[gpu], "lost", 0)) return leave(GPU_IS_LOST);
        double left = until - seconds_now();
        leave(SUCCESS);
        if (left <= 0) return TIMEOUT;
        usleep(left > 0.1 ? 100000 : (useconds_t)(left * 1e6) + 1);
    }
}

/* ---- GPM ---- */

typedef struct { unsigned version, supported; } support_t;

EXPORT int nvmlGpmQueryDeviceSupport(device_t *device, support_t *asked) {
    ENTER_WHOLE(device);
    if (asked->version != 1) return leave(VERSION_MISMATCH);
    asked->supported = (unsigned)device_number(device, "gpm", 1);
    return leave(SUCCESS);
}

EXPORT int nvmlGpmSampleAlloc(sample_t **sample) {
    ENTER(NULL);
    *sample = calloc(1, sizeof **sample);
    live_samples++;
    return leave(SUCCESS);
}

EXPORT int nvmlGpmSampleFree(sample_t *sample) {
    pthread_mutex_lock(&lock);
    free(sample);
    live_samples--;
    return leave(SUCCESS);
}

EXPORT int nvmlGpmSampleGet(device_t *device, sample_t *sample) {
    ENTER_WHOLE(device);
    if (!device_number(device, "gpm", 1)) return leave(NOT_SUPPORTED);
    if (instance_count(device->gpu)) return leave(NOT_SUPPORTED);
    *sample = (sample_t){device->gpu, -1, seconds_now()};
    return leave(SUCCESS);
}

EXPORT int nvmlGpmMigSampleGet(device_t *device, unsigned id, sample_t *sample) {
    ENTER_WHOLE(device);
    if (id < 7 || (int)id - 7 >= instance_count(device->gpu)) return leave(INVALID_ARGUMENT);
    *sample = (sample_t){device->gpu, (int)id - 7, seconds_now()};
    return leave(SUCCESS);
}

typedef struct {
    unsigned id, result;
    double value;
    const char *texts[3];
} metric_t;

typedef struct { unsigned version, count; sample_t *first, *second; metric_t metrics[]; } metrics_get_t;

EXPORT int nvmlGpmMetricsGet(metrics_get_t *asked) {
    ENTER(NULL);
    if (asked->version != 1) return leave(VERSION_MISMATCH);
    sample_t *first = asked->first, *second = asked->second;
    if (!first || !second || first->taken == 0 || second->taken <= first->taken || first->gpu != second->gpu ||
        first->instance != second->instance)
        return leave(INVALID_ARGUMENT);
    device_t device = {second->gpu, second->instance};
    for (unsigned i = 0; i < asked->count; i++) {
        char key[32];
        snprintf(key, sizeof key, "gpm.%u", asked->metrics[i].id);
        const char *text = device_text(&device, key);
        asked->metrics[i].value = text ? strtod(text, NULL) : 0;
        asked->metrics[i].result = text && !strcmp(text, "unsupported") ? NOT_SUPPORTED : SUCCESS;
    }
    return leave(SUCCESS);
}
