#include "gpu_network.h"

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/version.h>

#include <fstream>
#include <iterator>
#include <sstream>

#include "sequence.h"

namespace sparseconv {
namespace {

constexpr int64_t FORM = 1;
// rows of a result, as in `export/gpu_package.py`
constexpr int64_t VOXELS = -1, FIXED = -2;

Told read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file.good(), "there is no file ", path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue told = torch::jit::pickle_load(bytes);
  TORCH_CHECK_VALUE(told.isGenericDict() && told.toGenericDict().contains("sparseconv_gpu_package"), path,
                    " is no package that sparseconv.export.package_for_gpu wrote");
  const Told package = told.toGenericDict();
  const int64_t form = package.at("sparseconv_gpu_package").toInt();
  TORCH_CHECK_VALUE(form == FORM, path, " has form ", form, ", and this program reads form ", FORM,
                    ": make both with one version of sparseconv");
  const std::string made_with = package.at("torch").toStringRef();
  TORCH_CHECK_VALUE(made_with.substr(0, made_with.find('+')) == TORCH_VERSION, path, " was made with torch ", made_with,
                    ", and this program with ", TORCH_VERSION, ": use one torch for both");
  const auto wanted = package.at("capability").toListRef();
  const cudaDeviceProp* const gpu = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK_VALUE(wanted[0].toInt() == gpu->major && wanted[1].toInt() == gpu->minor, path, " was made on a ",
                    package.at("gpu").toStringRef(), ", of compute capability ", wanted[0].toInt(), ".", wanted[1].toInt(),
                    ", and this GPU is a ", gpu->name, ", of ", gpu->major, ".", gpu->minor,
                    ": make a package on a GPU of this kind");
  return package;
}

void check(const char* name, const at::Tensor& given, int64_t rows, const at::Tensor& slot) {
  TORCH_CHECK_VALUE(given.dim() == 2 && given.size(0) == rows && given.size(1) == slot.size(1), name, " must be (", rows,
                    ", ", slot.size(1), "); got ", given.sizes());
  TORCH_CHECK_TYPE(given.scalar_type() == slot.scalar_type(), name, " must be of type ", slot.scalar_type(), "; got ",
                   given.scalar_type());
}

}  // namespace

struct GpuNetwork::State {
  c10::Device device;
  Told told;
  Sequence sequence;
  at::Tensor coords, features, count, status, on_host;
  struct Result {
    int64_t rows;
    at::Tensor tensor;
  };
  std::vector<Result> results;
  std::vector<std::pair<int64_t, std::string>> faults;
  std::string limits;
  int64_t filled = 0, nodes = 0;
  at::cuda::CUDAGraph graph{true};

  State(const std::string& path, c10::Device on) : device(on), told(read(path)), sequence(told) {
    const auto slot = [&](const char* name) { return sequence.tensor(told.at(name).toTupleRef().elements()); };
    coords = slot("coords");
    features = slot("features");
    count = slot("count");
    status = slot("status");
    on_host = at::empty(status.sizes(), status.options().device(at::kCPU).pinned_memory(true));
    for (const c10::IValue& one : told.at("results").toListRef()) {
      const auto words = one.toTupleRef().elements().asArrayRef();
      results.push_back({words[0].toInt(), sequence.tensor(words.slice(1))});
    }
    for (const c10::IValue& one : told.at("faults").toListRef()) {
      const auto words = one.toTupleRef().elements().asArrayRef();
      faults.emplace_back(words[0].toInt(), words[1].toStringRef());
    }
    std::ostringstream limit;
    limit << coords.size(0) << " voxels, " << told.at("batch_size").toInt() << " batch items, extent "
          << told.at("extent").toStringRef();
    limits = limit.str();
    told.clear();  // the host's copy of the weights
    capture();
  }

  void capture() {
    const c10::cuda::CUDAStream now = c10::cuda::getCurrentCUDAStream();
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(true);
    now.synchronize();
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      sequence.play();  // alone: what is loaded on first use is loaded here
      stream.synchronize();
      graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      sequence.play();
      graph.capture_end();
    }
    size_t found = 0;
    TORCH_CHECK(cudaGraphGetNodes(graph.raw_cuda_graph(), nullptr, &found) == cudaSuccess, "the graph has no nodes");
    nodes = static_cast<int64_t>(found);
    graph.instantiate();
  }

  void put(const at::Tensor& given_coords, const at::Tensor& given_features) {
    const int64_t voxels = given_coords.size(0);
    coords.narrow(0, 0, voxels).copy_(given_coords, true);
    features.narrow(0, 0, voxels).copy_(given_features, true);
    if (voxels < filled) {
      coords.narrow(0, voxels, filled - voxels).fill_(-1);
      features.narrow(0, voxels, filled - voxels).zero_();
    }
    count.fill_(voxels);
    filled = voxels;
  }

  std::vector<at::Tensor> run(const at::Tensor& given_coords, const at::Tensor& given_features) {
    const int64_t voxels = given_coords.size(0);
    put(given_coords, given_features);
    graph.replay();
    on_host.copy_(status, true);
    std::vector<at::Tensor> found;
    for (const Result& result : results) {
      if (result.rows > 0) {
        found.emplace_back();  // as many rows as the GPU says
      } else {
        found.push_back((result.rows == VOXELS ? result.tensor.narrow(0, 0, voxels) : result.tensor).clone());
      }
    }
    c10::cuda::getCurrentCUDAStream().synchronize();
    const int32_t* const numbers = on_host.data_ptr<int32_t>();
    refuse(numbers[0]);
    bool waits = false;
    for (size_t at = 0; at < results.size(); ++at) {
      if (results[at].rows <= 0) continue;
      found[at] = results[at].tensor.narrow(0, 0, numbers[results[at].rows]).clone();
      waits = true;
    }
    // the next call, on whichever stream, writes what these are copied from
    if (waits) c10::cuda::getCurrentCUDAStream().synchronize();
    return found;
  }

  void refuse(int32_t fault) const {
    if (fault == 0) return;
    std::string why;
    for (const auto& [bit, text] : faults) why += fault & bit ? (why.empty() ? "" : "; ") + text : "";
    TORCH_CHECK_VALUE(false, "the scene does not fit this package (", limits, "): ", why,
                      ". Make a package with more room, a larger extent or a fuller example");
  }
};

GpuNetwork::GpuNetwork(const std::string& package, int device) {
  const c10::InferenceMode without_gradients;
  TORCH_CHECK(device >= 0 && device < at::cuda::device_count(), "there is no GPU ", device, ": this machine has ",
              static_cast<int>(at::cuda::device_count()));
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  state_ = std::make_unique<State>(package, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

GpuNetwork::~GpuNetwork() = default;

int64_t GpuNetwork::max_voxels() const { return state_->coords.size(0); }
int64_t GpuNetwork::steps() const { return static_cast<int64_t>(state_->sequence.size()); }
int64_t GpuNetwork::nodes() const { return state_->nodes; }

std::vector<at::Tensor> GpuNetwork::run(const at::Tensor& coords, const at::Tensor& features) {
  const int64_t rows = coords.dim() ? coords.size(0) : 0;
  check("coords", coords, rows, state_->coords);
  check("features", features, rows, state_->features);
  TORCH_CHECK_VALUE(rows <= max_voxels(), "the scene has ", rows, " voxels, and this package takes at most ", max_voxels(),
                    ": make a package with more room or max_voxels");
  const c10::InferenceMode without_gradients;
  const c10::cuda::CUDAGuard guard(state_->device);
  return state_->run(coords, features);
}

}  // namespace sparseconv
