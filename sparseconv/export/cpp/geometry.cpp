#include "geometry.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

namespace sparseconv {
namespace {

constexpr int64_t LOWEST = std::numeric_limits<int32_t>::min(), HIGHEST = std::numeric_limits<int32_t>::max();
constexpr int64_t MOST_TAPS = 1 << 15;

int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }
int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

// A point folded into a torus, whose axes are those of the point behind its batch item.
void wrap(Voxel& voxel, const std::optional<Box>& torus) {
  if (!torus) return;
  for (size_t axis = 0; axis < torus->low.size(); ++axis)
    voxel[axis + 1] = modulo(voxel[axis + 1] - torus->low[axis], torus->size(axis)) + torus->low[axis];
}

// The torus of the fine voxels, checked; none under other boundaries.
std::optional<Box> torus_of(const Window& window, const Boundary& boundary) {
  TORCH_CHECK(boundary.kind == "absent" || boundary.kind == "forbid" || boundary.kind == "periodic",
              "no boundary '", boundary.kind, "' on a voxel grid");
  if (boundary.kind != "periodic") return std::nullopt;
  TORCH_CHECK(boundary.extent, "a periodic boundary needs its extent");
  for (size_t axis = 0; axis < window.stride.size(); ++axis) {
    const int64_t size = boundary.extent->size(axis);
    TORCH_CHECK(size > 0 && size % window.stride[axis] == 0, "a periodic extent of ", size,
                " cells must be a positive multiple of the stride ", window.stride[axis]);
  }
  return boundary.extent;
}

std::optional<Box> coarse_torus(const Window& window, const std::optional<Box>& torus) {
  if (!torus) return std::nullopt;
  Box coarse;
  for (size_t axis = 0; axis < window.stride.size(); ++axis) {
    coarse.low.push_back(floor_div(torus->low[axis], window.stride[axis]));
    coarse.high.push_back(coarse.low.back() + torus->size(axis) / window.stride[axis]);
  }
  return coarse;
}

void check_enclosed(const std::optional<Box>& torus, const Grid& grid) {
  TORCH_CHECK(!torus || grid.rows() == 0 || torus->encloses(grid.extent()), "voxels leave the periodic extent");
}

// The distinct ones of these voxels as a grid, in lexicographic order.
std::shared_ptr<Grid> distinct(std::vector<Voxel>& found, const Grid& like) {
  const int64_t rank = like.rank();
  Box box{Ints(rank + 1, HIGHEST), Ints(rank + 1, LOWEST)};
  for (const Voxel& voxel : found)
    for (int64_t axis = 0; axis <= rank; ++axis) {
      TORCH_CHECK(voxel[axis] >= LOWEST && voxel[axis] < HIGHEST, "voxels must lie within 32 bits");
      box.low[axis] = std::min(box.low[axis], voxel[axis]);
      box.high[axis] = std::max(box.high[axis], voxel[axis] + 1);
    }
  std::vector<int64_t> keys;
  if (!found.empty()) {
    const Keys numbers(box);
    keys.reserve(found.size());
    for (const Voxel& voxel : found) keys.push_back(numbers.of(voxel.data()));
    std::vector<Voxel>().swap(found);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  }
  at::Tensor coords = at::empty({static_cast<int64_t>(keys.size()), rank + 1}, at::kInt);
  if (!keys.empty()) {
    const Keys numbers(box);
    int32_t* to = coords.data_ptr<int32_t>();
    for (int64_t key : keys) {
      const Voxel voxel = numbers.point(key);
      for (int64_t axis = 0; axis <= rank; ++axis) *to++ = static_cast<int32_t>(voxel[axis]);
    }
  }
  return std::make_shared<Grid>(coords, like.items());
}

Voxel fine_of(const Voxel& coarse, const Window& window, size_t tap) {
  Voxel fine = coarse;
  for (size_t axis = 0; axis < window.stride.size(); ++axis)
    fine[axis + 1] = window.stride[axis] * coarse[axis + 1] + window.offsets[tap][axis];
  return fine;
}

}  // namespace

