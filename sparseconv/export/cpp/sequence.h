// The steps of a package for a GPU: launches, operations of torch, and events between streams.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <string>
#include <vector>

#include "gpu_driver.h"

namespace sparseconv {

using Told = c10::impl::GenericDict;

// What `export/sequence.py` wrote, with its memory on the current GPU.
class Sequence {
 public:
  explicit Sequence(const Told& told);

  // All steps, beginning on the current stream; the other streams begin behind it, and it ends behind them.
  void play();

  // (array, bytes before it, shape, strides, dtype) as a tensor over memory of this sequence.
  at::Tensor tensor(c10::ArrayRef<c10::IValue> words) const;

  size_t size() const { return steps_.size(); }

 private:
  struct Call {
    c10::OperatorHandle operation;
    std::vector<c10::IValue> values;
  };
  struct Step {
    int64_t kind = 0, stream = 0, number = 0;
  };

  void* address(const c10::IValue& array, const c10::IValue& bytes) const;
  void add_launch(c10::ArrayRef<c10::IValue> words);
  void add_call(c10::ArrayRef<c10::IValue> words);
  c10::IValue argument(const c10::IValue& told, c10::TypePtr type) const;

  std::vector<at::Tensor> arrays_, kinds_;
  std::deque<Kernel> kernels_;
  std::deque<Launch> launches_;
  std::vector<Call> calls_;
  std::vector<c10::cuda::CUDAStream> streams_;
  std::vector<at::cuda::CUDAEvent> events_;
  std::vector<Step> steps_;
};

}  // namespace sparseconv
