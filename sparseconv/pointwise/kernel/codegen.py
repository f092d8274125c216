"""The text of a pointwise kernel: a pure function of (schema, rank, config)."""

from __future__ import annotations

from collections.abc import Callable

from sparseconv.pointwise.schema import Config, Schema

_SCALAR_ANNOTATIONS = {float: "tl.float64", int: "tl.int64", bool: "tl.int1"}


def kernel_name(schema: Schema, rank: int) -> str:
    return f"{schema.name}_rank{max(rank, 1)}"


def source(schema: Schema, rank: int, config: Config) -> str:
    """The text of the module that holds one kernel; `scalar_function` is put into it when it is loaded.

    A program is a tile over the last axes of the task space; the slower axes are single indices. It loads a tile of
    each tensor through its strides, calls the scalar function on the tiles and stores the results. Along an axis on
    which a tensor is repeated it loads one element. Sizes, strides and numbers are run-time
    arguments; dtypes, tile sizes and repetition are compile-time ones, so the text depends on neither.

    Args:
        schema: with every number's type declared.
        rank: axes of the task space; 0 is written as 1 axis of size 1.
        config: of which ``tile_axes`` matters here.

    Returns:
        Python source.
    """
    rank = max(rank, 1)
    tiled = list(range(max(0, rank - config.tile_axes), rank))
    lines = [
        f'"""Kernel of the pointwise function `{schema.name}` over {rank} ax{"i" if rank == 1 else "e"}s."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "",
        *_signature(schema, rank, tiled),
        *_coordinates(rank, tiled),
        "    for part in tl.static_range(PARTS):  # of two parts the first serves tiles that are full and need no mask",
        "        if (whole == (part + 1 < PARTS)) | (PARTS == 1):",
    ]
    body: list[str] = []
    gathered = dict(schema.gather)
    for position in sorted(schema.tensors, key=lambda i: (i in gathered, i)):
        body += _load(rank, tiled, position, gathered.get(position))
    body += [f"in{position} = tl.full((), val{position}, VAL{position})" for position in schema.scalars]
    arguments = [f"in{i}" for i in range(schema.num_inputs)]
    if schema.index:
        terms = [f"axis{k}.to(tl.int64) * index_stride{k}" for k in range(rank)]
        body.append(f"index = tl.broadcast_to({' + '.join(terms)}, {_shape(tiled)})")
        arguments.append("index")
    results = [f"out{j}" for j in range(schema.num_outputs)]
    body.append(f"{', '.join(results)} = scalar_function({', '.join(arguments)})")
    body.append(f"inside = {_unless_whole(' & '.join(f'(axis{k} < size{k})' for k in tiled))}")
    for result in results:
        address = _address(f"{result}_ptr", result, range(rank), lambda k: f"axis{k}")
        body.append(f"{result} = tl.broadcast_to({result}.to({result}_ptr.dtype.element_ty), {_shape(tiled)})")
        body.append(f"tl.store({address}, {result}, mask=inside)")
    return "\n".join(lines + [" " * 12 + line for line in body]) + "\n"


def parameters(schema: Schema, rank: int, config: Config) -> list[str]:
    """Names of the kernel's parameters, in order."""
    return [line.strip().rstrip(",").split(":")[0] for line in _parameters(schema, max(rank, 1), config.tile_axes)]


def _parameters(schema: Schema, rank: int, tile_axes: int) -> list[str]:
    axes = range(rank)
    tensors = [f"in{i}" for i in schema.tensors]
    results = [f"out{j}" for j in range(schema.num_outputs)]
    lines = [f"{name}_ptr" for name in tensors]
    for i in schema.scalars:
        kind = schema.scalar_types[i]
        if kind is None:
            raise ValueError(f"{schema.name}: the type of argument {i} must be resolved before code is generated")
        lines.append(f"val{i}: {_SCALAR_ANNOTATIONS[kind]}")
    lines += [f"{name}_ptr" for name in results]
    lines += [f"size{k}" for k in axes]
    lines += [f"{name}_stride{k}" for name in [*results, *tensors] for k in axes]
    lines += [f"in{i}_gather_stride" for i, _ in schema.gather]
    lines += [f"index_stride{k}" for k in axes] if schema.index else []
    constants = ["ADDRESS", "PARTS", "FULL", *(f"TILE{k}" for k in range(max(0, rank - tile_axes), rank))]
    constants += [f"IN{i}" for i in schema.tensors]
    constants += [f"IN{i}_VARIES{k}" for i in schema.tensors for k in range(max(0, rank - tile_axes), rank)]
    constants += [f"VAL{i}" for i in schema.scalars]
    return lines + [f"{name}: tl.constexpr" for name in constants]


