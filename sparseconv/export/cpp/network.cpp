#include "network.h"

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <sstream>

namespace sparseconv {
namespace {

void check(const char* name, const at::Tensor& given, int64_t rows, int64_t columns, const std::string& type) {
  TORCH_CHECK_VALUE(given.dim() == 2 && given.size(0) == rows && given.size(1) == columns && given.device().is_cpu(), name,
                    " must be (", rows, ", ", columns, ") on the CPU; got ", given.sizes(), " on ", given.device());
  TORCH_CHECK_TYPE(c10::toString(given.scalar_type()) == type, name, " must be of type ", type, "; got ",
                   given.scalar_type());
}

const std::string& existing(const std::string& path) {
  TORCH_CHECK_VALUE(std::ifstream(path).good(), "there is no file ", path);
  return path;
}

}  // namespace

Network::Network(const std::string& package)
    : loader_(std::make_unique<torch::inductor::AOTIModelPackageLoader>(existing(package))) {
  const auto metadata = loader_->get_metadata();
  const auto inputs = metadata.find("sparseconv_inputs");
  TORCH_CHECK_VALUE(inputs != metadata.end(), package, " is no package that sparseconv.export.package wrote");
  std::istringstream words(inputs->second);
  words >> coords_type_ >> coords_columns_ >> features_type_ >> features_columns_;
  TORCH_CHECK_VALUE(words, package, " says of its inputs: ", inputs->second);
}

Network::~Network() = default;

std::vector<at::Tensor> Network::run(const at::Tensor& coords, const at::Tensor& features) {
  check("coords", coords, coords.dim() ? coords.size(0) : 0, coords_columns_, coords_type_);
  check("features", features, coords.size(0), features_columns_, features_type_);
  return loader_->run({coords.contiguous(), features.contiguous()});
}

}  // namespace sparseconv
