"""Sparse convolution as one matrix product whose rows are looked up: nothing gathered to memory, nothing scattered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from sparseconv.backends.base import Backend, Request
from sparseconv.backends.triton_implicit_gemm.config import (
    ConvConfig,
    WeightGradConfig,
    Work,
    conv_candidates,
    weight_grad_candidates,
)
from sparseconv.backends.triton_implicit_gemm.jobs import Jobs, cut_jobs
from sparseconv.backends.triton_implicit_gemm.launch import Launch
from sparseconv.backends.triton_implicit_gemm.schedule import Schedule, build_schedule, retile
from sparseconv.backends.triton_implicit_gemm.tuning import Tuner
from sparseconv.geometry.kernel_map import KernelMap

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: offsets from a pointer that a kernel may compute in 32 bits
NARROW = 2**31
#: pairs of one job are a multiple of this
JOB_QUANTUM = 128
#: bytes of fp32 partial sums of a weight gradient: fewer jobs where they would take more
PARTIAL_BYTES = 48 << 20


class TritonImplicitGemm(Backend):
    """Output-stationary tiles over rows sorted by their tap masks; each tile visits its live taps only.

    The input gradient is the same kernel over the reversed edges with the weight read transposed; the weight gradient
    sums runs of each tap's pairs and adds the runs in a fixed order. No atomics: two runs give the same bits.
    """

    name: ClassVar[str] = "triton_implicit_gemm"

    def __init__(self) -> None:
        self._tuner = Tuner()

    def unsupported(self, request: Request) -> str | None:
        """None on a CUDA device for half, bfloat16 and single precision; else why not."""
        if request.dtype not in DTYPES:
            return f"computes in float16, bfloat16 and float32, not in {request.dtype}; cast, or use another backend"
        if request.device.type != "cuda" and not _interpreted():
            return f"runs on CUDA devices, not on {request.device}; TRITON_INTERPRET=1 runs it slowly on the CPU"
        if request.device.type == "cuda" and torch.cuda.get_device_capability(request.device) < (8, 0):
            return f"needs compute capability 8.0 or newer, {torch.cuda.get_device_name(request.device)} is older"
        return None

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y (N_out, C_out) from x (N_in, C_in), weight (K, C_in/G, C_out) and an optional bias (C_out,)."""
        return self._conv(x, weight, kernel_map, groups, bias, transposed=False)

    def input_grad(
        self, grad_out: torch.Tensor, weight: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> torch.Tensor:
        """dL/dx (N_in, C_in): the forward kernel over the reversed edges, with the weight transposed."""
        return self._conv(grad_out, weight, kernel_map, groups, None, transposed=True)

    def weight_grad(self, x: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int) -> torch.Tensor:
        """dL/dw (K, C_in/G, C_out): runs of each tap's pairs, summed in fp32 and added in a fixed order."""
        x, grad_out = _rows(x), _rows(grad_out)
        group_in, c_out = x.shape[1] // groups, grad_out.shape[1]
        out = torch.empty(kernel_map.num_taps, group_in, c_out, dtype=x.dtype, device=x.device)
        if out.numel() == 0 or kernel_map.num_pairs == 0:
            return out.zero_()
        aligned = _aligned(x, x.stride(0)) and _aligned(grad_out, grad_out.stride(0))
        key = ("weight_grad", x.dtype, x.shape[1], c_out, groups, x.stride(0), grad_out.stride(0), aligned, _tf32())
        step = kernel_map.prepared.get(key)
        if step is None:
            step = self._prepare_weight_grad(x, grad_out, kernel_map, groups, out, aligned)
            kernel_map.prepared[key] = step
        with _on(x):
            step(x, grad_out, out)
        return out

    def workspace_bytes(self, request: Request) -> int:
        """The most memory that one verb allocates beside its result, in bytes: the weight gradient's partial sums."""
        size = 4 * request.kernel_map.num_taps * (request.c_in // max(1, request.groups)) * request.c_out
        copy = size // 4 * request.dtype.itemsize if min(request.c_in, request.c_out) >= 256 else 0
        return max(size + PARTIAL_BYTES, copy)

    def explain(self, request: Request) -> dict[str, Any]:
        """What was chosen and timed for maps and channels like this request's, and the waste of its row order.

        Reads sizes back from the device: for people, not for hot loops.
        """
        kernel_map = request.kernel_map
        group_in, group_out = request.c_in // request.groups, request.c_out // request.groups
        report: dict[str, Any] = {"backend": self.name, "flops": request.flops, "pairs": kernel_map.num_pairs}
        for verb, work in (
            ("forward", _work(request.dtype, request.device, kernel_map, group_in, group_out, request.groups, True)),
            (
                "input_grad",
                replace(
                    _work(request.dtype, request.device, kernel_map, group_out, group_in, request.groups, True),
                    num_rows=kernel_map.num_in,
                    transposed=True,
                ),
            ),
        ):
            candidates = conv_candidates(work)
            report[verb] = self._tuner.explain(("conv", *work.key()), candidates)
        work = _work(request.dtype, request.device, kernel_map, group_in, group_out, request.groups, True)
        report["weight_grad"] = self._tuner.explain(("weight_grad", *work.key()), weight_grad_candidates(work))
        schedule = schedule_of(kernel_map, report["forward"]["config"].block_m)
        executed = int(schedule.tile_counts.sum()) * schedule.block_m
        report["executed_rows"] = executed
        report["waste"] = executed / max(1, kernel_map.num_pairs)
        return report

    def _conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None,
        transposed: bool,
    ) -> torch.Tensor:
        x = _rows(x)
        weight = weight if weight.is_contiguous() else weight.contiguous()
        num_out = kernel_map.num_in if transposed else kernel_map.num_out
        c_out = weight.shape[1] * groups if transposed else weight.shape[2]
        out = torch.empty(num_out, c_out, dtype=x.dtype, device=x.device)
        if out.numel() == 0:
            return out
        aligned = _aligned(x, x.stride(0)) and _aligned(weight, weight.shape[2])
        bias_dtype = None if bias is None else bias.dtype
        key = ("conv", transposed, x.dtype, weight.shape, groups, x.stride(0), bias_dtype, aligned, _tf32())
        step = kernel_map.prepared.get(key)
        if step is None:
            step = self._prepare_conv(x, weight, kernel_map, groups, bias, out, transposed, aligned)
            kernel_map.prepared[key] = step
        with _on(x):
            step(x, weight, out, x if bias is None else bias, x)
        return out

    def _prepare_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        transposed: bool,
        aligned: bool,
    ) -> Callable[..., None]:
        group_in = x.shape[1] // groups
        work = _work(x.dtype, x.device, kernel_map, group_in, out.shape[1] // groups, groups, aligned)
        work = replace(work, num_rows=out.shape[0], transposed=transposed)
        tensors = (x, weight, out, x if bias is None else bias, x)

        @functools.cache
        def step_of(config: ConvConfig) -> Callable[..., None]:
            return _conv_step(config, work, x, weight, kernel_map, out, bias is not None, transposed)

        def compile_one(config: ConvConfig) -> None:
            step = step_of(config)
            launch = step if isinstance(step, Launch) else step.args[0]  # type: ignore[attr-defined]
            launch.compile(*tensors)

        candidates = conv_candidates(work)
        schedule_of(kernel_map, candidates[0].block_m, transposed)  # built here, not by a compiling thread
        with _on(x):
            chosen = self._tuner.choose(
                ("conv", *work.key()), candidates, compile_one, lambda config: step_of(config)(*tensors), x.device
            )
        return step_of(chosen)

    def _prepare_weight_grad(
        self,
        x: torch.Tensor,
        grad_out: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        out: torch.Tensor,
        aligned: bool,
    ) -> Callable[..., None]:
        work = _work(x.dtype, x.device, kernel_map, x.shape[1] // groups, grad_out.shape[1] // groups, groups, aligned)

        @functools.cache
        def step_of(config: WeightGradConfig) -> _WeightGradStep:
            return _WeightGradStep(config, work, kernel_map, x, grad_out, out)

        with _on(x):
            chosen = self._tuner.choose(
                ("weight_grad", *work.key()),
                weight_grad_candidates(work),
                lambda config: step_of(config).compile(x, grad_out, out),
                lambda config: step_of(config)(x, grad_out, out),
                x.device,
            )
        return step_of(chosen)


def schedule_of(kernel_map: KernelMap, block_m: int, transposed: bool = False) -> Schedule:
    """The map's schedule at a tile size, built on first use and kept with the map; transposed: of the reversed edges.

    A map with a mirror symmetry is its own reverse with the taps exchanged, so its one table serves both directions.
    """
    if transposed and kernel_map.mirror is None:
        return schedule_of(kernel_map.reverse(), block_m)
    key = ("schedule", block_m, transposed)
    schedule = kernel_map.prepared.get(key)
    if schedule is None:
        if transposed:
            straight = schedule_of(kernel_map, block_m)
            mirror = torch.tensor(kernel_map.mirror, dtype=torch.int32)
            if straight.tile_taps.is_cuda:
                mirror = mirror.pin_memory()
            mirror = mirror.to(straight.tile_taps.device, non_blocking=True)
            schedule = replace(straight, tile_taps=mirror[straight.tile_taps.long()])
        else:
            base = kernel_map.prepared.get("schedule")
            if base is None:
                base = build_schedule(
                    kernel_map.neighbors,
                    kernel_map.num_taps,
                    block_m,
                    base_order=kernel_map.prepared.get("row_order"),
                )
                kernel_map.prepared["schedule"] = base
            schedule = retile(base, block_m)
        kernel_map.prepared[key] = schedule
    return schedule


def _conv_step(
    config: ConvConfig,
    work: Work,
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_map: KernelMap,
    out: torch.Tensor,
    has_bias: bool,
    transposed: bool,
) -> Callable[..., None]:
    """The forward or input-gradient launch for a configuration: called with (x, weight, out, bias, residual)."""
    schedule = schedule_of(kernel_map, config.block_m, transposed)
    copy = transposed and config.weight_copy
    # a transposed copy of the weight is (K, C_out/G of the map, C_in of the map): read as a forward weight
    weight_c = work.group_out * work.groups if copy else weight.shape[2]
    weight_k = weight.shape[1] * weight.shape[2]
    slots = schedule.out_rows.shape[0]
    table = schedule.neighbors
    wide = max(x.shape[0] * x.stride(0), out.numel(), table.numel(), weight.numel()) >= NARROW
    blocks_n = -(-work.pack * work.group_out // config.block_n)
    packs = -(-work.groups // work.pack)
    launch = Launch(
        _kernel("conv_kernel", config.gluon),
        schedule.num_tiles * packs * blocks_n,
        (
            table,
            schedule.out_rows,
            schedule.tile_counts,
            schedule.tile_rows,
            schedule.tile_taps,
            schedule.tile_order,
            slots,
            schedule.tile_rows.shape[1],
            x.stride(0),
            weight_k,
            weight_c,
        ),
        {
            "GROUP_IN": work.group_in,
            "GROUP_OUT": work.group_out,
            "PACK": work.pack,
            "GROUPS": work.groups,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.stages,
            "TRANSPOSED": transposed and not copy,
            "HAS_BIAS": has_bias,
            "HAS_RESIDUAL": False,
            "ACTIVATION": None,
            "TO_SLOTS": False,
            "WIDE": wide,
            "HIDDEN": not _interpreted(),
            "PRECISION": _tf32(),
        },
        config.warps,
        config.stages,
    )
    return functools.partial(_with_copied_weight, launch, work.groups) if copy else launch


def _with_copied_weight(
    launch: Launch, groups: int, x: torch.Tensor, weight: torch.Tensor, *tensors: torch.Tensor
) -> None:
    """Launch with the weight (K, C_in/G, C_out) laid out as (K, C_out/G, C_in): each group's block transposed."""
    taps, group_in, c_out = weight.shape
    blocks = weight.view(taps, group_in, groups, c_out // groups).permute(0, 3, 2, 1)
    launch(x, blocks.reshape(taps, c_out // groups, groups * group_in).contiguous(), *tensors)


class _WeightGradStep:
    """The weight gradient of one configuration: the jobs' sums, then their reduction where a tap has several."""

    def __init__(
        self,
        config: WeightGradConfig,
        work: Work,
        kernel_map: KernelMap,
        x: torch.Tensor,
        grad_out: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        size = work.group_in * work.group_out * work.groups
        packs = -(-work.groups // work.pack)
        tiles = (
            packs * -(-work.pack * work.group_in // config.block_i) * -(-work.pack * work.group_out // config.block_o)
        )
        allowed = max(kernel_map.num_taps, PARTIAL_BYTES // (4 * size))
        jobs = _jobs_of(kernel_map, min(allowed, max(kernel_map.num_taps, config.programs // tiles)))
        wide = max(x.shape[0] * x.stride(0), grad_out.shape[0] * grad_out.stride(0)) >= NARROW
        self._direct = jobs.one_each
        self._partial_shape = (jobs.count, size)
        self._sums = Launch(
            _kernel("weight_grad_kernel", config.gluon),
            jobs.count * tiles,
            (
                kernel_map.in_rows,
                kernel_map.out_rows,
                jobs.begin,
                jobs.end,
                jobs.order,
                x.stride(0),
                grad_out.stride(0),
            ),
            {
                "GROUP_IN": work.group_in,
                "GROUP_OUT": work.group_out,
                "PACK": work.pack,
                "GROUPS": work.groups,
                "BLOCK_I": config.block_i,
                "BLOCK_O": config.block_o,
                "BLOCK_P": config.block_p,
                "STAGES": config.stages,
                "WIDE": wide,
                "HIDDEN": not _interpreted(),
                "PRECISION": _tf32(),
            },
            config.warps,
            config.stages,
        )
        block = 256
        self._reduce = Launch(
            _kernel("reduce_jobs_kernel", False),
            -(-size // block) * out.shape[0],
            (jobs.tap_jobs,),
            {"SIZE": size, "BLOCK": block},
            4,
            3,
        )

    def compile(self, x: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor) -> None:
        """Compile both kernels without running them."""
        if self._direct:
            self._sums.compile(x, grad_out, out)
            return
        partial = torch.empty(0, dtype=torch.float32, device=x.device)
        self._sums.compile(x, grad_out, partial)
        self._reduce.compile(partial, out)

    def __call__(self, x: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor) -> None:
        if self._direct:
            self._sums(x, grad_out, out)
            return
        partial = torch.empty(self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, grad_out, partial)
        self._reduce(partial, out)


def _jobs_of(kernel_map: KernelMap, max_jobs: int) -> Jobs:
    key = ("jobs", max_jobs)
    jobs = kernel_map.prepared.get(key)
    if jobs is None:
        jobs = cut_jobs(kernel_map.tap_counts, max_jobs, JOB_QUANTUM, kernel_map.in_rows.device)
        kernel_map.prepared[key] = jobs
    return jobs


def _work(
    dtype: torch.dtype,
    device: torch.device,
    kernel_map: KernelMap,
    group_in: int,
    group_out: int,
    groups: int,
    aligned: bool,
) -> Work:
    work = Work(
        dtype, kernel_map.num_out, kernel_map.num_pairs, kernel_map.num_taps, group_in, group_out, groups, aligned
    )
    if device.type != "cuda":
        return replace(work, capability=(0, 0))
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return replace(work, processors=properties.multi_processor_count, capability=capability)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its rows are not contiguous runs of channels."""
    if x.stride(1) != 1 and x.shape[1] > 1 or x.stride(0) < x.shape[1]:
        return x.contiguous()
    return x


def _aligned(x: torch.Tensor, stride: int) -> bool:
    return x.data_ptr() % 16 == 0 and stride * x.element_size() % 16 == 0


def _tf32() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def _kernel(name: str, gluon: bool) -> Any:
    if gluon:
        from sparseconv.backends.triton_implicit_gemm import gluon_kernels

        return getattr(gluon_kernels, name)
    from sparseconv.backends.triton_implicit_gemm import kernels

    return getattr(kernels, name)


@functools.cache
def _interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1 when they were first imported)."""
    try:
        return type(_kernel("conv_kernel", False)).__name__ == "InterpretedFunction"
    except ImportError:
        return False


class _on:
    """The device of a tensor as the current one; nothing at all where it is already, or on the CPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self._index = x.get_device()
        self._guard: torch.cuda.device | None = None

    def __enter__(self) -> None:
        if self._index >= 0 and torch.cuda.current_device() != self._index:
            self._guard = torch.cuda.device(self._index)
            self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*error)
