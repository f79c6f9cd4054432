/* The virtual memory of a GPU's driver, over pages of this process, for one device: the functions and
 * structures that the platforms call, with what the real ones refuse (orders, sizes, properties, and
 * threads to which the device was not made current: stricter than HIP's first device).
 *
 * Compiled by test_gpu_virtual_memory.py: CUDA's as it stands (cuda.h), HIP's with -DHIP: other names
 * for the functions (hip/hip_runtime_api.h), the same codes, and structures of the same layout.
 * `fake_*` is for the test.
 */
#ifdef HIP
#define cuMemGetAllocationGranularity hipMemGetAllocationGranularity
#define cuMemAddressReserve hipMemAddressReserve
#define cuMemAddressFree hipMemAddressFree
#define cuMemCreate hipMemCreate
#define cuMemRelease hipMemRelease
#define cuMemMap hipMemMap
#define cuMemUnmap hipMemUnmap
#define cuMemSetAccess hipMemSetAccess
#define cuMemcpyDtoH_v2 hipMemcpyDtoH
#define cuMemcpyHtoD_v2 hipMemcpyHtoD
#endif
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long Handle;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
#ifndef HIP
        unsigned char reserved[4];
#endif
    } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

enum { SUCCESS = 0, INVALID = 1, NO_MEMORY = 2, NOT_CURRENT = 201, NOT_MAPPED = 211 };
enum { GRANULARITY = 2 << 20, MOST = 64 };

static struct { size_t size; int mapped; } created[MOST];
static struct { CUdeviceptr at; size_t size; Handle handle; int usable; } ranges[MOST];
static size_t limit = (size_t)1 << 30, held;

void fake_limit(size_t bytes) { limit = bytes; }
size_t fake_held(void) { return held; }
int fake_left(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++) count += (ranges[i].at != 0) + (created[i].size != 0);
    return count;
}

#ifdef HIP
static __thread int current = -1;
CUresult hipSetDevice(int device) { return device ? INVALID : (current = device, SUCCESS); }
static int elsewhere(void) { return current != 0; }
#else
typedef void *CUcontext;
static int primary, retained;
static __thread CUcontext current;
CUresult cuCtxGetCurrent(CUcontext *out) { return *out = current, SUCCESS; }
CUresult cuDeviceGet(int *out, int ordinal) { return ordinal ? INVALID : (*out = 40, SUCCESS); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, int device) {
    return device != 40 ? INVALID : (retained++, *out = &primary, SUCCESS);
}
CUresult cuCtxSetCurrent(CUcontext context) {
    return context != &primary || !retained ? NOT_CURRENT : (current = context, SUCCESS);
}
static int elsewhere(void) { return current != &primary; }
#endif

static int right(const CUmemAllocationProp *prop) {
    static const unsigned char none[8];
    return prop->type == 1 && prop->requestedHandleTypes == 0 && prop->location.type == 1 &&
           prop->location.id == 0 && !prop->win32HandleMetaData &&
           !memcmp(&prop->allocFlags, none, sizeof prop->allocFlags);
}

static int find(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (ranges[i].at == at && ranges[i].size == size) return i;
    return -1;
}

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option) {
    if (elsewhere()) return NOT_CURRENT;
    if (!right(prop) || option != 0) return INVALID;
    *out = GRANULARITY;
    return SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    if (elsewhere()) return NOT_CURRENT;
    if (!size || size % GRANULARITY || alignment % GRANULARITY || wish || flags) return INVALID;
    int i = find(0, 0);
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (i < 0 || at == MAP_FAILED) return NO_MEMORY;
    *out = (CUdeviceptr)(uintptr_t)at;
    ranges[i].at = *out, ranges[i].size = size, ranges[i].handle = 0, ranges[i].usable = 0;
    return SUCCESS;
}

CUresult cuMemCreate(Handle *out, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    if (elsewhere()) return NOT_CURRENT;
    if (!right(prop) || size % GRANULARITY || flags) return INVALID;
    if (held + size > limit) return NO_MEMORY;
    for (int i = 0; i < MOST; i++)
        if (!created[i].size) {
            created[i].size = size, held += size, *out = (Handle)i + 1;
            return SUCCESS;
        }
    return NO_MEMORY;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, Handle handle,
                  unsigned long long flags) {
    if (elsewhere()) return NOT_CURRENT;
    int i = find(at, size);
    if (i < 0 || ranges[i].handle || offset || flags || !handle || handle > MOST ||
        created[handle - 1].size != size)
        return INVALID;
    ranges[i].handle = handle, created[handle - 1].mapped = 1;
    return SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *desc, size_t count) {
    if (elsewhere()) return NOT_CURRENT;
    int i = find(at, size);
    if (i < 0 || !ranges[i].handle || count != 1 || desc->location.type != 1 ||
        desc->location.id != 0 || desc->flags != 3)
        return INVALID;
    mmap((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    ranges[i].usable = 1;
    return SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    if (elsewhere()) return NOT_CURRENT;
    int i = find(at, size);
    if (i < 0 || !ranges[i].handle) return INVALID;
    mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    created[ranges[i].handle - 1].mapped = 0, ranges[i].handle = 0, ranges[i].usable = 0;
    return SUCCESS;
}

CUresult cuMemRelease(Handle handle) {
    if (elsewhere()) return NOT_CURRENT;
    if (!handle || handle > MOST || !created[handle - 1].size || created[handle - 1].mapped)
        return INVALID;
    held -= created[handle - 1].size, created[handle - 1].size = 0;
    return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    if (elsewhere()) return NOT_CURRENT;
    int i = find(at, size);
    if (i < 0 || ranges[i].handle) return INVALID;
    ranges[i].at = 0, ranges[i].size = 0;
    munmap((void *)(uintptr_t)at, size);
    return SUCCESS;
}

static int usable(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (ranges[i].usable && at >= ranges[i].at && at + size <= ranges[i].at + ranges[i].size)
            return 1;
    return 0;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr at, size_t size) {
    if (elsewhere()) return NOT_CURRENT;
    if (!usable(at, size)) return NOT_MAPPED;
    memcpy(to, (void *)(uintptr_t)at, size);
    return SUCCESS;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr at, const void *from, size_t size) {
    if (elsewhere()) return NOT_CURRENT;
    if (!usable(at, size)) return NOT_MAPPED;
    memcpy((void *)(uintptr_t)at, from, size);
    return SUCCESS;
}

static const char *told(CUresult code) {
    if (code == NOT_CURRENT) return "no current device";
    return code == NO_MEMORY ? "out of memory" : code == NOT_MAPPED ? "not mapped" : "invalid value";
}

#ifdef HIP
const char *hipGetErrorString(CUresult code) { return told(code); }
#else
CUresult cuGetErrorString(CUresult code, const char **out) { return *out = told(code), SUCCESS; }
#endif
