// Runs a packaged network on a point cloud, without Python, and compares its results with expected ones.
//
//   run_package PACKAGE SCENE [EXPECTED] [--size EDGE] [--low X Y Z --high X Y Z] [--zyx] [--repeat N] [--exact]
//
// PACKAGE.pt2 is one for a CPU, PACKAGE.pt one for a GPU. --exact wants every bit of a result to be the expected one.
// SCENE.bin is points: float32 x, y, z and a fourth number, as KITTI writes them. EDGE is that of a voxel, whose features
// are means over its points. With a box, points outside of it are left out, and voxels are counted from its lower corner.
// --zyx turns the axes round, as networks of spconv's kind want them. SCENE.pt is voxels: coords (N, 1+D) int32 and
// features (N, C) in a list that torch.save wrote. So is EXPECTED, a list of the network's results.

#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>

#include <ATen/ATen.h>

#include "functions.h"
#include "network.h"
#ifdef SPARSECONV_GPU
#include <c10/cuda/CUDAFunctions.h>

#include "gpu_network.h"
#endif

namespace {

constexpr int64_t COLUMNS = 4;

// How far a result may be off, by the largest expected value: products are summed in another order.
double tolerance(at::ScalarType type) {
  return type == at::kDouble ? 1e-10 : type == at::kHalf ? 1e-2 : type == at::kBFloat16 ? 5e-2 : 1e-4;
}

struct Options {
  std::vector<std::string> plain;
  double size = 0;
  std::vector<double> low, high;
  bool zyx = false, exact = false;
  int repeat = 1;
};

Options parse(int count, char** words) {
  Options options;
  const auto number = [&](int& at) {
    TORCH_CHECK(at + 1 < count, words[at], " needs a number");
    return std::stod(words[++at]);
  };
  for (int at = 1; at < count; ++at) {
    const std::string word = words[at];
    if (word == "--low" || word == "--high") {
      for (int axis = 0; axis < 3; ++axis) (word == "--low" ? options.low : options.high).push_back(number(at));
    } else if (word == "--size") {
      options.size = number(at);
    } else if (word == "--zyx") {
      options.zyx = true;
    } else if (word == "--exact") {
      options.exact = true;
    } else if (word == "--repeat") {
      options.repeat = static_cast<int>(number(at));
    } else {
      options.plain.push_back(word);
    }
  }
  TORCH_CHECK(options.plain.size() == 2 || options.plain.size() == 3, "run_package PACKAGE SCENE [EXPECTED] [--size EDGE]");
  TORCH_CHECK(options.low.size() == options.high.size(), "--low and --high go together");
  return options;
}

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "there is no file ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<at::Tensor> tensors_of(const std::string& path) {
  std::vector<at::Tensor> found;
  const c10::List<c10::IValue> listed = torch::jit::pickle_load(bytes_of(path)).toList();
  for (size_t number = 0; number < listed.size(); ++number) found.push_back(listed.get(number).toTensor());
  return found;
}

bool ends_in(const std::string& name, const std::string& ending) {
  return name.size() >= ending.size() && name.compare(name.size() - ending.size(), ending.size(), ending) == 0;
}

