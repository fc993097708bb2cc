// NVIDIA's driver on a CPU, for tests: as much of it as normpass calls, under the names by which its
// Python bindings look it up. A module's "machine code" is the path of a library that was built for
// this CPU (tests/cuda_on_cpu.py), a kernel is its function run_<name>.
//
// The structures are those of cuda.h, in the layout that the bindings fill in.

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum Attribute { LOCAL_SIZE_BYTES = 3, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
constexpr int CLUSTER_DIMENSION = 4;
constexpr unsigned STATIC_LIMIT = 48 * 1024;

struct LaunchAttribute {
  int id;
  char pad[4];
  unsigned value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
using Run = void (*)(int64_t, void* const*);
std::map<Run, unsigned> allowed;  // bytes of shared memory
thread_local void* current = nullptr;

int get_current(void** context) { *context = current; return SUCCESS; }
int set_current(void* context) { current = context; return SUCCESS; }
int get_device(int* device, int ordinal) { *device = ordinal; return SUCCESS; }
int retain(void** context, int device) {
  *context = reinterpret_cast<void*>(intptr_t(0x1000 + device));
  return SUCCESS;
}
int load(void** module, const void* code) {
  if (!current) return INVALID_CONTEXT;
  *module = dlopen(static_cast<const char*>(code), RTLD_NOW);
  return *module ? SUCCESS : INVALID_VALUE;
}
int function_of(void** function, void* module, const char* name) {
  *function = dlsym(module, (std::string("run_") + name).c_str());
  return *function ? SUCCESS : NOT_FOUND;
}
int set_attribute(void* function, int attribute, int value) {
  if (attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES) return INVALID_VALUE;
  allowed[reinterpret_cast<Run>(function)] = value;
  return SUCCESS;
}
int get_attribute(int* value, int attribute, void*) {
  *value = 0;
  return attribute == LOCAL_SIZE_BYTES ? SUCCESS : INVALID_VALUE;
}
bool fits(void* function, unsigned shared) {
  const auto found = allowed.find(reinterpret_cast<Run>(function));
  return shared <= (found == allowed.end() ? STATIC_LIMIT : found->second);
}
int blocks_at_once(int* blocks, void* function, int, std::size_t shared) {
  *blocks = 1;
  return fits(function, shared) ? SUCCESS : INVALID_VALUE;
}
int clusters_at_once(int* clusters, void* function, const LaunchConfig* config) {
  if (config->count != 1 || config->attributes[0].id != CLUSTER_DIMENSION) return INVALID_VALUE;
  const unsigned* size = config->attributes[0].value;
  if (size[0] < 2 || size[1] != 1 || size[2] != 1 || config->grid[0] % size[0]) return INVALID_VALUE;
  *clusters = 2;
  return fits(function, config->shared) ? SUCCESS : INVALID_VALUE;
}
int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
           unsigned shared, void*, void** parameters, void** extra) {
  if (!current) return INVALID_CONTEXT;
  if (y != 1 || z != 1 || extra || threads % 32 || !fits(function, shared)) return INVALID_VALUE;
  reinterpret_cast<Run>(function)(x, parameters);
  return SUCCESS;
}

const std::map<std::string, void*> FUNCTIONS = {
    {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
    {"cuCtxSetCurrent", reinterpret_cast<void*>(set_current)},
    {"cuDeviceGet", reinterpret_cast<void*>(get_device)},
    {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
    {"cuModuleLoadData", reinterpret_cast<void*>(load)},
    {"cuModuleGetFunction", reinterpret_cast<void*>(function_of)},
    {"cuFuncSetAttribute", reinterpret_cast<void*>(set_attribute)},
    {"cuFuncGetAttribute", reinterpret_cast<void*>(get_attribute)},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", reinterpret_cast<void*>(blocks_at_once)},
    {"cuOccupancyMaxActiveClusters", reinterpret_cast<void*>(clusters_at_once)},
    {"cuLaunchKernel", reinterpret_cast<void*>(launch)},
};

}  // namespace

extern "C" int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  const auto found = FUNCTIONS.find(name);
  *function = found == FUNCTIONS.end() ? nullptr : found->second;
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}
extern "C" int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
// What normpass calls without the bindings.
extern "C" {
int cuCtxGetDevice(int* device) { *device = 0; return current ? SUCCESS : INVALID_CONTEXT; }
int cuModuleLoadData(void** module, const void* code) { return load(module, code); }
int cuModuleUnload(void* module) { return dlclose(module) ? INVALID_VALUE : SUCCESS; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return function_of(function, module, name);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return set_attribute(function, attribute, value);
}
int cuMemcpyDtoDAsync(uint64_t to, uint64_t from, std::size_t size, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
  return SUCCESS;
}
int cuMemsetD8Async(uint64_t to, unsigned char byte, std::size_t size, void*) {
  std::memset(reinterpret_cast<void*>(to), byte, size);
  return SUCCESS;
}
int cuCtxGetCurrent(void** context) { return get_current(context); }
int cuCtxSetCurrent(void* context) { return set_current(context); }
int cuDeviceGet(int* device, int ordinal) { return get_device(device, ordinal); }
int cuDevicePrimaryCtxRetain(void** context, int device) { return retain(context, device); }
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                   unsigned of_y, unsigned of_z, unsigned shared, void* stream, void** parameters,
                   void** extra) {
  return launch(function, x, y, z, threads, of_y, of_z, shared, stream, parameters, extra);
}
int cuGetErrorName(int status, const char** name) {
  *name = status == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
  return SUCCESS;
}
}
extern "C" int cuDriverGetVersion(int* version) { *version = 13050; return SUCCESS; }
