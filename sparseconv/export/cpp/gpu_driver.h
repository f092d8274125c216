// Kernels through the driver's own functions, which are asked of the library that is loaded: nothing to link.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace sparseconv {

// The bytes of one parameter of a kernel; those of a tensor map must be aligned.
struct alignas(64) Parameter {
  std::array<std::byte, 128> bytes{};
  size_t size = 0;

  template <typename T>
  static Parameter of(const T& value) {
    Parameter made;
    static_assert(sizeof(T) <= sizeof(made.bytes));
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    std::copy(first, first + sizeof(T), made.bytes.begin());
    made.size = sizeof(T);
    return made;
  }
};

// A kernel on the current device, with the size of each of its parameters. It stays loaded until the process ends.
struct Kernel {
  CUfunction function = nullptr;
  std::string name;
  unsigned threads = 0, shared = 0, cluster = 1;
  bool is_cooperative = false;
  std::vector<size_t> sizes;
};

struct Launch {
  const Kernel* kernel = nullptr;
  std::array<unsigned, 3> grid{};
  std::vector<Parameter> parameters;

  // Fills up what Triton adds behind a kernel's own parameters, addresses of no memory; an error where sizes differ.
  void complete();
  void on(CUstream stream);
};

// A matrix (rows, columns) whose tiles the copy engine brings, as Triton describes it to the driver.
struct Matrix {
  void* address = nullptr;
  int type = 0, swizzle = 0, bytes = 0;
  std::vector<int64_t> box, shape, strides;
};

void load(Kernel& kernel, const void* binary);
CUtensorMap encode(const Matrix& matrix);

}  // namespace sparseconv
