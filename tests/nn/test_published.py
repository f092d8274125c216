"""Published networks: their numbers of parameters, their voxels, their public names, and that they learn."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import sparseconv as sc
import sparseconv.nn
from sparseconv.interop import convert_state, load_published, published_family
from sparseconv.interop.spconv import pytorch as spconv
from sparseconv.nn.models.convnext import ConvNeXtUNet
from sparseconv.nn.models.minkunet import PLANES, MinkUNet
from sparseconv.nn.models.ptv3 import ConditionalPositionalEncoding, PointEmbedding, PointTransformerV3
from sparseconv.nn.models.resnet import ResNet, coarsened
from sparseconv.nn.models.second import SecondEncoder, VoxelResBackBone8x
from sparseconv.nn.models.spunet import SpUNet


def scene(voxels=400, extent=24, channels=3, batch=2, shape=None, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shape = shape or (extent,) * 3
    coords = torch.stack([torch.randint(0, n, (voxels,), generator=gen) for n in (batch, *shape)], 1)
    grid = sc.VoxelGrid(coords, batch, duplicates="first")
    return sc.SparseTensor(grid, torch.randn(len(grid), channels, generator=gen))


def count(module):
    return sum(p.numel() for p in module.parameters())


def randomised(module, seed=0):
    torch.manual_seed(seed)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    for name, b in module.named_buffers():
        if name.endswith(("mean", "var")):
            torch.nn.init.uniform_(b, 0.5, 1.5)
    return module.eval()


# ---- parameters, by arithmetic that knows no module


def conv(taps, a, b):
    return taps * a * b


def bn(c):
    return 2 * c


def blocks(c_in, plane, n, expansion=1, first=False):
    """Residual blocks of a stage; the skip has weights where the width changes, or where ``first`` strides."""
    total = 0
    for i in range(n):
        out = plane * expansion
        if expansion == 1:
            total += conv(27, c_in, plane) + bn(plane) + conv(27, plane, plane) + bn(plane)
        else:
            total += conv(1, c_in, plane) + conv(27, plane, plane) + conv(1, plane, out) + 2 * bn(plane) + bn(out)
        if c_in != out or (first and i == 0):
            total += conv(1, c_in, out) + bn(out)
        c_in = out
    return total


def minkunet(c_in, classes, planes, layers, expansion=1, init=32):
    wide = [init, *(p * expansion for p in planes)]
    total = conv(125, c_in, init) + bn(init)
    for s in range(4):
        total += conv(8, wide[s], wide[s]) + bn(wide[s]) + blocks(wide[s], planes[s], layers[s], expansion)
    for s in range(4, 8):
        skip = wide[7 - s]
        total += conv(8, wide[s], planes[s]) + bn(planes[s])
        total += blocks(planes[s] + skip, planes[s], layers[s], expansion)
    return total + conv(1, wide[8], classes) + classes


MINK_LAYERS = {"14": (1,) * 8, "18": (2,) * 8, "34": (2, 3, 4, 6, 2, 2, 2, 2), "50": (2, 3, 4, 6, 2, 2, 2, 2)}
RES_LAYERS = {14: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


@pytest.mark.parametrize("variant", [*MINK_LAYERS, *(v for v in PLANES if v)])
def test_parameters_of_minkunet(variant):
    with torch.device("meta"):
        net = MinkUNet(3, 20, variant=variant)
    depth = variant[:2]
    want = minkunet(3, 20, PLANES.get(variant, PLANES[""]), MINK_LAYERS[depth], 4 if depth == "50" else 1)
    assert count(net) == want


def test_published_figures():
    """37.9 M (MinkUNet-34C) and 39.2 M (SpUNet) as the tables of Point Transformer V2 and V3 give them; 21.7 M for
    MinkUNet-18 as Tang et al. (SPVNAS, 2020) do."""
    with torch.device("meta"):
        assert round(count(MinkUNet(3, 20, variant="34C")) / 1e6, 1) == 37.9
        assert round(count(MinkUNet(4, 19, variant="18")) / 1e6, 1) == 21.7
        assert round(count(SpUNet(6, 20)) / 1e6, 1) == 39.2


@pytest.mark.parametrize("depth", RES_LAYERS)
def test_parameters_of_resnet(depth):
    with torch.device("meta"):
        net = ResNet(3, 40, depth=depth)
    expansion = 4 if depth == 50 else 1
    total, width = conv(125, 3, 64) + bn(64), 64
    for plane, n in zip((64, 128, 256, 512), RES_LAYERS[depth]):
        total += blocks(width, plane, n, expansion, first=True)
        width = plane * expansion
    assert count(net) == total + conv(27, width, width) + bn(width) + width * 40 + 40


def test_parameters_of_spunet():
    channels, layers = (32, 64, 128, 256, 256, 128, 96, 96), (2, 3, 4, 6, 2, 2, 2, 2)
    total = conv(125, 6, 32) + bn(32)
    before = [32, 32, 64, 128]
    for s in range(4):
        total += conv(8, before[s], channels[s]) + bn(channels[s]) + blocks(channels[s], channels[s], layers[s])
        below, here = channels[6 - s], channels[7 - s]
        total += conv(8, below, here) + bn(here) + blocks(here + before[s], here, layers[7 - s])
    with torch.device("meta"):
        assert count(SpUNet(6, 20)) == total + 96 * 20 + 20


def encoder(c_in, widths, residual):
    def unit(c):
        pair = 2 * (conv(27, c, c) + c + bn(c))  # residual blocks have biases
        return pair if residual else conv(27, c, c) + bn(c)

    total = conv(27, c_in, widths[0]) + bn(widths[0]) + unit(widths[0]) * (2 if residual else 1)
    for a, b in pairwise(widths[:4]):
        total += conv(27, a, b) + bn(b) + 2 * unit(b)
    return total + conv(3, widths[3], widths[4]) + bn(widths[4])


def test_parameters_of_the_detectors_encoders():
    with torch.device("meta"):
        second, residual = SecondEncoder(4, (41, 1600, 1408)), VoxelResBackBone8x(5, (41, 1440, 1440))
    assert count(second) == encoder(4, (16, 32, 64, 64, 128), False)
    assert count(residual) == encoder(5, (16, 32, 64, 128, 128), True)
    assert second.out_shape == (2, 200, 176)
    assert residual.out_shape == (2, 180, 180)


def test_parameters_of_the_others():
    assert count(PointEmbedding(6, 32)) == conv(125, 6, 32) + bn(32)
    assert count(ConditionalPositionalEncoding(32)) == conv(27, 32, 32) + 32 + conv(1, 32, 32) + 32 + bn(32)

    def block(c):
        return (conv(125, 1, c) + c) + bn(c) + (4 * c * c + 4 * c) + (4 * c * c + c) + c

    widths = (8, 16, 24)
    total = conv(27, 4, 8) + 8 + bn(8) + bn(8) + 8 * 5 + 5 + sum(2 * block(c) for c in widths)
    for a, b in pairwise(widths):
        total += bn(a) + conv(8, a, b) + b + conv(8, b, a) + a + 2 * a * a + a + block(a)
    assert count(ConvNeXtUNet(4, 5, channels=widths, blocks=(2, 2, 2))) == total


# ---- that they run, learn, and keep to their voxels

SMALL = {
    "minkunet14": lambda: MinkUNet(3, 5, variant="14", planes=(4,) * 8, init_channels=4),
    "minkunet50": lambda: MinkUNet(3, 5, variant="50", planes=(2,) * 8, init_channels=4),
    "spunet": lambda: SpUNet(3, 5, base_channels=4, channels=(4,) * 8, layers=(1,) * 8),
    "convnext": lambda: ConvNeXtUNet(3, 5, channels=(4, 8), blocks=(1, 1), layer_scale=0.1),
    "stem": lambda: PointEmbedding(3, 5),
    "cpe": lambda: sc.nn.Sequential(PointEmbedding(3, 5), ConditionalPositionalEncoding(5)),
}


@pytest.mark.parametrize("name", SMALL)
def test_segmenting_networks(name):
    torch.manual_seed(0)
    net, x = SMALL[name](), scene(200, 12)
    y = net(x)
    assert y.grid is x.grid
    assert y.channels == 5
    y.features.square().sum().backward()
    still = [n for n, p in net.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert still == []
    empty = sc.SparseTensor(sc.VoxelGrid(torch.zeros(0, 4).int(), 1), torch.zeros(0, 3))
    assert net(empty).features.shape == (0, 5)


@pytest.mark.parametrize("name", [*SMALL, "resnet", "second"])
def test_inference_in_fewer_calls_gives_the_same(name):
    """Without gradients convolutions, norms and activations run as one; the numbers stay."""
    others = {
        "resnet": lambda: ResNet(3, 4, depth=50, planes=(4, 4, 4, 4)),
        "second": lambda: SecondEncoder(3, (41, 24, 24)),
    }
    net, x = randomised((SMALL | others)[name]()), scene(200, 24)
    want = net(x)
    with torch.no_grad():
        got = net(x)
    if isinstance(want, sc.SparseTensor):
        assert torch.equal(got.grid.coords, want.grid.coords)
        want, got = want.features, got.features
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [14, 50])
def test_classifying_networks(depth):
    torch.manual_seed(0)
    x = scene(300, 200)
    net = ResNet(3, 4, depth=depth, planes=(4, 4, 4, 4))
    y = net(x)
    assert y.shape == (2, 4)
    y.sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert SpUNet(3, 4, channels=(4,) * 4, layers=(1,) * 4, base_channels=4, cls_mode=True)(x).shape == (2, 4)


def test_strides_as_minkowskis_lead_to_floored_voxels():
    x = scene(50, 9)
    coarse = coarsened(x.grid, 2)
    assert coarse is coarsened(x.grid, 2)
    floored = {(b, a // 2, c // 2, d // 2) for b, a, c, d in x.grid.coords.tolist()}
    assert {tuple(c) for c in coarse.coords.tolist()} == floored
    net = ResNet(3, 4, depth=14, planes=(4, 4, 4, 4))
    assert net.conv1(x).grid is coarse


@pytest.mark.parametrize("kind", [SecondEncoder, VoxelResBackBone8x])
def test_encoders_stay_within_their_shapes(kind):
    shape = (41, 40, 32)
    net = kind(3, shape)
    x = scene(500, shape=shape)
    levels = net.levels(x)
    assert [t.channels for t in levels] == [16, 32, 64, 64 if kind is SecondEncoder else 128, 128]
    for tensor, box in zip(levels, [(41, 40, 32), (21, 20, 16), (11, 10, 8), (5, 5, 4), (2, 5, 4)]):
        assert sc.IndexRange.of_shape(box).encloses(tensor.grid.extent)
    assert net.to_bev(levels[-1]).shape == (2, 128 * 2, 5, 4)


# ---- public names, against modules that spconv's users would write


def as_spconv(net, prefix, back=()):
    """The weights of a network of ours as a public checkpoint of its family would hold them."""
    state, _ = convert_state(
        net.state_dict(),
        "sparseconv",
        "spconv",
        kernel_sizes={key: (3, 1, 1) for key in net.state_dict() if key == "conv_out.0.weight"},
    )
    renamed = {}
    for key, value in state.items():
        for old, new in back:
            key = key.replace(old, new)
        renamed[prefix + key] = value
    return renamed


TO_BN = ((".norm1.", ".bn1."), (".norm2.", ".bn2."), (".downsample.", ".proj."))


def spconv_unit(c, norm):
    return spconv.SparseSequential(spconv.SubMConv3d(c, c, 3, padding=1, bias=False), norm(c), torch.nn.ReLU())


def test_second_from_openpcdets_and_mmdet3ds_names():
    """The same layers by hand in spconv's namespace give the same bird's eye view."""
    shape = (41, 40, 32)
    ours = randomised(SecondEncoder(3, shape))
    public = as_spconv(ours, "module.backbone_3d.")
    public["module.dense_head.conv.weight"] = torch.zeros(2, 2, 1, 1)

    def norm(c):
        return torch.nn.BatchNorm1d(c, eps=1e-3)

    def down(a, b, padding):
        return spconv.SparseSequential(spconv.SparseConv3d(a, b, 3, 2, padding, bias=False), norm(b), torch.nn.ReLU())

    S = spconv.SparseSequential
    stem = S(spconv.SubMConv3d(3, 16, 3, padding=1, bias=False), norm(16), torch.nn.ReLU())
    last = S(spconv.SparseConv3d(64, 128, (3, 1, 1), (2, 1, 1), bias=False), norm(128), torch.nn.ReLU())
    theirs = S(
        conv_input=stem,
        conv1=S(spconv_unit(16, norm)),
        conv2=S(down(16, 32, 1), spconv_unit(32, norm), spconv_unit(32, norm)),
        conv3=S(down(32, 64, 1), spconv_unit(64, norm), spconv_unit(64, norm)),
        conv4=S(down(64, 64, (0, 1, 1)), spconv_unit(64, norm), spconv_unit(64, norm)),
        conv_out=last,
    ).eval()
    theirs.load_state_dict(
        {k.removeprefix("module.backbone_3d."): v for k, v in public.items() if "backbone" in k}, strict=True
    )
    x = scene(600, shape=shape)
    fresh = SecondEncoder(3, shape).eval()
    report = load_published(fresh, public, "openpcdet/second")
    assert report.convolutions == 12
    want = theirs(spconv.SparseConvTensor.from_sparse_tensor(x, shape)).dense().flatten(1, 2)
    torch.testing.assert_close(fresh.to_bev(fresh(x)), want, atol=1e-4, rtol=1e-4)
    mm = {
        "middle_encoder."
        + (f"encoder_layers.encoder_layer{k[4]}{k[5:]}" if k[:4] == "conv" and k[4].isdigit() else k): v
        for k, v in as_spconv(ours, "").items()
    }
    fresh = SecondEncoder(3, shape).eval()
    load_published(fresh, mm, "mmdet3d/second")
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), ours.state_dict().values()))


def test_residual_encoder_from_its_public_names():
    shape = (41, 40, 32)
    ours = randomised(VoxelResBackBone8x(3, shape))
    public = as_spconv(ours, "backbone_3d.", TO_BN)
    det3d = {}
    for key, value in as_spconv(ours, "", TO_BN).items():
        for level in "234":
            if key.startswith(f"conv{level}."):
                place, rest = key[6], key[8:]
                key = f"conv{level}.{rest}" if place == "0" else f"conv{level}.{int(place) + 2}.{rest}"
        det3d["backbone." + key.replace("conv_out", "extra_conv")] = value
    assert "backbone.conv2.3.bn1.weight" in det3d
    for state, name in ((public, "openpcdet/voxelres"), (det3d, "det3d/centerpoint")):
        fresh = VoxelResBackBone8x(3, shape)
        load_published(fresh, state, name)
        for key, value in ours.state_dict().items():
            assert torch.equal(fresh.state_dict()[key], value), (name, key)


def test_spunet_from_pointcepts_names():
    size = {"base_channels": 4, "channels": (4, 6, 8, 8, 8, 6, 4, 6), "layers": (1, 1, 2, 1, 1, 1, 1, 2)}
    ours = randomised(SpUNet(3, 5, **size))
    public = as_spconv(ours, "module.backbone.", TO_BN)
    assert "module.backbone.dec.0.block0.proj.0.weight" in public
    fresh = SpUNet(3, 5, **size).eval()
    load_published(fresh, public, "pointcept/spunet")
    x = scene(200, 12)
    assert torch.equal(fresh(x).features, ours(x).features)


def test_minkunet_and_resnet_from_minkowskis_names():
    for ours, name, kernels in (
        (MinkUNet(3, 5, variant="14", planes=(4, 4, 4, 4, 4, 6, 4, 6), init_channels=4), "minkowski/minkunet", {}),
        (ResNet(3, 4, depth=14, planes=(4, 4, 4, 6)), "minkowski/resnet", {}),
    ):
        randomised(ours)
        public, _ = convert_state(ours.state_dict(), "sparseconv", "minkowski", kernel_sizes=kernels)
        first = "conv0p1s1" if name.endswith("unet") else "conv1"
        assert public[f"{first}.kernel"].shape[0] == 125
        assert any(".norm1.bn.running_mean" in key for key in public)
        before = {k: v.clone() for k, v in ours.state_dict().items()}
        for p in ours.parameters():
            torch.nn.init.zeros_(p)
        load_published(ours, public, name)
        assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())


def test_point_transformers_parts_from_their_names():
    stem, cpe = randomised(PointEmbedding(3, 4)), randomised(ConditionalPositionalEncoding(4))
    public = as_spconv(stem, "module.backbone.embedding.")
    public |= as_spconv(cpe, "module.backbone.enc.enc0.block0.")
    public["module.backbone.enc.enc0.block0.norm1.0.weight"] = torch.zeros(4)
    for ours, name in (
        (PointEmbedding(3, 4), "pointcept/ptv3-stem"),
        (ConditionalPositionalEncoding(4), "pointcept/ptv3-cpe"),
    ):
        load_published(ours, public, name)
        want = (stem if name.endswith("stem") else cpe).state_dict()
        assert all(torch.equal(v, want[k]) for k, v in ours.state_dict().items())


def public_names():
    """A checkpoint of each family, under names that projects give their models; the network that it is of."""
    shape = (41, 40, 32)
    second, residual = SecondEncoder(3, shape), VoxelResBackBone8x(3, shape)
    spunet = SpUNet(3, 5, base_channels=4, channels=(4,) * 8, layers=(2,) * 8)
    yield "openpcdet/second", "module.backbone_3d.", as_spconv(second, "module.backbone_3d."), SecondEncoder(3, shape)
    layers = [(f"conv{n}.", f"encoder_layers.encoder_layer{n}.") for n in range(1, 5)]
    yield "mmdet3d/second", "middle_encoder.", as_spconv(second, "middle_encoder.", layers), SecondEncoder(3, shape)
    yield "openpcdet/voxelres", "", as_spconv(residual, "", TO_BN), VoxelResBackBone8x(3, shape)
    yield "pointcept/spunet", "module.net.", as_spconv(spunet, "module.net.", TO_BN), None
    for variant in ("m1", "m2", "m3"):
        heads = {"enc_channels": (12, 24), "enc_num_head": (1, 2), "dec_channels": (12,), "dec_num_head": (1,)}
        sizes = {"enc_depths": (1, 1), "enc_patch_size": (8, 8), "dec_depths": (1,), "dec_patch_size": (8,)}
        extra = {} if variant == "m1" else {"layer_scale": 0.1, "mask_token": True}
        options = {"variant": variant, "stride": (2,), "enable_rpe": variant == "m1", **heads, **sizes, **extra}
        state = as_spconv(PointTransformerV3(3, **options), "student.backbone.")
        yield "pointcept/ptv3", "student.backbone.", state, PointTransformerV3(3, **options)
    tiny = MinkUNet(3, 5, variant="50", planes=(2,) * 8, init_channels=4), ResNet(3, 4, depth=50, planes=(4, 4, 4, 6))
    for name, net in zip(("minkunet", "resnet"), tiny):
        yield f"minkowski/{name}", "", convert_state(net.state_dict(), "sparseconv", "minkowski")[0], None


def test_families_are_told_by_their_keys():
    for name, prefix, state, fresh in public_names():
        state["head.weight" if prefix else "num_batches_tracked_elsewhere"] = torch.zeros(2, 2)
        if not prefix:
            with pytest.raises(ValueError, match="of no family there is"):  # a key that no such network has
                published_family(state)
            state.popitem()
        assert published_family(state) == (name, prefix)
        if fresh is not None:
            load_published(fresh, state)
    residual = as_spconv(VoxelResBackBone8x(3, (41, 40, 32)), "backbone.", TO_BN)
    for key in ("backbone.conv5.0.0.weight", "backbone.conv1.1.conv_imp.weight"):  # VoxelNeXt, Focals Conv
        with pytest.raises(ValueError, match=r"of no family there is.*backbone\.conv_input"):
            published_family(residual | {key: torch.zeros(1)})


def test_wrong_families_and_prefixes_are_named():
    net = SpUNet(3, 5, base_channels=4, channels=(4,) * 8, layers=(1,) * 8)
    public = as_spconv(net, "backbone.", TO_BN)
    with pytest.raises(ValueError, match="no family"):
        load_published(net, public, "pointcept/unet")
    with pytest.raises(ValueError, match=r"no key begins with 'encoder\.'.*backbone.conv_input"):
        load_published(net, public, "pointcept/spunet", prefix="encoder.")
    public.pop("backbone.final.bias")
    with pytest.raises(ValueError, match=r"1 missing: final.bias \(5,\)"):
        load_published(net, public, "pointcept/spunet")
    with pytest.raises(ValueError, match="variant must be one of"):
        MinkUNet(3, 5, variant="34E")
    with pytest.raises(ValueError, match="depth must be one of"):
        ResNet(3, 5, depth=20)