bool Box::holds(const int64_t* point) const {
  for (size_t axis = 0; axis < low.size(); ++axis)
    if (point[axis] < low[axis] || point[axis] >= high[axis]) return false;
  return true;
}

bool Box::encloses(const Box& other) const {
  for (size_t axis = 0; axis < low.size(); ++axis)
    if (other.low[axis] < low[axis] || other.high[axis] > high[axis]) return false;
  return true;
}

Keys::Keys(Box box) : box_(std::move(box)) {
  double cells = 1;
  for (size_t axis = 0; axis < box_.low.size(); ++axis) cells *= static_cast<double>(std::max<int64_t>(1, box_.size(axis)));
  TORCH_CHECK(cells < 9.2e18, "the voxels' extent has ", cells, " cells, but 64-bit keys number fewer than 2^63");
}

int64_t Keys::of(const int64_t* point) const {
  int64_t key = 0;
  for (size_t axis = 0; axis < box_.low.size(); ++axis) key = key * box_.size(axis) + (point[axis] - box_.low[axis]);
  return key;
}

Voxel Keys::point(int64_t key) const {
  Voxel voxel{};
  for (size_t axis = box_.low.size(); axis-- > 0;) {
    voxel[axis] = key % box_.size(axis) + box_.low[axis];
    key /= box_.size(axis);
  }
  return voxel;
}

Grid::Grid(const at::Tensor& coords, int64_t items) : items_(items) {
  TORCH_CHECK(coords.device().is_cpu(), "coords must be on the CPU");
  TORCH_CHECK_TYPE(at::isIntegralType(coords.scalar_type(), false), "coords must be integers; got ", coords.scalar_type());
  TORCH_CHECK(coords.dim() == 2 && coords.size(1) >= 2 && coords.size(1) <= 5, "coords must be (N, 1+D), D from 1 to 4; got ",
              coords.sizes());
  TORCH_CHECK(coords.size(0) < HIGHEST, "a grid has fewer than 2^31 voxels");
  if (coords.scalar_type() == at::kLong && coords.numel())
    TORCH_CHECK(coords.min().item<int64_t>() >= LOWEST && coords.max().item<int64_t>() < HIGHEST,
                "voxel indices must fit in 32 bits");
  coords_ = coords.to(at::kInt).contiguous();
  const int64_t count = rows(), columns = rank() + 1;
  Box whole{Ints(columns, 0), Ints(columns, 0)};
  for (int64_t row = 0; row < count; ++row) {
    const Voxel at = voxel(row);
    for (int64_t axis = 0; axis < columns; ++axis) {
      whole.low[axis] = row ? std::min(whole.low[axis], at[axis]) : at[axis];
      whole.high[axis] = row ? std::max(whole.high[axis], at[axis] + 1) : at[axis] + 1;
    }
  }
  TORCH_CHECK(whole.low[0] >= 0, "batch items (column 0 of coords) start at 0; got ", whole.low[0]);
  TORCH_CHECK(whole.high[0] <= items, "coords name batch item ", whole.high[0] - 1, ", but batch_size is ", items);
  extent_ = Box{Ints(whole.low.begin() + 1, whole.low.end()), Ints(whole.high.begin() + 1, whole.high.end())};
  keys_ = std::make_unique<Keys>(std::move(whole));
  key_of_row_.resize(count);
  size_t places = 16;
  while (places < 2 * static_cast<size_t>(count)) places *= 2;
  slots_.assign(places, -1);
  for (int64_t row = 0; row < count; ++row) {
    const Voxel at = voxel(row);
    key_of_row_[row] = keys_->of(at.data());
    size_t place = slot(key_of_row_[row]);
    TORCH_CHECK_VALUE(slots_[place] < 0, "rows ", slots_[place], " and ", row, " of coords are the same voxel");
    slots_[place] = static_cast<int32_t>(row);
  }
}

