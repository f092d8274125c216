#include "sequence.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>

namespace sparseconv {
namespace {

// as in `export/sequence.py`
enum StepKind : int64_t { LAUNCH, CALL, RECORD, WAIT };
enum ParameterKind : int64_t { POINTER, INT32, INT64, FLOAT32, DESCRIPTOR };
enum ArgumentKind : int64_t { PLAIN, TENSOR, HOST, DTYPE, DEVICE, LIST };

c10::ArrayRef<c10::IValue> words_of(const c10::IValue& told) {
  if (told.isTuple()) return told.toTupleRef().elements().asArrayRef();
  return told.toListRef();
}

std::vector<int64_t> integers(const c10::IValue& told) {
  std::vector<int64_t> found;
  for (const c10::IValue& value : words_of(told)) found.push_back(value.toInt());
  return found;
}

c10::Device here() { return c10::Device(c10::kCUDA, c10::cuda::current_device()); }

}  // namespace

Sequence::Sequence(const Told& told) {
  for (const c10::IValue& kind : words_of(told.at("kinds"))) kinds_.push_back(kind.toTensor());
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(here());
  for (const int64_t size : integers(told.at("workspaces"))) arrays_.push_back(at::empty({size}, bytes));
  for (const c10::IValue& constant : words_of(told.at("constants"))) arrays_.push_back(constant.toTensor().to(here()));
  for (const c10::IValue& one : words_of(told.at("kernels"))) {
    const auto words = words_of(one);
    Kernel& kernel = kernels_.emplace_back();
    kernel.name = words[0].toStringRef();
    kernel.threads = static_cast<unsigned>(words[2].toInt());
    kernel.shared = static_cast<unsigned>(words[3].toInt());
    kernel.is_cooperative = words[4].toBool();
    kernel.cluster = static_cast<unsigned>(words[5].toInt());
    load(kernel, words[1].toTensor().contiguous().data_ptr());
  }
  for (const int64_t priority : integers(told.at("streams"))) {
    streams_.push_back(c10::cuda::getStreamFromPool(static_cast<int>(priority)));
  }
  events_.resize(static_cast<size_t>(told.at("events").toInt()));
  for (const c10::IValue& one : words_of(told.at("steps"))) {
    const auto words = words_of(one);
    Step step{words[0].toInt(), words[1].toInt(), 0};
    if (step.kind == LAUNCH) {
      step.number = static_cast<int64_t>(launches_.size());
      add_launch(words);
    } else if (step.kind == CALL) {
      step.number = static_cast<int64_t>(calls_.size());
      add_call(words);
    } else {
      step.number = words[2].toInt();
    }
    steps_.push_back(step);
  }
}

void* Sequence::address(const c10::IValue& array, const c10::IValue& bytes) const {
  const int64_t number = array.toInt();
  return number < 0 ? nullptr : static_cast<char*>(arrays_.at(static_cast<size_t>(number)).data_ptr()) + bytes.toInt();
}

at::Tensor Sequence::tensor(c10::ArrayRef<c10::IValue> words) const {
  const auto shape = integers(words[2]), strides = integers(words[3]);
  const at::ScalarType type = kinds_.at(static_cast<size_t>(words[4].toInt())).scalar_type();
  const auto options = at::TensorOptions().dtype(type).device(here());
  void* const start = address(words[0], words[1]);
  if (start == nullptr) return at::empty_strided(shape, strides, options);
  return at::from_blob(start, shape, strides, options);
}

void Sequence::add_launch(c10::ArrayRef<c10::IValue> words) {
  Launch& launch = launches_.emplace_back();
  launch.kernel = &kernels_.at(static_cast<size_t>(words[2].toInt()));
  const auto grid = integers(words[3]);
  for (size_t axis = 0; axis < 3; ++axis) launch.grid[axis] = static_cast<unsigned>(grid.at(axis));
  for (const c10::IValue& one : words_of(words[4])) {
    const auto told = words_of(one);
    switch (told[0].toInt()) {
      case POINTER: launch.parameters.push_back(Parameter::of(address(told[1], told[2]))); break;
      case INT32: launch.parameters.push_back(Parameter::of(static_cast<int32_t>(told[1].toInt()))); break;
      case INT64: launch.parameters.push_back(Parameter::of(told[1].toInt())); break;
      case FLOAT32: launch.parameters.push_back(Parameter::of(static_cast<float>(told[1].toDouble()))); break;
      case DESCRIPTOR: {
        Matrix matrix;
        matrix.address = address(told[1], told[2]);
        matrix.type = static_cast<int>(told[3].toInt());
        matrix.swizzle = static_cast<int>(told[4].toInt());
        matrix.bytes = static_cast<int>(told[5].toInt());
        matrix.box = integers(told[6]);
        matrix.shape = integers(told[7]);
        matrix.strides = integers(told[8]);
        launch.parameters.push_back(Parameter::of(encode(matrix)));
        for (const int64_t side : matrix.shape) launch.parameters.push_back(Parameter::of(static_cast<int32_t>(side)));
        for (const int64_t stride : matrix.strides) launch.parameters.push_back(Parameter::of(stride));
        break;
      }
      default: TORCH_CHECK(false, "a parameter of kind ", told[0], ": the package was made by another version");
    }
  }
  launch.complete();
}

void Sequence::add_call(c10::ArrayRef<c10::IValue> words) {
  const std::string name = words[2].toStringRef(), overload = words[3].toStringRef();
  const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& arguments = operation.schema().arguments();
  const auto told = words_of(words[4]);
  TORCH_CHECK(told.size() == arguments.size(), name, " takes ", arguments.size(), " arguments; the package has ",
              told.size(), ": it was made with another torch");
  std::vector<c10::IValue> values;
  for (size_t at = 0; at < told.size(); ++at) values.push_back(argument(told[at], arguments[at].type()));
  calls_.push_back({operation, std::move(values)});
}

c10::IValue Sequence::argument(const c10::IValue& one, c10::TypePtr type) const {
  if (type->kind() == c10::TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
  const auto told = words_of(one);
  switch (told[0].toInt()) {
    case PLAIN:
      if (told[1].isInt() && type->kind() == c10::TypeKind::FloatType) return static_cast<double>(told[1].toInt());
      if (told[1].isScalar() && type->kind() == c10::TypeKind::TensorType) {  // a number in the place of a tensor
        at::Tensor number = c10::scalar_to_tensor(told[1].toScalar());
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return number;
      }
      return told[1];
    case TENSOR: return tensor(told.slice(1));
    case HOST: return told[1];
    case DTYPE: return kinds_.at(static_cast<size_t>(told[1].toInt())).scalar_type();
    case DEVICE: return here();
    case LIST: break;
    default: TORCH_CHECK(false, "an argument of kind ", told[0], ": the package was made by another version");
  }
  const auto* const list = type->castRaw<c10::ListType>();
  TORCH_CHECK(list != nullptr, "a list is given where ", type->str(), " is wanted");
  const c10::TypePtr element = list->getElementType();
  c10::impl::GenericList made(element->kind() == c10::TypeKind::SymIntType ? c10::IntType::get() : element);
  for (const c10::IValue& value : words_of(told[1])) made.push_back(argument(value, element));
  return made;
}

void Sequence::play() {
  const c10::cuda::CUDAStream outer = c10::cuda::getCurrentCUDAStream();
  const auto stream_of = [&](int64_t number) { return number ? streams_.at(static_cast<size_t>(number)) : outer; };
  for (const Step& step : steps_) {
    const c10::cuda::CUDAStream stream = stream_of(step.stream);
    const auto number = static_cast<size_t>(step.number);
    switch (step.kind) {
      case LAUNCH: launches_.at(number).on(stream.stream()); break;
      case RECORD: events_.at(number).record(stream); break;
      case WAIT: events_.at(number).block(stream); break;
      case CALL: {
        const c10::cuda::CUDAStreamGuard guard(stream);
        std::vector<c10::IValue> stack = calls_.at(number).values;
        calls_.at(number).operation.callBoxed(&stack);
        break;
      }
      default: TORCH_CHECK(false, "a step of kind ", step.kind, ": the package was made by another version");
    }
  }
}

}  // namespace sparseconv
