// The operators of exported programs, registered with torch for programs without Python.
//
// A grid or a plan travels between operators as a handle: an int64 tensor (1,) whose memory owns it.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <mutex>
#include <random>
#include <unordered_map>

#include "functions.h"

namespace sparseconv {
namespace {

using Values = std::vector<c10::IValue>;

// ---- handles

struct Owner {
  int64_t number = 0;
  std::shared_ptr<Grid> grid;
  std::optional<Plan> plan;
};

std::mutex mutex;
std::unordered_map<int64_t, std::weak_ptr<Owner>> owners;

at::Tensor handle(Owner held) {
  static int64_t next = static_cast<int64_t>(std::random_device{}()) << 20;
  auto owner = std::make_shared<Owner>(std::move(held));
  {
    const std::lock_guard<std::mutex> lock(mutex);
    owner->number = ++next;
    owners[owner->number] = owner;
  }
  const auto release = [owner](void*) mutable {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      owners.erase(owner->number);
    }
    owner.reset();
  };
  return at::from_blob(&owner->number, {1}, release, at::kLong);
}

std::shared_ptr<Owner> held_by(const at::Tensor& given) {
  TORCH_CHECK_VALUE(given.scalar_type() == at::kLong && given.numel() == 1 && given.device().is_cpu(),
                    "a handle is an int64 tensor (1,) on the CPU; got ", given.scalar_type(), " ", given.sizes());
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = owners.find(given.item<int64_t>());
  std::shared_ptr<Owner> owner = found == owners.end() ? nullptr : found->second.lock();
  TORCH_CHECK_VALUE(owner, "this handle stands for nothing here: it lives as long as its tensor");
  return owner;
}

// ---- arguments, one after another; a program compiled ahead of time gives None for an empty list

class Arguments {
 public:
  explicit Arguments(c10::ArrayRef<c10::IValue> values) : values_(values) {}

  at::Tensor tensor() { return next().toTensor(); }
  std::optional<at::Tensor> optional_tensor() {
    const c10::IValue& value = next();
    return value.isNone() ? std::nullopt : std::make_optional(value.toTensor());
  }
  std::shared_ptr<Grid> grid() {
    const auto owner = held_by(tensor());
    TORCH_CHECK_VALUE(owner->grid, "this handle is of a plan, and a grid is wanted");
    return owner->grid;
  }
  Plan plan() {
    const auto owner = held_by(tensor());
    TORCH_CHECK_VALUE(owner->plan, "this handle is of a grid, and a plan is wanted");
    return *owner->plan;
  }
  int64_t integer() { return next().toInt(); }
  double number() { return next().toDouble(); }
  std::string text() { return next().toStringRef(); }
  Ints integers() { return optional_integers().value_or(Ints{}); }
  std::optional<Ints> optional_integers() {
    const c10::IValue& value = next();
    return value.isNone() ? std::nullopt : std::make_optional(value.toIntVector());
  }
  std::vector<double> numbers() {
    const c10::IValue& value = next();
    return value.isNone() ? std::vector<double>{} : value.toDoubleVector();
  }

