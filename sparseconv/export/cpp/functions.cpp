#include "functions.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace sparseconv {
namespace {

constexpr int64_t BLOCK = 2048;  // edges that one thread multiplies at once

at::ScalarType wide(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor rows_of(const std::vector<int64_t>& rows, int64_t begin, int64_t end) {
  return at::from_blob(const_cast<int64_t*>(rows.data() + begin), {end - begin}, at::kLong);
}

at::Tensor rows_of(const std::vector<int64_t>& rows) { return rows_of(rows, 0, static_cast<int64_t>(rows.size())); }

// y[rows[i]] += terms[i], both contiguous
template <typename T>
void add_rows(at::Tensor& y, const int64_t* rows, const at::Tensor& terms) {
  const int64_t columns = terms.size(1);
  T* into = y.data_ptr<T>();
  const T* from = terms.const_data_ptr<T>();
  for (int64_t row = 0; row < terms.size(0); ++row, from += columns)
    for (int64_t column = 0; column < columns; ++column) into[rows[row] * columns + column] += from[column];
}

// gathered (E, C_in) @ weight (C_in/G, C_out), group by group
at::Tensor product(const at::Tensor& gathered, const at::Tensor& weight, int64_t groups) {
  if (groups == 1) return gathered.mm(weight);
  const int64_t edges = gathered.size(0), each_in = weight.size(0), each_out = weight.size(1) / groups;
  const at::Tensor left = gathered.view({edges, groups, each_in}).transpose(0, 1);
  const at::Tensor right = weight.view({each_in, groups, each_out}).transpose(0, 1);
  return at::bmm(left, right).transpose(0, 1).reshape({edges, groups * each_out});
}

double number(const std::vector<double>& numbers, const std::string& activation) {
  TORCH_CHECK_VALUE(numbers.size() == 1, activation, " takes one number; got ", numbers.size());
  return numbers[0];
}

at::Tensor activated(const at::Tensor& y, const std::string& name, const std::vector<double>& numbers) {
  if (name.empty()) return y;
  if (name == "leaky_relu") return at::leaky_relu(y, number(numbers, name));
  if (name == "elu") return at::elu(y, number(numbers, name));
  TORCH_CHECK_VALUE(numbers.empty(), "activation ", name, " of ", numbers.size(), " numbers is not in this library");
  if (name == "relu") return at::relu(y);
  if (name == "gelu") return at::gelu(y);
  if (name == "gelu_tanh") return at::gelu(y, "tanh");
  if (name == "silu") return at::silu(y);
  if (name == "sigmoid") return at::sigmoid(y);
  if (name == "tanh") return at::tanh(y);
  if (name == "hardswish") return at::hardswish(y);
  if (name == "mish") return at::mish(y);
  TORCH_CHECK_VALUE(false, "activation '", name, "' is not in this library");
}

// Each item's rows of x, in order.
std::vector<at::Tensor> by_item(const Grid& grid) {
  std::vector<std::vector<int64_t>> rows(grid.items());
  for (int64_t row = 0; row < grid.rows(); ++row) rows[grid.voxel(row)[0]].push_back(row);
  std::vector<at::Tensor> found;
  for (const auto& of : rows) found.push_back(rows_of(of).clone());
  return found;
}

}  // namespace

void check_rows(const char* name, const at::Tensor& x, int64_t rows) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) == rows && x.device().is_cpu(), name, " must be (", rows,
                    ", C) on the CPU; got ", x.sizes());
  TORCH_CHECK_TYPE(at::isFloatingType(x.scalar_type()), name, " must be floating point; got ", x.scalar_type());
}

