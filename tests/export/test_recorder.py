"""A run on a GPU as a sequence of plain steps; on a CPU, with stand-ins for what a GPU has."""

from types import SimpleNamespace

import pytest
import torch

from sparseconv.export import recorder as recorders
from sparseconv.export import sequence
from sparseconv.export.recorder import CallStep, EventStep, LaunchStep, Recorder
from sparseconv.export.sequence import Memory, Writer
from sparseconv.gpu.launch_log import listeners, tell
from sparseconv.torch_private import dispatch_modes


class OnCpu(Recorder):
    """A recorder of what is done on the CPU, whose streams are numbers."""

    DEVICE = "cpu"
    now = 0

    def _stream(self, stream=None):
        number = self.now if stream is None else stream
        while len(self.priorities) <= number:
            self.priorities.append(0)
        return number


@pytest.fixture
def record():
    def of(run):
        recorder = OnCpu()
        with recorder:
            run(recorder)
        return recorder

    return of


def kernel(name="fill", kinds=("*fp32", "i32"), **more):
    data = {"name": name, "num_warps": 4, "shared": 0, "launch_cooperative_grid": False, "num_ctas": 1}
    data |= {"global_scratch_size": 0, "profile_scratch_size": 0} | more
    signature = {f"p{n}": kind for n, kind in enumerate(kinds)} | {"BLOCK": "constexpr"}
    return SimpleNamespace(
        name=name,
        metadata=SimpleNamespace(**data),
        asm={"cubin": b"machine code"},
        src=SimpleNamespace(signature=signature),
    )


def names(recorder):
    return [str(step.operator).removeprefix("aten.") for step in recorder.steps]


def test_operations_write_into_memory_that_is_there(record):
    x, y = torch.randn(4, 6), torch.zeros(4, 6)

    def run(_):
        torch.empty(3)
        made = torch.cat([x, y], 1)
        x.new_zeros(5).add_(1)
        torch.full((2,), 7.0)
        x[:, 2:].t().clone()
        torch.nn.functional.relu(made @ made.t())
        torch.where(x > 0, x, y)
        torch.arange(5)
        torch.where(x > 0, x, 2.0)

    wanted = ["cat.out", "zero_.default", "add_.Tensor", "fill_.Scalar", "copy_.default", "mm.out", "relu.out"]
    wanted += ["gt.Scalar_out", "where.self_out", "arange.out", "gt.Scalar_out", "fill_.Scalar", "where.self_out"]
    assert names(record(run)) == wanted


def test_a_recorded_run_can_be_played(record):
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    kept = []

    def run(_):
        joined = torch.cat([x, y], 1)
        kept.append(torch.nn.functional.layer_norm(joined, (12,)).sum(0, keepdim=True) * 3)

    recorder = record(run)
    wanted = kept[0].clone()
    for step in recorder.steps:
        for value in step.values[-1:]:
            value.fill_(-1)
    for step in recorder.steps:
        arguments = zip(step.operator._schema.arguments, step.values)
        split = [(a.name, value, a.kwarg_only) for a, value in arguments]
        step.operator(*(v for _, v, named in split if not named), **{n: v for n, v, named in split if named})
    assert torch.equal(kept[0], wanted)


def test_our_own_code_sees_no_mode(record):
    seen = []
    record(lambda _: seen.append(dispatch_modes()))
    assert seen == [0]


