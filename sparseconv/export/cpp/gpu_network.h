// A network packaged for a GPU: what a program without Python calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace sparseconv {

// What sparseconv.export.package_for_gpu wrote, as a CUDA graph on one GPU. One call at a time.
class GpuNetwork {
 public:
  // Reads the file, takes its memory, runs it once and captures it.
  explicit GpuNetwork(const std::string& package, int device = 0);
  ~GpuNetwork();

  // coords (N, 1+D) int32 and features (N, C), on any device -> the network's results, one after another, on the GPU.
  //
  // On the current stream; it waits for the GPU. Dtypes, columns and rows are checked before anything is written. A
  // scene that does not fit what was captured is an error: there is no Python here that could run it otherwise.
  std::vector<at::Tensor> run(const at::Tensor& coords, const at::Tensor& features);

  // The most voxels of a scene.
  int64_t max_voxels() const;

  // Steps of the sequence, and nodes of the graph: for tests.
  int64_t steps() const;
  int64_t nodes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sparseconv