at::Tensor convolve(const Plan& plan, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& residual, int64_t groups, const std::string& activation,
                    const std::vector<double>& numbers) {
  check_rows("x", x, plan.source->rows());
  const int64_t taps = static_cast<int64_t>(plan.taps->size()), rows = plan.target->rows();
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.size(0) == taps, "weight must be (", taps, ", C_in/G, C_out); got ",
                    weight.sizes());
  const int64_t c_out = weight.size(2);
  TORCH_CHECK_VALUE(groups >= 1 && weight.size(1) * groups == x.size(1) && c_out % groups == 0, "x ", x.sizes(),
                    " and weight ", weight.sizes(), " do not fit ", groups, " groups");
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == c_out), "bias must be (", c_out, ",)");
  TORCH_CHECK_VALUE(!residual || (residual->dim() == 2 && residual->size(0) == rows && residual->size(1) == c_out),
                    "residual must be (", rows, ", ", c_out, ")");
  for (const at::Tensor& other : {weight, bias.value_or(x), residual.value_or(x)}) {
    TORCH_CHECK_TYPE(other.scalar_type() == x.scalar_type(), "x is ", x.scalar_type(), ", another operand is ",
                     other.scalar_type());
    TORCH_CHECK_VALUE(other.device().is_cpu(), "operands must be on the CPU");
  }
  const at::Tensor from = x.to(wide(x)).contiguous(), by_tap = weight.to(wide(x)).contiguous();
  at::Tensor y = at::zeros({rows, c_out}, from.options());
  for (int64_t tap = 0; tap < taps; ++tap) {
    const std::vector<int64_t>&in = plan.in(tap), &out = plan.out(tap);
    const at::Tensor of_tap = by_tap.select(0, tap);
    // no output row repeats within a tap: blocks write apart, and each row is summed in the order of taps
    at::parallel_for(0, (static_cast<int64_t>(in.size()) + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * BLOCK, last = std::min<int64_t>(first + BLOCK, static_cast<int64_t>(in.size()));
        const at::Tensor terms = product(from.index_select(0, rows_of(in, first, last)), of_tap, groups).contiguous();
        if (y.scalar_type() == at::kDouble)
          add_rows<double>(y, out.data() + first, terms);
        else
          add_rows<float>(y, out.data() + first, terms);
      }
    });
  }
  if (bias) y += *bias;
  if (residual) y += *residual;
  return activated(y, activation, numbers).to(x.scalar_type());
}

at::Tensor pool(const Plan& plan, const at::Tensor& x, const std::string& how) {
  TORCH_CHECK_VALUE(how == "sum" || how == "average" || how == "average_of_taps", "no pooling '", how, "'");
  check_rows("x", x, plan.source->rows());
  const at::Tensor from = x.to(wide(x));
  at::Tensor y = at::zeros({plan.target->rows(), x.size(1)}, from.options()), edges = at::zeros({y.size(0), 1}, from.options());
  for (size_t tap = 0; tap < plan.taps->size(); ++tap) {
    const at::Tensor out = rows_of(plan.out(tap));
    y.index_add_(0, out, from.index_select(0, rows_of(plan.in(tap))));
    edges.index_add_(0, out, at::ones({out.size(0), 1}, from.options()));
  }
  if (how == "average") y /= edges.clamp_min(1);
  if (how == "average_of_taps") y /= static_cast<double>(plan.taps->size());
  return y.to(x.scalar_type());
}

std::pair<at::Tensor, at::Tensor> max_pool(const Plan& plan, const at::Tensor& x) {
  check_rows("x", x, plan.source->rows());
  at::Tensor y = at::zeros({plan.target->rows(), x.size(1)}, x.options());
  at::Tensor winners = at::full(y.sizes(), -1, x.options().dtype(plan.taps->size() < (1 << 15) ? at::kShort : at::kInt));
  for (size_t tap = 0; tap < plan.taps->size(); ++tap) {
    const at::Tensor out = rows_of(plan.out(tap)), fresh = x.index_select(0, rows_of(plan.in(tap)));
    const at::Tensor best = y.index_select(0, out), taps = winners.index_select(0, out);
    const at::Tensor is_better = (taps < 0) | (fresh > best) | fresh.isnan();  // of equal ones the first tap wins
    y.index_copy_(0, out, at::where(is_better, fresh, best));
    winners.index_copy_(0, out, taps.masked_fill(is_better, static_cast<int64_t>(tap)));
  }
  return {y, winners};
}

at::Tensor max_unpool(const Plan& plan, const at::Tensor& x, const at::Tensor& winners) {
  check_rows("x", x, plan.source->rows());
  TORCH_CHECK_VALUE(winners.sizes() == x.sizes() && at::isIntegralType(winners.scalar_type(), false) &&
                        winners.device().is_cpu(),
                    "winners must be ", x.sizes(), " integers; got ", winners.sizes());
  const at::Tensor from = x.to(wide(x));
  at::Tensor y = at::zeros({plan.target->rows(), x.size(1)}, from.options());
  for (size_t tap = 0; tap < plan.taps->size(); ++tap) {
    const at::Tensor in = rows_of(plan.in(tap));
    const at::Tensor is_chosen = winners.index_select(0, in) == static_cast<int64_t>(tap);
    y.index_add_(0, rows_of(plan.out(tap)), from.index_select(0, in).masked_fill(is_chosen.logical_not(), 0));
  }
  return y.to(x.scalar_type());
}

