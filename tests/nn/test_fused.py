"""The fused kernel against its plain twin, and against finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from helpers.operations import Operations
from moetta.nn import fused

NAMES = ["x", "weight", "bias", "expert_weight", "expert_bias", "router_weight", "router_bias"]
TRAINED = [0, 3, 4, 5, 6]


def arguments(shape=(4, 5, 6), experts=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    d = shape[-1]
    sizes = [shape, (d,), (d,), (experts, d), (experts, d), (experts, d), (experts,)]
    made = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    for position in TRAINED:
        made[position].requires_grad_(True)
    return made


def gradients(function, args, *options):
    y, p, index = function(*args, 1e-6, *options)
    generator = torch.Generator().manual_seed(9)
    pull_y = torch.randn(y.shape, generator=generator).to(y.dtype)
    pull_p = torch.randn(p.shape, generator=generator).to(p.dtype)
    loss = (y * pull_y).sum() + (p * pull_p).sum()
    return y, p, index, torch.autograd.grad(loss, [args[i] for i in TRAINED])


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 3, 2, 6), (1, 1, 6)])
@pytest.mark.parametrize(
    "options", [(1, False, True), (2, False, True), (2, True, True), (3, False, False)]
)
def test_equals_the_plain_twin(shape, options):
    args = arguments(shape)
    ours = gradients(fused.moe_layer_norm, args, *options)
    twin = gradients(fused.moe_layer_norm_reference, args, *options)
    for a, b in zip(ours[:3], twin[:3], strict=True):
        torch.testing.assert_close(a, b)
    for name, a, b in zip([NAMES[i] for i in TRAINED], ours[3], twin[3], strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "shape", [(1, 6), (4, 6), (1, 5, 6), (4, 5, 6), (1, 3, 2, 6), (4, 3, 2, 6)]
)
@pytest.mark.parametrize("options", [(1, False), (1, True), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient_the_numbers_are_the_same(shape, options, mode):
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        args = arguments(shape, dtype=dtype)
        before = [a.detach().clone() for a in args]
        y, p, index = fused.moe_layer_norm(*args, 1e-6, *options)
        with mode():
            fast = fused.moe_layer_norm(*args, 1e-6, *options)
        torch.testing.assert_close(fast[0], y.detach(), atol=close, rtol=close)
        torch.testing.assert_close(fast[1], p.detach(), atol=close, rtol=close)
        assert torch.equal(fast[2], index)
        assert all(map(torch.equal, args, before)), "an argument was written to"


def test_without_gradient_equal_scores_choose_the_same_expert():
    x, weight, bias, expert_weight, expert_bias, router_weight, router_bias = arguments((3, 5, 6))
    router_weight, router_bias = torch.zeros_like(router_weight), torch.zeros_like(router_bias)
    args = x, weight, bias, expert_weight, expert_bias, router_weight, router_bias
    y, _, index = fused.moe_layer_norm(*args, 1e-6)
    with torch.no_grad():
        fast, _, same = fused.moe_layer_norm(*args, 1e-6)
    assert torch.equal(index, same)
    torch.testing.assert_close(fast, y.detach())


@pytest.mark.parametrize("images", [1, 3])
def test_without_gradient_half_precision_is_kept(images):
    args = arguments((images, 5, 8), dtype=torch.float32)
    args[0] = args[0].detach().to(torch.bfloat16)
    with torch.no_grad():
        alone = fused.moe_layer_norm(*args, 1e-6)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            within = fused.moe_layer_norm(*args, 1e-6)[0]
    assert alone.dtype == within.dtype == torch.bfloat16
    assert torch.equal(alone, within)
    learning = fused.moe_layer_norm(*args, 1e-6)[0].detach()
    torch.testing.assert_close(alone, learning, atol=0.02, rtol=0.02)


@pytest.fixture
def compiled():
    """The kernel as a compiler is given it, run without the need of one."""
    dynamo = pytest.importorskip("torch._dynamo")
    if not dynamo.is_dynamo_supported():
        pytest.skip("torch.compile is not supported here")
    yield torch.compile(fused.moe_layer_norm, backend="aot_eager", fullgraph=True)
    dynamo.reset()


@pytest.mark.parametrize("options", [(1, False, True), (2, True, False)])
def test_compiled_it_equals_the_plain_twin_at_every_batch_size(options, compiled):
    for shape in [(4, 37, 6), (3, 37, 6), (4, 32, 6), (4, 6)]:
        args = arguments(shape)
        ours = gradients(compiled, args, *options)
        twin = gradients(fused.moe_layer_norm_reference, args, *options)
        torch.testing.assert_close(ours, twin)


def test_gradcheck():
    # Without the straight-through path: there value and gradient differ on purpose.
    args = arguments((3, 4, 5))

    def f(*changing):
        full = list(args)
        for position, tensor in zip(TRAINED, changing, strict=True):
            full[position] = tensor
        return fused.moe_layer_norm(*full, 1e-6, 2, True, False)[:2]

    assert gradcheck(f, [args[i] for i in TRAINED])


def test_gradcheck_of_the_sample_affine_norm():
    x, gamma, beta = (torch.randn(s, dtype=torch.float64) for s in [(3, 4, 5), (3, 5), (3, 5)])
    inputs = [t.requires_grad_(True) for t in (x, gamma, beta)]
    assert gradcheck(lambda *t: fused.sample_affine_layer_norm(*t, 1e-6), inputs)


def test_straight_through_router_gradient_by_hand():
    # (dL/dgamma . G_k + dL/dbeta . B_k) * grad log p_k, for one sample and one token.
    x, w, b, ew, eb, rw, rb = arguments((1, 1, 4), experts=2)
    y, p, index = fused.moe_layer_norm(x, w, b, ew, eb, rw, rb, 1e-6)
    (got,) = torch.autograd.grad(y.sum(), rb)
    k = index.item()
    normalised = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, unbiased=False, keepdim=True) + 1e-6
    ).sqrt()
    pull = (normalised.flatten() * ew[k] + eb[k]).sum()
    grad_log = torch.nn.functional.one_hot(torch.tensor(k), 2) - p[0]
    torch.testing.assert_close(got, pull * grad_log)


def test_zero_experts_give_the_native_layer_norm():
    x, w, b, ew, _, rw, rb = arguments((4, 7, 16), dtype=torch.float32)
    zero = torch.zeros_like(ew)
    y, _, _ = fused.moe_layer_norm(x, w, b, zero, zero, rw, rb, 1e-6)
    native = torch.nn.functional.layer_norm(x, (16,), w, b, 1e-6)
    torch.testing.assert_close(y, native, atol=2e-6, rtol=1e-5)


def test_router_gets_no_entropy_gradient_from_zero_experts():
    x, w, b, ew, eb, rw, rb = arguments()
    zero_w, zero_b = (torch.zeros_like(t).requires_grad_() for t in (ew, eb))
    y, _, _ = fused.moe_layer_norm(x, w, b, zero_w, zero_b, rw, rb, 1e-6)
    (router, experts) = torch.autograd.grad((y**2).sum(), [rw, zero_w])
    assert router.abs().max() == 0
    assert experts.abs().max() > 0


def test_no_input_gradient_is_computed_where_none_is_wanted():
    wanted = arguments()
    unwanted = [wanted[0].detach(), *wanted[1:]]
    grads, operations = [], []
    for args in (wanted, unwanted):
        y, _, _ = fused.moe_layer_norm(*args, 1e-6)
        with Operations() as counted:
            grads.append(torch.autograd.grad((y**2).sum(), [args[i] for i in TRAINED[1:]]))
        operations.append(counted.count)
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    assert operations[1] < operations[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_normalised_in_float32(dtype):
    args = arguments((4, 9, 32), dtype=torch.float32)
    low = [args[0].detach().to(dtype).requires_grad_(), *args[1:]]
    exact = [low[0].detach().float().requires_grad_(), *args[1:]]
    ours, twin = gradients(fused.moe_layer_norm, low), gradients(fused.moe_layer_norm, exact)
    assert ours[0].dtype == dtype
    torch.testing.assert_close(ours[0].float(), twin[0], atol=0.05, rtol=0.02)
    torch.testing.assert_close(ours[3][1], twin[3][1], atol=0.3, rtol=0.05)
    assert torch.equal(ours[2], twin[2])


def test_memory_kept_for_backward_is_the_input_and_row_statistics():
    args = arguments((8, 50, 64), dtype=torch.float32)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fused.moe_layer_norm(*args, 1e-6)
    own = {t.untyped_storage().data_ptr() for t in args}
    beyond_arguments = sum(size for pointer, size in kept.items() if pointer not in own)
    assert beyond_arguments < args[0].numel() * 4 / 5


@given(
    shift=st.floats(-1e3, 1e3),
    scale=st.sampled_from([0.0, 1e-8, 1.0, 1e4]),
    batch=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_finite_input_gives_finite_output_and_gradient(shift, scale, batch):
    args = arguments((batch, 3, 8), dtype=torch.float32)
    args[0] = (args[0].detach() * scale + shift).requires_grad_()
    y, p, _, grads = gradients(fused.moe_layer_norm, args)
    assert all(t.isfinite().all() for t in (y, p, *grads))