// coords (N, 1+D) int32 and features (N, C)
std::vector<at::Tensor> voxels_of(const Options& options) {
  if (ends_in(options.plain[1], ".pt")) {
    std::vector<at::Tensor> scene = tensors_of(options.plain[1]);
    TORCH_CHECK(scene.size() == 2, options.plain[1], " holds ", scene.size(), " tensors, not coords and features");
    return scene;
  }
  TORCH_CHECK(options.size > 0, "points become voxels of --size EDGE");
  std::vector<char> bytes = bytes_of(options.plain[1]);
  const int64_t width = COLUMNS * static_cast<int64_t>(sizeof(float));
  TORCH_CHECK(static_cast<int64_t>(bytes.size()) % width == 0, options.plain[1], " is not of ", COLUMNS, " columns");
  at::Tensor points = at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size()) / width, COLUMNS}, at::kFloat).clone();
  at::Tensor origin = at::zeros({3}, at::kDouble);
  if (!options.low.empty()) {
    origin = at::tensor(options.low, at::kDouble);
    const at::Tensor where = points.narrow(1, 0, 3).to(at::kDouble);
    const at::Tensor inside = ((where >= origin) & (where < at::tensor(options.high, at::kDouble))).all(1);
    points = points.index({inside});
  }
  at::Tensor where = points.narrow(1, 0, 3);
  if (options.zyx) {
    where = where.flip(1);
    origin = origin.flip(0);
  }
  const std::vector<double> size(3, options.size), corner(origin.data_ptr<double>(), origin.data_ptr<double>() + 3);
  const auto [coords, features] = sparseconv::voxelize(where, points, size, corner);
  return {coords, features};
}

using Run = std::function<std::vector<at::Tensor>(const at::Tensor&, const at::Tensor&)>;

// The network of a package, and the device that it runs on.
std::pair<Run, at::Device> network_of(const std::string& path) {
  if (!ends_in(path, ".pt")) {
    const auto network = std::make_shared<sparseconv::Network>(path);
    return {[network](const at::Tensor& coords, const at::Tensor& x) { return network->run(coords, x); }, at::kCPU};
  }
#ifdef SPARSECONV_GPU
  const auto network = std::make_shared<sparseconv::GpuNetwork>(path);
  std::cout << network->steps() << " steps, " << network->nodes() << " nodes in the graph\n";
  return {[network](const at::Tensor& coords, const at::Tensor& x) {
            std::vector<at::Tensor> results = network->run(coords, x);
            c10::cuda::device_synchronize();  // for the clock
            return results;
          },
          at::kCUDA};
#else
  TORCH_CHECK(false, path, " is for a GPU, and this program was built with a torch that has no CUDA");
#endif
}

bool compare(std::vector<at::Tensor> results, const std::string& path, bool exact) {
  const std::vector<at::Tensor> expected = tensors_of(path);
  for (at::Tensor& result : results) result = result.cpu();
  bool is_equal = results.size() == expected.size();
  for (size_t number = 0; is_equal && number < results.size(); ++number) {
    const at::Tensor mine = results[number], theirs = expected[number];
    is_equal = mine.sizes() == theirs.sizes() && mine.scalar_type() == theirs.scalar_type();
    if (!is_equal || mine.numel() == 0) continue;
    const double most = theirs.to(at::kDouble).abs().max().item<double>();
    const double off = (mine.to(at::kDouble) - theirs.to(at::kDouble)).abs().max().item<double>();
    is_equal = off <= (exact || !at::isFloatingType(mine.scalar_type()) ? 0 : tolerance(mine.scalar_type()) * most);
    std::cout << "result " << number << " " << mine.sizes() << ": off by " << off << " of " << most << "\n";
  }
  std::cout << (is_equal ? "equal to what was expected\n" : "not what was expected\n");
  return is_equal;
}

}  // namespace

int main(int count, char** words) try {
  const Options options = parse(count, words);
  const auto [run, device] = network_of(options.plain[0]);
  const std::vector<at::Tensor> scene = voxels_of(options);
  const at::Tensor coords = scene[0].to(device), features = scene[1].to(device);
  std::cout << coords.size(0) << " voxels\n";
  std::vector<at::Tensor> results;
  std::vector<double> took;
  for (int call = 0; call < options.repeat; ++call) {
    const auto start = std::chrono::steady_clock::now();
    results = run(coords, features);
    took.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(took.begin(), took.begin() + took.size() / 2, took.end());
  std::cout << "network: " << took[took.size() / 2] << " ms, the median of " << took.size() << "\n";
  return options.plain.size() == 3 && !compare(results, options.plain[2], options.exact) ? 1 : 0;
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << "\n";
  return 2;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 2;
}
