// How C++ without Python launches kernels on NVIDIA's GPUs: it loads them from the machine code that
// lies in the file itself, once for each device, and makes room for what they need beside tensors.
//
// Memory is torch's own, by the functions whose binary interface it keeps from version to version.

#pragma once

#include <cuda.h>

#include <c10/util/generic_math.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace normpass {

// Where tensors begin that kernels read and write in vectors.
constexpr uintptr_t VECTOR = 16;

inline void check(CUresult status) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(status, &name);
  throw std::runtime_error(std::string("CUDA driver: ") + (name ? name : "an unknown error"));
}

// A kernel of a cubin. threads: of a block. shared: bytes on chip that it is launched with.
class Kernel {
 public:
  Kernel(const char* code, const char* name, unsigned threads, unsigned shared)
      : threads(threads), shared(shared), code(code), name(name) {}
  Kernel(const Kernel&) = delete;
  ~Kernel() {  // when the process ends, there may be no driver any more to take it back
    for (const Loaded& each : loaded) cuModuleUnload(each.module);
  }

  CUfunction on_this_device() {
    CUcontext context;
    check(cuCtxGetCurrent(&context));
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Loaded& each : loaded)
      if (each.context == context) return each.function;
    Loaded found{context, nullptr, nullptr};
    check(cuModuleLoadData(&found.module, code));
    check(cuModuleGetFunction(&found.function, found.module, name));
    const auto most = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    check(cuFuncSetAttribute(found.function, most, shared));
    loaded.push_back(found);
    return found.function;
  }

  const unsigned threads, shared;

 private:
  struct Loaded {
    CUcontext context;
    CUmodule module;
    CUfunction function;
  };
  const char *const code, *const name;
  std::mutex mutex;
  std::vector<Loaded> loaded;
};

// Bytes of the current device until the end of the block; what was launched by then may use them.
class Memory {
 public:
  explicit Memory(int64_t size) {
    if (size <= 0) return;
    CUdevice device;
    check(cuCtxGetDevice(&device));
    const int64_t stride = 1;
    const auto failed = aoti_torch_empty_strided(
        1, &size, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(), device, &tensor);
    if (failed || aoti_torch_get_data_ptr(tensor, &first))
      throw std::runtime_error("found no memory for a region's arrays, expected " +
                               std::to_string(size) + " bytes");
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (tensor) aoti_torch_delete_tensor_object(tensor);
  }
  void* at(int64_t offset) const { return static_cast<char*>(first) + offset; }

 private:
  AtenTensorHandle tensor = nullptr;
  void* first = nullptr;
};

// A tensor of so many bytes as kernels read it: a copy, if it does not begin where a vector does.
// is_empty: whether it has no elements, in whose stead zeros are read.
class Input {
 public:
  Input(const void* tensor, int64_t size, bool is_empty, CUstream stream)
      : copy(is_empty || reinterpret_cast<uintptr_t>(tensor) % VECTOR ? size : 0),
        first(copy.at(0) ? copy.at(0) : const_cast<void*>(tensor)) {
    if (!copy.at(0)) return;
    const auto from = reinterpret_cast<CUdeviceptr>(tensor), to = reinterpret_cast<CUdeviceptr>(first);
    check(is_empty ? cuMemsetD8Async(to, 0, size, stream)
                   : cuMemcpyDtoDAsync(to, from, size, stream));
  }
  operator void*() const { return first; }

 private:
  const Memory copy;
  void* const first;
};

template <class... Arguments>
void launch(Kernel& kernel, int64_t blocks, CUstream stream, Arguments... arguments) {
  static_assert(((sizeof(Arguments) == 8) && ...), "addresses and int64_t");
  if (blocks <= 0) return;
  void* parameters[] = {&arguments...};
  check(cuLaunchKernel(kernel.on_this_device(), blocks, 1, 1, kernel.threads, 1, 1, kernel.shared,
                       stream, parameters, nullptr));
}

}  // namespace normpass