// Where a key is, or the free place where it would be.
size_t Grid::slot(int64_t key) const {
  uint64_t mixed = static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ull;
  mixed ^= mixed >> 32;
  size_t place = mixed & (slots_.size() - 1);
  while (slots_[place] >= 0 && key_of_row_[slots_[place]] != key) place = (place + 1) & (slots_.size() - 1);
  return place;
}

Voxel Grid::voxel(int64_t row) const {
  Voxel found{};
  const int32_t* from = coords_.const_data_ptr<int32_t>() + row * coords_.size(1);
  for (int64_t axis = 0; axis < coords_.size(1); ++axis) found[axis] = from[axis];
  return found;
}

int64_t Grid::find(const int64_t* voxel) const {
  return keys_->box().holds(voxel) ? slots_[slot(keys_->of(voxel))] : -1;
}

at::Tensor Grid::lookup(const at::Tensor& coords) const {
  TORCH_CHECK(coords.dim() == 2 && coords.size(1) == rank() + 1 && coords.device().is_cpu(), "expected coords (M, ",
              rank() + 1, ") on the CPU; got ", coords.sizes());
  TORCH_CHECK_TYPE(at::isIntegralType(coords.scalar_type(), false), "coords must be integers; got ", coords.scalar_type());
  const at::Tensor wide = coords.to(at::kLong).contiguous();
  at::Tensor found = at::empty({wide.size(0)}, at::kLong);
  const int64_t* from = wide.const_data_ptr<int64_t>();
  int64_t* to = found.data_ptr<int64_t>();
  at::parallel_for(0, wide.size(0), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) to[row] = find(from + row * wide.size(1));
  });
  return found;
}

std::shared_ptr<Grid> Grid::subset(const at::Tensor& mask) const {
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.dim() == 1 && mask.size(0) == rows() && mask.device().is_cpu(),
              "mask must be (", rows(), ",) bool; got ", mask.sizes(), " ", mask.scalar_type());
  return std::make_shared<Grid>(coords_.index({mask}), items_);
}

Window Window::box(const Ints& kernel, const Ints& stride, const Ints& dilation, const std::optional<Ints>& padding) {
  const size_t rank = stride.size();
  TORCH_CHECK(kernel.size() == rank && dilation.size() == rank && (!padding || padding->size() == rank),
              "a window has one number an axis");
  int64_t taps = 1;
  for (size_t axis = 0; axis < rank; ++axis) {
    TORCH_CHECK(kernel[axis] >= 1 && stride[axis] >= 1 && dilation[axis] >= 1, "a window's numbers must be positive");
    TORCH_CHECK(std::max({kernel[axis], stride[axis], dilation[axis]}) <= HIGHEST, "a window's numbers have 32 bits");
    taps *= kernel[axis];
    TORCH_CHECK(taps <= MOST_TAPS, "a window has at most ", MOST_TAPS, " taps");
  }
  Window window{stride, {}};
  Ints tap(rank, 0);
  for (int64_t number = 0; number < taps; ++number) {
    Ints offset(rank);
    for (size_t axis = 0; axis < rank; ++axis) {
      const int64_t pad = padding ? (*padding)[axis] : dilation[axis] * (kernel[axis] - 1) / 2;
      offset[axis] = dilation[axis] * tap[axis] - pad;
    }
    window.offsets.push_back(offset);
    for (size_t axis = rank; axis-- > 0;) {  // the last axis is the fastest
      if (++tap[axis] < kernel[axis]) break;
      tap[axis] = 0;
    }
  }
  return window;
}

bool Window::is_strided() const {
  return std::any_of(stride.begin(), stride.end(), [](int64_t s) { return s != 1; });
}