at::Tensor pool_items(const Grid& grid, const at::Tensor& x, const std::string& how) {
  TORCH_CHECK_VALUE(how == "sum" || how == "average" || how == "max", "no pooling '", how, "'");
  check_rows("x", x, grid.rows());
  std::vector<at::Tensor> found;
  for (const at::Tensor& rows : by_item(grid)) {
    const at::Tensor item = x.index_select(0, rows);
    const bool is_sum = how == "sum" || item.size(0) == 0;
    found.push_back(is_sum ? item.sum(0) : how == "average" ? item.mean(0) : std::get<0>(item.max(0)));
  }
  return found.empty() ? x.new_empty({0, x.size(1)}) : at::stack(found);
}

at::Tensor standardise_items(const Grid& grid, const at::Tensor& x, int64_t groups, double eps) {
  check_rows("x", x, grid.rows());
  TORCH_CHECK_VALUE(groups >= 1 && x.size(1) % groups == 0, "x ", x.sizes(), " has no ", groups, " groups of channels");
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  for (const at::Tensor& rows : by_item(grid)) {
    if (rows.size(0) == 0) continue;
    const at::Tensor item = x.index_select(0, rows), grouped = item.view({rows.size(0), groups, x.size(1) / groups});
    const bool is_alone = grouped.size(0) * grouped.size(2) < 2;
    y.index_copy_(0, rows, is_alone ? item - item
                                    : at::batch_norm(grouped, {}, {}, {}, {}, true, 0.1, eps, false).reshape(item.sizes()));
  }
  return y;
}

at::Tensor to_dense(const Grid& grid, const at::Tensor& x, const Ints& start, const Ints& shape) {
  check_rows("x", x, grid.rows());
  const int64_t rank = grid.rank();
  TORCH_CHECK_VALUE(static_cast<int64_t>(start.size()) == rank && static_cast<int64_t>(shape.size()) == rank,
                    "start and shape have ", rank, " axes");
  Box box{start, start};
  int64_t cells = 1;
  for (int64_t axis = 0; axis < rank; ++axis) {
    TORCH_CHECK_VALUE(shape[axis] >= 0, "a shape has no negative axis");
    box.high[axis] += shape[axis];
    cells *= shape[axis];
  }
  TORCH_CHECK_VALUE(grid.rows() == 0 || box.encloses(grid.extent()), "voxels leave the box that should be filled");
  at::Tensor places = at::empty({grid.rows()}, at::kLong);
  for (int64_t row = 0; row < grid.rows(); ++row) {
    const Voxel voxel = grid.voxel(row);
    int64_t place = voxel[0];
    for (int64_t axis = 0; axis < rank; ++axis) place = place * shape[axis] + voxel[axis + 1] - start[axis];
    places.data_ptr<int64_t>()[row] = place;
  }
  at::Tensor flat = at::zeros({grid.items() * cells, x.size(1)}, x.options()).index_copy_(0, places, x);
  Ints whole{grid.items()};
  whole.insert(whole.end(), shape.begin(), shape.end());
  whole.push_back(x.size(1));
  return flat.view(whole).movedim(-1, 1).contiguous();
}

std::pair<at::Tensor, at::Tensor> voxelize(const at::Tensor& points, const at::Tensor& features,
                                           const std::vector<double>& size, const std::vector<double>& origin) {
  TORCH_CHECK_VALUE(points.dim() == 2 && points.size(1) >= 1 && points.size(1) <= 4, "points must be (M, D); got ",
                    points.sizes());
  const int64_t rank = points.size(1);
  TORCH_CHECK_VALUE(static_cast<int64_t>(size.size()) == rank && static_cast<int64_t>(origin.size()) == rank,
                    "size and origin have ", rank, " axes");
  check_rows("points", points, points.size(0));
  check_rows("features", features, points.size(0));
  TORCH_CHECK_VALUE(std::all_of(size.begin(), size.end(), [](double s) { return s > 0; }), "sizes must be positive");
  TORCH_CHECK_VALUE(points.isfinite().all().item<bool>(), "some points are not finite: drop them");
  const at::Tensor cells =
      at::floor((points.to(at::kDouble) - at::tensor(origin, at::kDouble)) / at::tensor(size, at::kDouble));
  TORCH_CHECK_VALUE(!(cells.abs() >= 2147483647.0).any().item<bool>(), "voxels must lie within 32 bits");
  const at::Tensor coords = at::cat({at::zeros({points.size(0), 1}, at::kLong), cells.to(at::kLong)}, 1);
  const auto [voxels, rows, counts] = at::unique_dim(coords, 0, true, true, true);
  at::Tensor sums = at::zeros({voxels.size(0), features.size(1)}, features.options().dtype(wide(features)));
  sums.index_add_(0, rows, features.to(wide(features)));
  return {voxels.to(at::kInt), (sums / counts.unsqueeze(1)).to(features.scalar_type())};
}

}  // namespace sparseconv