 private:
  const c10::IValue& next() { return values_[at_++]; }
  c10::ArrayRef<c10::IValue> values_;
  size_t at_ = 0;
};

Values with_coords(const std::shared_ptr<Grid>& grid) {
  return {handle({0, grid, std::nullopt}), grid->coords().clone()};
}

// ---- grids

Values grid(Arguments& given) {
  const at::Tensor coords = given.tensor();
  const int64_t items = given.integer();
  return {handle({0, std::make_shared<Grid>(coords.clone(), items), std::nullopt})};
}

Values subset(Arguments& given) {
  const auto grid = given.grid();
  return with_coords(grid->subset(given.tensor()));
}

Values lookup(Arguments& given) {
  const auto grid = given.grid();
  return {grid->lookup(given.tensor())};
}

Values dense(Arguments& given) {
  const auto grid = given.grid();
  const at::Tensor x = given.tensor();
  given.integer();
  const Ints start = given.integers();
  return {to_dense(*grid, x, start, given.integers())};
}

Values items_pooled(Arguments& given) {
  const auto grid = given.grid();
  const at::Tensor x = given.tensor();
  given.integer();
  return {pool_items(*grid, x, given.text())};
}

Values items_standardised(Arguments& given) {
  const auto grid = given.grid();
  const at::Tensor x = given.tensor();
  const int64_t groups = given.integer();
  return {standardise_items(*grid, x, groups, given.number())};
}

// ---- plans

Boundary boundary_of(const std::string& kind, const Ints& extent, size_t rank) {
  if (extent.empty()) return {kind, std::nullopt};
  TORCH_CHECK_VALUE(extent.size() == 2 * rank, "an extent has ", rank, " axes");
  return {kind, Box{Ints(extent.begin(), extent.begin() + rank), Ints(extent.begin() + rank, extent.end())}};
}

Window window_of(const std::optional<Ints>& kernel, const Ints& taps, const Ints& stride, const Ints& dilation,
                 const std::optional<Ints>& padding) {
  if (taps.empty()) return Window::box(kernel.value_or(Ints{}), stride, dilation, padding);
  const size_t rank = stride.size();
  TORCH_CHECK_VALUE(rank && taps.size() % rank == 0 && taps.size() / rank <= (1 << 15), "taps are (K, ", rank, ")");
  Window window{stride, {}};
  for (size_t at = 0; at < taps.size(); at += rank)
    window.offsets.emplace_back(taps.begin() + at, taps.begin() + at + rank);
  return window;
}

Values plan(Arguments& given) {
  const auto source = given.grid();
  const auto target = given.optional_tensor();
  const auto kernel = given.optional_integers();
  const Ints taps = given.integers(), stride = given.integers(), dilation = given.integers();
  auto padding = given.optional_integers();
  const std::string outputs = given.text();
  const Ints shape = given.integers();
  const std::string kind = given.text();
  const Ints extent = given.integers();
  const size_t rank = static_cast<size_t>(source->rank());
  TORCH_CHECK_VALUE(stride.size() == rank, "stride has ", rank, " axes; got ", stride.size());
  const bool is_within = outputs == "within" || outputs == "within generative";
  const bool to_fine = outputs == "generative" || outputs == "within generative";
  TORCH_CHECK_VALUE(is_within || to_fine || outputs == "full" || outputs == "same" || outputs == "given",
                    "no outputs '", outputs, "'");
  if (is_within && !padding) padding = Ints(rank, 0);
  const Window window = window_of(kernel, taps, stride, dilation, padding);
  Boundary boundary = boundary_of(kind, extent, rank);
  std::optional<Box> within;
  if (is_within) {
    TORCH_CHECK_VALUE(shape.size() == rank, "a shape has ", rank, " axes");
    within = Box{Ints(rank, 0), shape};
    boundary = to_fine ? Boundary{"forbid", within} : Boundary{"absent", std::nullopt};
  }
  std::shared_ptr<Grid> reached;
  if (target) {
    const auto owner = held_by(*target);
    TORCH_CHECK_VALUE(owner->grid, "target is no grid");
    reached = owner->grid;
    TORCH_CHECK_VALUE(to_fine || fitting(reached, *source, window, boundary) == reached,
                      "some windows of the given target leave the extent");
  } else if (to_fine) {
    reached = fine_grid(source, window, boundary);
  } else if (is_within || outputs == "full") {
    reached = coarse_grid(source, window, boundary, within);
  } else {
    TORCH_CHECK_VALUE(outputs == "same" && !window.is_strided(), "a plan onto '", outputs, "' voxels needs a target");
    reached = fitting(source, *source, window, boundary);
  }
  return {handle({0, nullptr, plan_between(source, reached, window, boundary, to_fine)})};
}

Values transposed(Arguments& given) {
  Plan back = given.plan();
  std::swap(back.source, back.target);
  back.is_reversed = !back.is_reversed;
  return {handle({0, nullptr, back})};
}

Values target(Arguments& given) { return with_coords(given.plan().target); }

Values execute(Arguments& given) {
  const Plan plan = given.plan();
  const at::Tensor x = given.tensor(), weight = given.tensor();
  const auto bias = given.optional_tensor(), residual = given.optional_tensor();
  given.tensor();
  const int64_t groups = given.integer();
  const std::string activation = given.text();
  return {convolve(plan, x, weight, bias, residual, groups, activation, given.numbers())};
}

Values pooled(Arguments& given) {
  const Plan plan = given.plan();
  const at::Tensor x = given.tensor();
  given.tensor();
  return {pool(plan, x, given.text())};
}

Values max_pooled(Arguments& given) {
  const Plan plan = given.plan();
  const auto [values, winners] = max_pool(plan, given.tensor());
  return {values, winners};
}

Values max_unpooled(Arguments& given) {
  const Plan plan = given.plan();
  const at::Tensor x = given.tensor();
  return {max_unpool(plan, x, given.tensor())};
}

// ---- registration

template <Values (*run)(Arguments&)>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Arguments given(c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - count, count));
  Values results = run(given);
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

template <Values (*run)(Arguments&)>
void offer(torch::Library& library, const char* schema) {
  library.def(schema, torch::dispatch(c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&boxed<run>>()));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sparseconv, library) {
  offer<grid>(library, "grid(Tensor coords, SymInt items, float[] voxel_size, float[] origin) -> Tensor");
  offer<subset>(library, "subset(Tensor grid, Tensor mask, Tensor coords) -> (Tensor, Tensor)");
  offer<lookup>(library, "lookup(Tensor grid, Tensor coords) -> Tensor");
  offer<dense>(library, "to_dense(Tensor grid, Tensor x, SymInt items, int[] start, SymInt[] shape) -> Tensor");
  offer<items_pooled>(library, "pool_items(Tensor grid, Tensor x, SymInt items, str how) -> Tensor");
  offer<items_standardised>(library, "standardise_items(Tensor grid, Tensor x, int groups, float eps) -> Tensor");
  offer<plan>(library,
              "plan(Tensor source, Tensor? target, int[]? kernel_size, int[] taps, int[] stride, int[] dilation, "
              "int[]? padding, str outputs, SymInt[] shape, str boundary, int[] extent, str backend) -> Tensor");
  offer<transposed>(library, "transposed(Tensor plan) -> Tensor");
  offer<target>(library, "target(Tensor plan, Tensor coords) -> (Tensor, Tensor)");
  offer<execute>(library,
                 "execute(Tensor plan, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor onto, "
                 "int groups, str activation, float[] numbers) -> Tensor");
  offer<pooled>(library, "pool(Tensor plan, Tensor x, Tensor onto, str how) -> Tensor");
  offer<max_pooled>(library, "max_pool(Tensor plan, Tensor x, Tensor onto) -> (Tensor, Tensor)");
  offer<max_unpooled>(library, "max_unpool(Tensor plan, Tensor x, Tensor winners, Tensor onto) -> Tensor");
}

}  // namespace sparseconv