std::shared_ptr<Grid> coarse_grid(const std::shared_ptr<Grid>& fine, const Window& window, const Boundary& boundary,
                                  const std::optional<Box>& within) {
  const std::optional<Box> torus = torus_of(window, boundary), coarse = coarse_torus(window, torus);
  check_enclosed(torus, *fine);
  std::vector<Voxel> found;
  for (size_t tap = 0; tap < window.taps(); ++tap)
    for (int64_t row = 0; row < fine->rows(); ++row) {
      Voxel voxel = fine->voxel(row);
      bool is_seen = true;
      for (size_t axis = 0; axis < window.stride.size() && is_seen; ++axis) {
        const int64_t moved = voxel[axis + 1] - window.offsets[tap][axis];
        is_seen = moved % window.stride[axis] == 0;
        voxel[axis + 1] = floor_div(moved, window.stride[axis]);
      }
      if (!is_seen) continue;
      wrap(voxel, coarse);
      if (!within || within->holds(voxel.data() + 1)) found.push_back(voxel);
    }
  return fitting(distinct(found, *fine), *fine, window, boundary);
}

std::shared_ptr<Grid> fine_grid(const std::shared_ptr<Grid>& coarse, const Window& window, const Boundary& boundary) {
  const std::optional<Box> torus = torus_of(window, boundary);
  check_enclosed(coarse_torus(window, torus), *coarse);
  const bool is_cut = boundary.kind == "forbid";
  TORCH_CHECK(!is_cut || boundary.extent, "a generative plan under 'forbid' needs an extent");
  std::vector<Voxel> found;
  for (size_t tap = 0; tap < window.taps(); ++tap)
    for (int64_t row = 0; row < coarse->rows(); ++row) {
      Voxel voxel = fine_of(coarse->voxel(row), window, tap);
      wrap(voxel, torus);
      if (!is_cut || boundary.extent->holds(voxel.data() + 1)) found.push_back(voxel);
    }
  return distinct(found, *coarse);
}

std::shared_ptr<Grid> fitting(const std::shared_ptr<Grid>& coarse, const Grid& fine, const Window& window,
                              const Boundary& boundary) {
  if (boundary.kind != "forbid") return coarse;
  const Box extent = boundary.extent ? *boundary.extent : fine.extent();
  at::Tensor whole = at::ones({coarse->rows()}, at::kBool);
  bool* is_whole = whole.data_ptr<bool>();
  for (int64_t row = 0; row < coarse->rows(); ++row) {
    const Voxel voxel = coarse->voxel(row);
    for (size_t tap = 0; tap < window.taps(); ++tap) {
      const Voxel seen = fine_of(voxel, window, tap);
      is_whole[row] &= extent.holds(seen.data() + 1);
    }
  }
  return whole.all().item<bool>() ? coarse : coarse->subset(whole);
}

Plan plan_between(const std::shared_ptr<Grid>& source, const std::shared_ptr<Grid>& target, const Window& window,
                  const Boundary& boundary, bool to_fine) {
  TORCH_CHECK(source->rank() == target->rank() && source->items() == target->items(),
              "source and target must have the same rank and batch size");
  const Grid &fine = to_fine ? *target : *source, &coarse = to_fine ? *source : *target;
  const std::optional<Box> torus = torus_of(window, boundary);
  check_enclosed(torus, fine);
  check_enclosed(coarse_torus(window, torus), coarse);
  auto taps = std::make_shared<std::vector<Edges>>(window.taps());
  at::parallel_for(0, static_cast<int64_t>(window.taps()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t tap = begin; tap < end; ++tap)
      for (int64_t row = 0; row < coarse.rows(); ++row) {
        Voxel voxel = fine_of(coarse.voxel(row), window, tap);
        wrap(voxel, torus);
        const int64_t found = fine.find(voxel.data());
        if (found < 0) continue;
        (*taps)[tap].in.push_back(found);
        (*taps)[tap].out.push_back(row);
      }
  });
  return Plan{source, target, taps, to_fine};
}

}  // namespace sparseconv
