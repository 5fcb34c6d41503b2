/* A stand-in for libnvidia-ml.so.1: one GPU that can be cut, in this process's memory.
 *
 * The simulated driver of tasks.gpu.simulated is Python and sees Python objects. What only a C library sees are
 * pointers, sizes of structures and their versions: here every handle carries a mark that is checked, structures are
 * laid out as in nvml.h, and a wrong pointer ends the process, as with the real library.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, IN_USE = 19,
       RESOURCES = 24, VERSION = 25 };
enum { DEVICE = 0x6e764450, MIG = 0x6e764d47, GI = 0x6e764749, CI = 0x6e764349 };

typedef struct { unsigned start, size; } Placement;
typedef struct { unsigned version, id, p2p, slices, count, sms, copy, dec, enc, jpeg, ofa;
                 unsigned long long memory_mb; char name[96]; } Profile;
typedef struct { unsigned version, id, slices, count, sms, copy, dec, enc, jpeg, ofa; char name[96]; } ComputeProfile;
typedef struct { unsigned mark, gi, profile; Placement place; int has_compute; unsigned made; } Instance;
typedef struct { void *device; unsigned id, profile; Placement place; } InstanceInfo;
typedef struct { void *device, *instance; unsigned id, profile; Placement place; } ComputeInfo;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned mark; Instance *of; } Part;

static struct { unsigned mark; } gpu = { DEVICE };
static const char *const UUID = "GPU-00000000-0000-0000-0000-00000000c0de";
static int users, mode;
static unsigned made;
static Instance instances[8];
static Part computes[8] = {{CI,0},{CI,0},{CI,0},{CI,0},{CI,0},{CI,0},{CI,0},{CI,0}};
static Part devices[8] = {{MIG,0},{MIG,0},{MIG,0},{MIG,0},{MIG,0},{MIG,0},{MIG,0},{MIG,0}};

static const struct { unsigned which, id, slices, count, size, starts[7], number; const char *name; } OFFERS[] = {
    {0, 19, 1, 7, 1, {0, 1, 2, 3, 4, 5, 6}, 7, "MIG 1g.10gb"},
    {2, 9, 3, 2, 4, {0, 4}, 2, "MIG 3g.40gb"},
    {4, 0, 7, 1, 8, {0}, 1, "MIG 7g.80gb"},
};
#define NUMBER (sizeof OFFERS / sizeof *OFFERS)

static void must(const void *handle, unsigned mark) {
    if (*(const unsigned *)handle != mark) { fprintf(stderr, "a pointer to something else\n"); abort(); }
}
static int offer(unsigned id) {
    for (unsigned i = 0; i < NUMBER; i++) if (OFFERS[i].id == id) return (int)i;
    return -1;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; users++; return OK; }
int nvmlShutdown(void) { if (!users) return UNINITIALIZED; users--; return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "1.2.3-standin"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!users) return UNINITIALIZED;
    if (index) return INVALID;
    *handle = &gpu; return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, UUID)) return NOT_FOUND;
    *handle = &gpu; return OK;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    must(device, DEVICE); snprintf(text, size, "stand-in (simulated)"); return OK;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    if (*(unsigned *)device == MIG)
        snprintf(text, size, "MIG-00000000-0000-0000-0000-%012u", ((Part *)device)->of->made);
    else { must(device, DEVICE); snprintf(text, size, "%s", UUID); }
    return OK;
}
int nvmlDeviceGetPciInfo_v3(void *device, Pci *info) {
    must(device, DEVICE); memset(info, 0, sizeof *info);
    info->bus = 7; info->id = 0x233010DE; strcpy(info->bus_id, "00000000:07:00.0"); return OK;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    must(device, DEVICE); memory->total = 80ull << 30; memory->used = 0; memory->free = memory->total; return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *infos) {
    must(device, DEVICE); (void)infos; *count = 0; return OK;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    must(device, DEVICE); *current = *pending = (unsigned)mode; return OK;
}
int nvmlDeviceSetMigMode(void *device, unsigned wanted, unsigned *status) {
    must(device, DEVICE); *status = OK;
    for (int i = 0; i < 8; i++) if (instances[i].mark) *status = IN_USE;
    if (!*status) mode = (int)wanted;
    return OK;
}
int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned which, Profile *info) {
    must(device, DEVICE);
    if (info->version != 0x02000098 || sizeof *info != 0x98) return VERSION;
    if (which > 0x11) return INVALID;
    for (unsigned i = 0; i < NUMBER; i++) if (OFFERS[i].which == which) {
        info->id = OFFERS[i].id; info->slices = OFFERS[i].slices; info->count = OFFERS[i].count;
        info->memory_mb = 10000ull * OFFERS[i].size; strcpy(info->name, OFFERS[i].name); return OK;
    }
    return NOT_SUPPORTED;
}
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, unsigned id, Placement *places, unsigned *count) {
    int i = offer(id); must(device, DEVICE);
    if (i < 0) return INVALID;
    if (places) {
        if (*count < OFFERS[i].number) return SMALL;
        for (unsigned n = 0; n < OFFERS[i].number; n++) places[n] = (Placement){OFFERS[i].starts[n], OFFERS[i].size};
    }
    *count = OFFERS[i].number; return OK;
}
int nvmlDeviceCreateGpuInstanceWithPlacement(void *device, unsigned id, const Placement *place, Instance **handle) {
    int i = offer(id); must(device, DEVICE);
    if (!mode) return NOT_SUPPORTED;
    if (i < 0 || place->size != OFFERS[i].size) return INVALID;
    Instance *free = 0;
    for (int n = 7; n >= 0; n--) {
        Instance *one = &instances[n];
        if (!one->mark) free = one;
        else if (one->place.start < place->start + place->size && place->start < one->place.start + one->place.size)
            return RESOURCES;
    }
    *free = (Instance){GI, 0, id, *place, 0, ++made};
    free->gi = (unsigned)(free - instances) + 1;
    *handle = free; return OK;
}
int nvmlDeviceGetGpuInstances(void *device, unsigned id, Instance **found, unsigned *count) {
    must(device, DEVICE); *count = 0;
    for (int n = 0; n < 8; n++) if (instances[n].mark && instances[n].profile == id) found[(*count)++] = &instances[n];
    return OK;
}
int nvmlDeviceGetGpuInstanceById(void *device, unsigned gi, Instance **handle) {
    must(device, DEVICE);
    if (gi < 1 || gi > 8 || !instances[gi - 1].mark) return NOT_FOUND;
    *handle = &instances[gi - 1]; return OK;
}
int nvmlGpuInstanceGetInfo(Instance *one, InstanceInfo *info) {
    must(one, GI); *info = (InstanceInfo){&gpu, one->gi, one->profile, one->place}; return OK;
}
int nvmlGpuInstanceDestroy(Instance *one) {
    must(one, GI);
    if (one->has_compute) return IN_USE;
    memset(one, 0, sizeof *one); return OK;
}
int nvmlGpuInstanceGetComputeInstanceProfileInfoV(Instance *one, unsigned which, unsigned engine, ComputeProfile *info) {
    must(one, GI);
    if (info->version != 0x02000088 || sizeof *info != 0x88) return VERSION;
    int i = offer(one->profile);
    if (engine || which != OFFERS[i].which) return NOT_SUPPORTED;
    info->id = which; info->slices = OFFERS[i].slices; info->count = 1; return OK;
}
int nvmlGpuInstanceCreateComputeInstance(Instance *one, unsigned profile, Part **handle) {
    must(one, GI); (void)profile;
    if (one->has_compute) return RESOURCES;
    one->has_compute = 1; one->made = ++made;
    computes[one->gi - 1].of = one; *handle = &computes[one->gi - 1]; return OK;
}
int nvmlGpuInstanceGetComputeInstanceById(Instance *one, unsigned ci, Part **handle) {
    must(one, GI);
    if (ci || !one->has_compute) return NOT_FOUND;
    computes[one->gi - 1].of = one; *handle = &computes[one->gi - 1]; return OK;
}
int nvmlComputeInstanceGetInfo_v2(Part *part, ComputeInfo *info) {
    must(part, CI); int i = offer(part->of->profile);
    *info = (ComputeInfo){&gpu, part->of, 0, OFFERS[i].which, {0, OFFERS[i].slices}}; return OK;
}
int nvmlComputeInstanceDestroy(Part *part) { must(part, CI); part->of->has_compute = 0; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { must(device, DEVICE); *count = mode ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, Part **handle) {
    must(device, DEVICE);
    if (index > 7 || !instances[index].has_compute) return NOT_FOUND;
    devices[index].of = &instances[index]; *handle = &devices[index]; return OK;
}
int nvmlDeviceGetGpuInstanceId(Part *device, unsigned *gi) { must(device, MIG); *gi = device->of->gi; return OK; }
int nvmlDeviceGetComputeInstanceId(Part *device, unsigned *ci) { must(device, MIG); *ci = 0; return OK; }
