#include "gpu_driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>

namespace sparseconv {
namespace {

// bytes of shared memory that a kernel gets without asking
constexpr unsigned ALWAYS = 48 << 10;

struct Driver {
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuModuleLoadData) module_load_data;
  decltype(&cuModuleGetFunction) module_get_function;
  decltype(&cuFuncSetAttribute) func_set_attribute;
  decltype(&cuFuncGetParamInfo) func_get_param_info;
  decltype(&cuLaunchKernelEx) launch_kernel_ex;
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    TORCH_CHECK(library != nullptr, "there is no NVIDIA driver here: libcuda.so.1 is not found");
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      TORCH_CHECK(function != nullptr, "the NVIDIA driver has no ", name, ": update it to 550 or later");
    };
    find(get_error_string, "cuGetErrorString");
    find(module_load_data, "cuModuleLoadData");
    find(module_get_function, "cuModuleGetFunction");
    find(func_set_attribute, "cuFuncSetAttribute");
    find(func_get_param_info, "cuFuncGetParamInfo");
    find(launch_kernel_ex, "cuLaunchKernelEx");
    find(tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  }
};

const Driver& driver() {
  static const Driver made;
  return made;
}

void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().get_error_string(result, &text);
  TORCH_CHECK(false, what, ": ", text ? text : "unknown error of the driver");
}

}  // namespace

void load(Kernel& kernel, const void* binary) {
  CUmodule module = nullptr;
  check(driver().module_load_data(&module, binary), "the kernel " + kernel.name + " cannot be loaded");
  check(driver().module_get_function(&kernel.function, module, kernel.name.c_str()), "there is no kernel " + kernel.name);
  if (kernel.shared > ALWAYS) {
    const auto most = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    check(driver().func_set_attribute(kernel.function, most, static_cast<int>(kernel.shared)),
          "the kernel " + kernel.name + " asks for more shared memory than there is");
  }
  for (size_t number = 0, offset = 0, size = 0;; ++number) {
    if (driver().func_get_param_info(kernel.function, number, &offset, &size) != CUDA_SUCCESS) break;
    kernel.sizes.push_back(size);
  }
}

void Launch::complete() {
  const std::vector<size_t>& sizes = kernel->sizes;
  while (parameters.size() < sizes.size() && sizes[parameters.size()] == sizeof(void*)) {
    parameters.push_back(Parameter::of<void*>(nullptr));
  }
  const auto is_same = [](const Parameter& mine, size_t size) { return mine.size == size; };
  TORCH_CHECK(std::equal(parameters.begin(), parameters.end(), sizes.begin(), sizes.end(), is_same), "the kernel ",
              kernel->name, " takes other parameters than the package says");
}

void Launch::on(CUstream stream) {
  std::vector<void*> values;
  for (Parameter& parameter : parameters) values.push_back(parameter.bytes.data());
  std::array<CUlaunchAttribute, 3> attributes{};
  unsigned count = 0;
  if (kernel->is_cooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count++].value.cooperative = 1;
  }
  if (kernel->cluster > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.clusterDim = {kernel->cluster, 1, 1};
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    attributes[count++].value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  CUlaunchConfig config{};
  config.gridDimX = grid[0] * kernel->cluster;
  config.gridDimY = grid[1];
  config.gridDimZ = grid[2];
  config.blockDimX = kernel->threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel->shared;
  config.hStream = stream;
  config.attrs = attributes.data();
  config.numAttrs = count;
  check(driver().launch_kernel_ex(&config, kernel->function, values.data(), nullptr), "the kernel " + kernel->name);
}

CUtensorMap encode(const Matrix& matrix) {
  const size_t rank = matrix.shape.size();
  TORCH_CHECK(rank > 0 && rank <= 5 && matrix.strides.size() == rank && matrix.box.size() == rank, "a tensor map of ",
              rank, " axes");
  std::array<cuuint64_t, 5> shape{}, strides{};
  std::array<cuuint32_t, 5> box{}, steps{};
  for (size_t axis = 0; axis < rank; ++axis) {  // the driver begins with the last axis
    shape[rank - 1 - axis] = static_cast<cuuint64_t>(matrix.shape[axis]);
    box[rank - 1 - axis] = static_cast<cuuint32_t>(matrix.box[axis]);
    steps[axis] = 1;
    if (axis + 1 < rank) strides[rank - 2 - axis] = static_cast<cuuint64_t>(matrix.strides[axis] * matrix.bytes);
  }
  CUtensorMap map;
  check(driver().tensor_map_encode_tiled(
            &map, static_cast<CUtensorMapDataType>(matrix.type), static_cast<cuuint32_t>(rank), matrix.address,
            shape.data(), strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
            static_cast<CUtensorMapSwizzle>(matrix.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "a tensor map cannot be made");
  return map;
}

}  // namespace sparseconv
