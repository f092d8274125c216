// A packaged network: what a program without Python calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::inductor {
class AOTIModelPackageLoader;
}

namespace sparseconv {

// What sparseconv.export.package wrote. One call at a time.
class Network {
 public:
  explicit Network(const std::string& package);
  ~Network();

  // coords (N, 1+D) and features (N, C) as the package's example had them -> the network's results, one after another.
  // Machine code trusts its inputs, so dtypes, columns and rows are checked here, and voxels by the operators.
  std::vector<at::Tensor> run(const at::Tensor& coords, const at::Tensor& features);

 private:
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
  std::string coords_type_, features_type_;
  int64_t coords_columns_ = 0, features_columns_ = 0;
};

}  // namespace sparseconv
