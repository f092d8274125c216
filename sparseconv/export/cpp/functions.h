// What is computed on features, in CPU memory: convolution, pooling, norms, dense arrays, points.
#pragma once

#include "geometry.h"

namespace sparseconv {

// Features (rows, C) floating point on the CPU; an error that names them otherwise.
void check_rows(const char* name, const at::Tensor& x, int64_t rows);

// activation(sum over edges of x[in] @ weight[tap] + bias + residual): (N_out, C_out), sums in fp32 or fp64.
// weight (K, C_in/G, C_out); the activation is a name of activation_names(), or empty.
at::Tensor convolve(const Plan& plan, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& residual, int64_t groups, const std::string& activation,
                    const std::vector<double>& numbers);

// how: "sum", "average", "average_of_taps"
at::Tensor pool(const Plan& plan, const at::Tensor& x, const std::string& how);
// values and the taps that they came through, -1 where an output has no edge
std::pair<at::Tensor, at::Tensor> max_pool(const Plan& plan, const at::Tensor& x);
at::Tensor max_unpool(const Plan& plan, const at::Tensor& x, const at::Tensor& winners);
// how: "sum", "average", "max" of each item (B, C); 0 for an empty one
at::Tensor pool_items(const Grid& grid, const at::Tensor& x, const std::string& how);
// (x - mean) / sqrt(var + eps) of each group of channels over each item
at::Tensor standardise_items(const Grid& grid, const at::Tensor& x, int64_t groups, double eps);
// (B, C, *shape), zero where there is no voxel
at::Tensor to_dense(const Grid& grid, const at::Tensor& x, const Ints& start, const Ints& shape);

// Points (M, D) and their features (M, C) -> coords (N, 1+D) int32 in lexicographic order, and means (N, C).
// voxel = floor((point - origin) / size), in fp64
std::pair<at::Tensor, at::Tensor> voxelize(const at::Tensor& points, const at::Tensor& features,
                                           const std::vector<double>& size, const std::vector<double>& origin);

}  // namespace sparseconv
