// Voxel grids and the edges between them, in CPU memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sparseconv {

using Ints = std::vector<int64_t>;
// a batch item and up to four spatial indices
using Voxel = std::array<int64_t, 5>;

// Points of up to five columns, from low inclusive to high exclusive.
struct Box {
  Ints low, high;

  bool holds(const int64_t* point) const;
  int64_t size(size_t axis) const { return high[axis] > low[axis] ? high[axis] - low[axis] : 0; }
  bool encloses(const Box& other) const;
};

// Row-major numbers of the points of a box, which order them lexicographically.
class Keys {
 public:
  explicit Keys(Box box);

  const Box& box() const { return box_; }
  int64_t of(const int64_t* point) const;  // of a point in the box
  Voxel point(int64_t key) const;

 private:
  Box box_;
};

// The occupied voxels of a batch of scenes; row i of features belongs to row i of coords.
class Grid {
 public:
  // coords (N, 1+D) of an integer dtype, the batch item first; all rows distinct
  Grid(const at::Tensor& coords, int64_t items);

  const at::Tensor& coords() const { return coords_; }  // (N, 1+D) int32, contiguous
  int64_t items() const { return items_; }
  int64_t rows() const { return coords_.size(0); }
  int64_t rank() const { return coords_.size(1) - 1; }
  Voxel voxel(int64_t row) const;
  const Box& extent() const { return extent_; }  // of the D spatial axes
  int64_t find(const int64_t* voxel) const;      // its row, or -1
  at::Tensor lookup(const at::Tensor& coords) const;  // (M,) int64 rows, -1 where absent
  std::shared_ptr<Grid> subset(const at::Tensor& mask) const;

 private:
  at::Tensor coords_;
  int64_t items_;
  Box extent_;
  std::unique_ptr<Keys> keys_;
  std::vector<int64_t> key_of_row_;
  std::vector<int32_t> slots_;  // rows by hash, -1 where free; a power of two of them
  size_t slot(int64_t key) const;
};

// fine = stride * coarse + offset of a tap
struct Window {
  Ints stride;
  std::vector<Ints> offsets;

  static Window box(const Ints& kernel, const Ints& stride, const Ints& dilation, const std::optional<Ints>& padding);
  bool is_strided() const;
  size_t taps() const { return offsets.size(); }
};

// "absent", "forbid" or "periodic", and the extent where one was given
struct Boundary {
  std::string kind;
  std::optional<Box> extent;
};

// Every voxel that a window reaches, in lexicographic order; of these the ones within a box.
std::shared_ptr<Grid> coarse_grid(const std::shared_ptr<Grid>& fine, const Window& window, const Boundary& boundary,
                                  const std::optional<Box>& within = std::nullopt);
std::shared_ptr<Grid> fine_grid(const std::shared_ptr<Grid>& coarse, const Window& window, const Boundary& boundary);
// The coarse voxels whose whole window lies in the extent under "forbid"; else the grid itself.
std::shared_ptr<Grid> fitting(const std::shared_ptr<Grid>& coarse, const Grid& fine, const Window& window,
                              const Boundary& boundary);

// The rows that meet through one tap: neither input nor output rows repeat.
struct Edges {
  std::vector<int64_t> in, out;
};

// Which input row meets which output row through which tap.
struct Plan {
  std::shared_ptr<Grid> source, target;
  std::shared_ptr<const std::vector<Edges>> taps;  // shared by a plan and its transpose
  bool is_reversed = false;                        // whether in and out of the edges are exchanged

  const std::vector<int64_t>& in(size_t tap) const { return is_reversed ? (*taps)[tap].out : (*taps)[tap].in; }
  const std::vector<int64_t>& out(size_t tap) const { return is_reversed ? (*taps)[tap].in : (*taps)[tap].out; }
};

// From fine voxels to coarse ones, or the other way round.
Plan plan_between(const std::shared_ptr<Grid>& source, const std::shared_ptr<Grid>& target, const Window& window,
                  const Boundary& boundary, bool to_fine);

}  // namespace sparseconv
