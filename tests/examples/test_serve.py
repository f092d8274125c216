"""A served sweep has the labels of the network's own call, whether it fits the graph or not."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.gpu import graphs
from tests.nn.test_capture import stand_in

SIZE = 0.5
TINY = {"beams": 24, "around": 60}


def service(device, most_voxels=4000):
    import serve

    torch.manual_seed(0)
    net = nn.UNet(4, 19, channels=(8, 16)).to(device).eval()
    sweeps = list(serve.generated(20, **TINY))
    return serve.Service(net, sweeps[0], SIZE, 40.0, 1200, most_voxels), sweeps


def wanted(net, points):
    """Logits (M, 19) of each point."""
    points = points.to(next(net.parameters()).device)
    grid, rows = sc.voxelize(points[:, :3].contiguous(), SIZE)
    mean = sc.ops.voxelize_features(torch.cat([points[:, :3] / 20, points[:, 3:]], 1), rows, len(grid))
    with torch.no_grad():
        return net(sc.SparseTensor(grid, mean)).features[rows].cpu()


def check(served, sweeps):
    """The answers, each compared: its class is the best, but for what rounding leaves open."""
    answers = [served(points) for points in sweeps]
    for points, answer in zip(sweeps, answers):
        logits = wanted(served.net, points)
        chosen = logits.gather(1, answer.labels[:, None])[:, 0]
        assert torch.allclose(chosen, logits.amax(1), rtol=0, atol=1e-3)
        assert answer.labels.device.type == "cpu"
        assert (answer.voxels, answer.seconds > 0) == (len(sc.voxelize(points[:, :3].contiguous(), SIZE)[0]), True)
    return answers


@pytest.fixture
def graphs_here(monkeypatch):
    monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphs, "graph_of", stand_in)


def test_without_a_card_every_answer_is_the_networks_own():
    served, sweeps = service("cpu")
    answers = check(served, sweeps[8:12])
    assert [answer.how for answer in answers] == ["eager"] * 4
    assert torch.equal(answers[1].labels, wanted(served.net, sweeps[9]).argmax(1))


@pytest.mark.usefixtures("graphs_here")
def test_what_does_not_fit_is_answered_eagerly():
    served, sweeps = service("cpu")
    served.has_graph = True
    answers = check(served, [*sweeps[7:11], sweeps[19], sweeps[0][:0], sweeps[0]])
    assert [answer.how for answer in answers] == [
        *("captured", "captured", "eager", "captured", "eager", "eager", "captured")
    ]
    assert answers[2].voxels <= served.captured.max_voxels < answers[4].voxels  # too far, too many


@pytest.mark.usefixtures("graphs_here")
def test_a_coarser_grid_without_room_is_answered_eagerly():
    """Voxels apart from one another have as many coarse ones, which the host does not see."""
    served, sweeps = service("cpu")
    served.has_graph = True
    apart = torch.zeros(1200, 4)
    cells = torch.arange(1200)
    apart[:, 0], apart[:, 1] = cells % 40 - 20, cells // 40 - 15  # every second voxel along x and y
    answers = check(served, [sweeps[1], apart + 0.25, sweeps[1]])
    assert [answer.how for answer in answers] == ["captured", "eager", "captured"]


def test_a_sweep_over_the_limit_is_refused():
    served, sweeps = service("cpu", most_voxels=2000)
    answer = served(sweeps[19])
    assert (answer.how, len(answer.labels)) == ("refused", 0)
    assert answer.voxels > 2000


def test_the_command_says_what_it_did(capsys, tmp_path):
    import serve
    from stand_ins import semantic_kitti as stand_in_set

    stand_in_set.write(tmp_path, train=1, valid=3, **TINY)
    size = (None, "14", 4, 0.5, 40.0, None, 10_000, 0)
    serve.main(2, "cpu", f"{tmp_path}/sequences/08/velodyne/*.bin", *size)
    said = capsys.readouterr().out
    assert "on the cpu there is no graph" in said
    assert "eager: 2 sweeps" in said
    assert "p50" in said
    assert "p99" in said
    assert "MiB of the process at most" in said
    with pytest.raises(Exception, match="no file is called"):
        serve.main(2, "cpu", f"{tmp_path}/*.bin", *size)


@pytest.mark.gpu
def test_a_stream_on_a_card():
    served, sweeps = service("cuda")
    check(served, sweeps[:10])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    answers = check(served, sweeps)
    assert [number for number, answer in enumerate(answers) if answer.how != "captured"] == [9, 19]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before[0] + (1 << 20)  # no sweep is kept
    assert torch.cuda.memory_reserved() <= before[1] + (8 << 20)