def _signature(schema: Schema, rank: int, tiled: list[int]) -> list[str]:
    unspecialized = ", ".join(f'"val{i}"' for i in schema.scalars)
    decorator = f"@triton.jit(do_not_specialize=[{unspecialized}])" if schema.scalars else "@triton.jit"
    body = [f"    {line}," for line in _parameters(schema, rank, len(tiled))]
    return [decorator, f"def {kernel_name(schema, rank)}(", *body, "):"]


def _coordinates(rank: int, tiled: list[int]) -> list[str]:
    lines = ["    tile = tl.program_id(0).to(ADDRESS)"]
    for k in range(rank - 1, -1, -1):
        first = k == 0
        if k in tiled:
            if not first:
                lines.append(f"    tiles{k} = tl.cdiv(size{k}, TILE{k})")
            spread = "" if len(tiled) == 1 else "[:, None]" if k == tiled[0] else "[None, :]"
            lines.append(f"    start{k} = {'tile' if first else f'(tile % tiles{k})'} * TILE{k}")
            lines.append(f"    axis{k} = (start{k} + tl.arange(0, TILE{k})){spread}")
            if not first:
                lines.append(f"    tile //= tiles{k}")
        elif first:
            lines.append("    axis0 = tile")
        else:
            lines += [f"    axis{k} = tile % size{k}", f"    tile //= size{k}"]
    lines.append(f"    whole = {' & '.join(f'(start{k} + TILE{k} <= size{k})' for k in tiled)}")
    return lines


def _load(rank: int, tiled: list[int], position: int, source_position: int | None) -> list[str]:
    name, constant = f"in{position}", f"IN{position}"
    lines = []
    for k in tiled:
        origin = f"tl.zeros({(1,) * len(tiled)}, ADDRESS)"
        lines.append(f"{name}_axis{k} = axis{k} if {constant}_VARIES{k} else {origin}")
    address = _address(f"{name}_ptr", name, range(rank), lambda k: f"{name}_axis{k}" if k in tiled else f"axis{k}")
    mask = " & ".join(f"({name}_axis{k} < size{k})" for k in tiled)
    if source_position is not None:
        address += f" + in{source_position}_raw.to(ADDRESS) * {name}_gather_stride"
        mask += f" & in{source_position}_mask"
    lines.append(f"{name}_mask = {_unless_whole(mask)}")
    lines.append(f"{name}_raw = tl.load({address}, mask={name}_mask)")
    lines.append(f"{name} = tl.broadcast_to({name}_raw.to({constant}), {_shape(tiled)})")
    return lines


def _unless_whole(mask: str) -> str:
    return f"None if (part + 1 < PARTS) | FULL else {mask}"


def _address(pointer: str, name: str, axes: range, coordinate: Callable[[int], str]) -> str:
    return " + ".join([pointer, *(f"{coordinate(k)} * {name}_stride{k}" for k in axes)])


def _shape(tiled: list[int]) -> str:
    return "(" + ", ".join(f"TILE{k}" for k in tiled) + ("," if len(tiled) == 1 else "") + ")"


def call_source(name: str, parameters: str, expression: str, doc: str) -> str:
    """The text of a module with one jitted scalar function that calls the `inner` function put into it."""
    return "\n".join(
        [
            f'"""{doc}"""',
            "",
            "import triton",
            "import triton.language as tl  # noqa: F401",
            "",
            "",
            "@triton.jit",
            f"def {name}({parameters}):",
            f"    return {expression}",
            "",
        ]
    )