def test_foreign_operations_are_refused(record):
    @torch.library.custom_op("somebody::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    with pytest.raises(ValueError, match=r"somebody\.halved\.default, which torch does not have in C"):
        record(lambda _: halved(torch.ones(3)))
    with pytest.raises(ZeroDivisionError):  # what fails within is said as it is
        record(lambda _: (halved(torch.ones(3)), 1 / 0))


def test_launches_are_told_until_the_end(record):
    def run(_):
        tell(kernel(), (2, 1, 1), (64, 7))
        tell(kernel(), (0, 1, 1), (64, 7))

    recorder = record(run)
    assert [type(step) for step in recorder.steps] == [LaunchStep]
    assert recorder.steps[0][2:] == ((2, 1, 1), (64, 7), ("*fp32", "i32"))
    assert not listeners
    with pytest.raises(ValueError, match="the kernel fill has 2 parameters, but 1 were given"):
        record(lambda _: tell(kernel(), (1, 1, 1), (64,)))
    with pytest.raises(ValueError, match="it launches a kernel of CuPy, and a package holds those of Triton"):
        record(lambda _: tell("a kernel of CuPy", (1, 1, 1), ()))
    assert not listeners


def test_a_second_run_begins_anew():
    recorder = OnCpu()
    for rows in (3, 5):
        with recorder:
            torch.zeros(rows)
    assert [len(step.values[0]) for step in recorder.steps] == [5]


def test_events_of_the_run_are_numbered(record, monkeypatch):
    class Event:
        def record(self, stream=None):
            pass

        def wait(self, stream=None):
            pass

    monkeypatch.setattr(recorders.torch.cuda, "Event", Event)
    before = Event()

    def run(_):
        first, second = Event(), Event()
        before.wait(1)
        first.record(0)
        second.record(1)
        first.wait(1)
        first.record(1)
        first.wait(0)

    assert record(run).steps == [
        EventStep(0, 0, False),
        EventStep(1, 1, False),
        EventStep(1, 0, True),
        EventStep(1, 2, False),
        EventStep(0, 2, True),
    ]


# ---- as plain lists


def memory(blocks=(), workspace=None):
    """Blocks of torch's allocator, (start, bytes) each, and one segment of a graph."""
    snapshot = [
        {
            "address": start,
            "total_size": size,
            "segment_pool_id": (0, 0),
            "blocks": [{"size": 0, "state": "inactive"}, {"size": size, "state": "active_allocated"}],
        }
        for start, size in blocks
    ]
    if workspace is not None:
        start, size = workspace
        snapshot.append({"address": start, "total_size": size, "segment_pool_id": (0, 7), "blocks": []})
    return Memory((0, 7), snapshot)


def test_addresses_lie_in_workspaces_and_constants():
    places = memory([(4096, 512), (8192, 512)], workspace=(2048, 1024))
    assert places.workspaces == [1024]
    assert places.place(2048 + 48, "it") == (0, 48)
    assert places.place(8192, "it") == (1, 0)
    assert places.place(4096 + 511, "it") == (2, 511)
    assert places.place(8192 + 16, "it") == (1, 16)
    assert places.place(0, "it") == (-1, 0)
    for far in (16, 4096 + 512, 1 << 40):
        with pytest.raises(ValueError, match="the kernel fill reads memory that torch did not allocate"):
            places.place(far, "the kernel fill")


def test_launches_as_lists(record):
    types = ("*fp32", "i32", "i64", "fp32", "*i32")
    recorder = record(lambda _: [tell(kernel(kinds=types), (3, 2, 1), (4112, 7, 2**40, 0.5, None)) for _ in range(2)])
    writer = Writer(memory([(4096, 512)]))
    kind = (sequence.POINTER, sequence.INT32, sequence.INT64, sequence.FLOAT32, sequence.POINTER)
    values = [(kind[0], 0, 16), (kind[1], 7), (kind[2], 2**40), (kind[3], 0.5), (kind[4], -1, 0)]
    step = (sequence.LAUNCH, 0, 0, [3, 2, 1], values)
    assert writer.steps(recorder)[0] == step
    (name, binary, *how), *_ = writer.kernels
    assert (name, bytes(binary.tolist()), how) == ("fill", b"machine code", [128, 0, False, 1])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (kernel(global_scratch_size=8), "the kernel fill asks for scratch"),
        (kernel(kinds=("fp64", "i32")), "the kernel fill has a parameter of type fp64"),
        (kernel(kinds=("tensordesc<fp16[64, 32]>", "i32")), "the kernel fill takes an unknown descriptor"),
    ],
    ids=["scratch", "type", "descriptor"],
)
def test_kernels_that_no_package_holds(record, made, words):
    recorder = record(lambda _: tell(made, (1, 1, 1), (4096, 7)))
    with pytest.raises(ValueError, match=words):
        Writer(memory([(4096, 512)])).steps(recorder)


def test_arguments_as_lists():
    writer = Writer(memory())
    assert writer._argument(None, "it") == (sequence.PLAIN, None)
    assert writer._argument(2.5, "it") == (sequence.PLAIN, 2.5)
    assert writer._argument([1, True], "it") == (sequence.LIST, [(sequence.PLAIN, 1), (sequence.PLAIN, True)])
    assert writer._argument(torch.float16, "it") == (sequence.DTYPE, 0)
    assert writer._argument(torch.int32, "it") == (sequence.DTYPE, 1)
    assert [kind.dtype for kind in writer.kinds] == [torch.float16, torch.int32]
    assert writer._argument(torch.device("cuda:1"), "it") == (sequence.DEVICE,)
    assert writer._argument(torch.preserve_format, "it") == (sequence.PLAIN, 1)
    kind, value = writer._argument(torch.tensor(3.0), "it")
    assert (kind, value.item()) == (sequence.HOST, 3.0)
    with pytest.raises(ValueError, match=r"aten\.mul takes a complex"):
        writer._argument(1j, "aten.mul")


def test_an_event_step_says_which_way():
    recorder = SimpleNamespace(steps=[EventStep(1, 4, False), EventStep(0, 4, True)])
    assert Writer(memory()).steps(recorder) == [(sequence.RECORD, 1, 4), (sequence.WAIT, 0, 4)]


def test_a_call_names_its_schema(record):
    recorder = record(lambda _: torch.zeros(0))
    assert recorder.steps == []
    step = CallStep(0, torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2), 1))
    (kind, stream, name, overload, values), *_ = Writer(memory()).steps(SimpleNamespace(steps=[step]))
    assert (kind, stream, name, overload, len(values)) == (sequence.CALL, 0, "aten::add", "Tensor", 3)
