import copy
import inspect
import io
import pickle

import pytest
import torch
from comparison import METHODS, SHARINGS, assert_close, outputs_and_gradients
from model_cases import (
    CAUSAL,
    CHANNELS,
    ENCODERS,
    SIZES,
    STACKS,
    C,
    K,
    N,
    R,
    by_name,
    holes,
    inputs,
    make_stack,
    prepare,
    run,
)
from safetensors.torch import load_model, save_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from linformers import Linformer
from linformers.models.options import StackOptions
from linformers.projections.base import Projection

# Law 1: identity projections are full attention


def with_same_weights(options, identity):
    """A stack with full attention, and ``identity``, a stack that must equal it."""
    full = make_stack(options | {"attention": "full"})
    missing, unexpected = identity.load_state_dict(full.state_dict(), strict=False)
    assert all("projection" in name for name in missing)
    assert not unexpected
    return full, dict(full.named_parameters())


def compare_with_full(full, own, stack, x, mask=None):
    results, real = [], 1.0 if mask is None else mask[..., None].double()
    for model in (stack, full):
        parameters = {name: model.get_parameter(name) for name in own}
        results.append(outputs_and_gradients(lambda model=model: [real * model(x, mask)], {"x": x}, parameters))
    assert_close(*results)


BOTH = {
    "plain": {},
    "pre-norm, local kernel": {"norm": "pre", "local_kernel": 3},
    "rotary, one kv head": {"rotary": True, "dim_d": 6, "one_kv_head": True},
    "biases": {"qkv_bias": True},
}


@pytest.mark.parametrize("options", **by_name(BOTH))
@pytest.mark.parametrize("sharing", SHARINGS)
def test_identity_matrix_is_full_attention(sharing, options):
    stack = make_stack(options | {"dim_k": N, "parameter_sharing": sharing})
    with torch.no_grad():
        for module in stack.modules():
            if isinstance(module, Projection):
                module.weight.copy_(torch.eye(N).repeat(1, module.count))
    full, own = with_same_weights(options, stack)
    compare_with_full(full, own, stack, inputs(2, N))


@pytest.mark.parametrize("options", **by_name(BOTH))
@pytest.mark.parametrize("length", [1, 4, N])
def test_a_mean_for_each_position_is_full_attention_at_every_length(length, options):
    stack = make_stack(options | {"dim_k": N, "method": "mean"})
    full, own = with_same_weights(options, stack)
    mask = torch.arange(length) < torch.tensor([[length], [max(1, length - 2)]])
    compare_with_full(full, own, stack, inputs(2, length), mask)


@pytest.mark.parametrize("options", **by_name(BOTH))
@pytest.mark.parametrize("sharing", SHARINGS)
def test_identity_in_every_block_is_causal_full_attention(sharing, options):
    causal = options | {"causal": True}
    stack = make_stack(causal | {"dim_k": N, "block_size": C, "parameter_sharing": sharing})
    with torch.no_grad():
        for module in stack.modules():
            if isinstance(module, Projection):
                module.weight.copy_(torch.eye(C).repeat(1, module.count))
    full, own = with_same_weights(causal, stack)
    for length in (N, N - 2, C, 1):
        compare_with_full(full, own, stack, inputs(2, length))
    mask = torch.arange(N) >= torch.tensor([[0], [4]])  # left padding
    compare_with_full(full, own, stack, inputs(2, N), mask)


def test_window_over_everything_is_full_attention():
    stack = make_stack({"attention": "local", "local_window": N})
    full, own = with_same_weights({}, stack)
    compare_with_full(full, own, stack, inputs(2, N - 2), holes(2, N - 2))


# Law 2: padding


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_trailing_padding_equals_trimming(options):
    stack, x = make_stack(options), inputs(2, N)
    for length in (1, 8, N - 1):
        mask = (torch.arange(N) < length).expand(2, -1)
        short = x[:, :length].detach().requires_grad_()
        assert_close(run(stack, x, mask), run_trimmed(stack, short, N))


def run_trimmed(stack, short, n):
    """The trimmed input, with its output and gradient filled up with zeros, so that the same sums are compared."""
    gap = n - short.shape[1]

    def forward():
        return [torch.nn.functional.pad(stack(short), (0, 0, 0, gap))]

    found = outputs_and_gradients(forward, {"x": short}, dict(stack.named_parameters()))
    found["gradient of x"] = torch.nn.functional.pad(found["gradient of x"], (0, 0, 0, gap))
    return found


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_rows_of_different_lengths_equal_each_alone(options):
    stack, x = make_stack(options).eval(), inputs(3, N)
    lengths = [N, 5, 10]
    mask = torch.arange(N) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        together = stack(x, mask)
        for row, length in enumerate(lengths):
            alone = stack(x[row : row + 1, :length])
            torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("content", [float("nan"), 1e30])
@pytest.mark.parametrize("options", **by_name(STACKS))
def test_masked_content_has_no_influence(options, content):
    stack, x, mask = make_stack(options), inputs(3, 17), holes(3, 17)
    mask[2] = False  # a row of nothing
    expected = run(stack, x, mask)
    spoiled = x.detach().masked_fill(~mask[..., None], content).requires_grad_()
    found = run(stack, spoiled, mask)
    assert_close(found, expected, rtol=0, atol=0)
    assert not found["gradient of x"][~mask].any()
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_outputs_at_masked_positions_are_finite(options):
    """They mean nothing, but a NaN there would spoil the gradients of a loss that multiplies them by zero."""
    stack, x, mask = make_stack(options), inputs(3, 17), holes(3, 17)
    mask[2] = False
    x = x.detach().masked_fill(~mask[..., None], float("nan"))
    y = stack(x, mask)
    assert y.isfinite().all()
    (y * mask[..., None]).sum().backward()
    assert all(p.grad.isfinite().all() for p in stack.parameters() if p.grad is not None)


@pytest.mark.parametrize("options", **by_name(CAUSAL))
def test_left_padding_of_a_causal_stack_is_exact(options):
    stack, length = make_stack(options), 10
    short = inputs(2, length)
    expected = run(stack, short)
    for left in (1, 2, 7, N - length):
        for right in {0, N - length - left}:
            x = torch.nn.functional.pad(short.detach(), (0, 0, left, right), value=float("nan")).requires_grad_()
            mask = torch.zeros(2, left + length + right, dtype=torch.bool)
            mask[:, left : left + length] = True

            def forward(x=x, mask=mask, left=left):
                return [stack(x, mask)[:, left : left + length]]

            found = outputs_and_gradients(forward, {"x": x}, dict(stack.named_parameters()))
            found["gradient of x"] = found["gradient of x"][:, left : left + length]
            assert_close(found, expected)


@pytest.mark.parametrize("options", **by_name({"causal": CAUSAL["plain"], "full": CAUSAL["full"]}))
def test_weights_of_left_padded_rows_belong_to_their_tokens(options):
    stack, x = make_stack(options), inputs(1, 10)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    mask = (torch.arange(13) >= 3)[None]
    _, expected = stack(x, need_weights=True)
    _, weights = stack(padded, mask, need_weights=True)
    for found, alone in zip(weights, expected, strict=True):
        found = found[:, :, 3:]
        torch.testing.assert_close(found if found.shape == alone.shape else found[..., 3:], alone)


# Law 3: lengths


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_every_length_up_to_the_maximum_works(options):
    stack = make_stack(options)
    for length in range(1, N + 1):
        x = inputs(1, length)
        y = stack(x)
        assert y.shape == x.shape
        assert y.isfinite().all()


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_longer_inputs_and_empty_ones_are_errors_and_empty_batches_are_not(options):
    stack = make_stack(options)
    with pytest.raises(ValueError, match=rf"sequence of {N + 1}, .* at most input_size={N}; .*"):
        stack(inputs(1, N + 1))
    with pytest.raises(ValueError, match="empty sequence"):
        stack(inputs(2, 0))
    with pytest.raises(ValueError, match="empty sequence"):
        stack(inputs(2, 0), torch.zeros(2, 0, dtype=torch.bool))
    assert stack(inputs(0, 5)).shape == (0, 5, CHANNELS)
    assert stack(inputs(0, N), torch.zeros(0, N, dtype=torch.bool)).shape == (0, N, CHANNELS)


# Law 4: causality and decoding


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("options", **by_name(CAUSAL))
def test_no_output_depends_on_a_later_input(options, masked):
    stack, x = make_stack(options), inputs(1, N)
    mask = holes(1, N) if masked else None
    y = stack(x, mask)
    for t in range(N):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert not gradient[0, t + 1 :].any(), t


def test_the_gradient_sees_an_encoder_look_ahead():
    x = inputs(1, N)
    (gradient,) = torch.autograd.grad(make_stack({})(x)[0, 0, 0], x)
    assert gradient[0, -1].any()


def parallel_and_state(stack, x, prompt):
    state = stack.new_state(x.shape[0])
    with torch.no_grad():
        expected = stack(x)
        if prompt:
            found = stack(x[:, :prompt], state=state)
            torch.testing.assert_close(found, expected[:, :prompt], rtol=1e-10, atol=1e-10)
    return expected, state


@pytest.mark.parametrize("options", **by_name(CAUSAL))
def test_decoding_from_every_prompt_equals_the_parallel_pass(options):
    stack, x = make_stack(options).eval(), inputs(2, N)
    for prompt in (0, 1, 5, 6, 7, 9, N - 1):
        expected, state = parallel_and_state(stack, x, prompt)
        with torch.no_grad():
            steps = [stack.step(x[:, t : t + 1], state) for t in range(prompt, N)]
        torch.testing.assert_close(torch.cat(steps, 1), expected[:, prompt:], rtol=1e-10, atol=1e-10)
        assert state.length.tolist() == [N, N]


@pytest.mark.parametrize("options", **by_name({name: CAUSAL[name] for name in ("plain", "mean", "local kernel")}))
def test_decoding_in_float32_stays_within_its_precision(options):
    stack, x = make_stack(options).float().eval(), inputs(2, N).float()
    state = stack.new_state(2)
    with torch.no_grad():
        steps = torch.cat([stack.step(x[:, t : t + 1], state) for t in range(N)], 1)
        torch.testing.assert_close(steps, stack(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", **by_name(CAUSAL))
def test_decoding_ragged_prompts_with_pauses_equals_each_row_alone(options, side):
    stack, x = make_stack(options).eval(), inputs(4, N)
    lengths = torch.tensor([13, 1, 6, 8])
    longest = int(lengths.max())
    expected = stack(x).detach()
    prompt, mask = torch.full((4, longest, CHANNELS), float("nan"), dtype=torch.float64), torch.zeros(4, longest).bool()
    for row, length in enumerate(lengths.tolist()):
        start = longest - length if side == "left" else 0
        prompt[row, start : start + length] = x[row, :length]
        mask[row, start : start + length] = True
    state = stack.new_state(4)
    with torch.no_grad():
        found = stack(prompt, mask, state=state)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(found[row, mask[row]], expected[row, :length], rtol=1e-10, atol=1e-10)
        position, rows = lengths.clone(), torch.arange(4)
        for going in torch.rand(40, 4) < 0.6:
            keep = going & (position < N)
            at = position.clamp(max=N - 1)
            out = stack.step(x[rows, at][:, None], state, keep)
            torch.testing.assert_close(out[keep, 0], expected[rows, at][keep], rtol=1e-10, atol=1e-10)
            position = position + keep
    assert torch.equal(state.length, position)
    assert (position > lengths).all()


def test_steps_past_the_end_are_an_error():
    stack, x = make_stack(CAUSAL["plain"]).eval(), inputs(2, N)
    state = stack.new_state(2)
    stack(x, state=state)
    with pytest.raises(ValueError, match=f"past position {N}, .*input_size"):
        stack.step(x[:, :1], state)
    nobody = torch.zeros(2, dtype=torch.bool)
    assert stack.step(x[:, :1], state, nobody).shape == (2, 1, CHANNELS)


@pytest.mark.parametrize("options", **by_name(CAUSAL))
def test_a_prompt_with_holes_is_continued_exactly(options):
    stack, x, length = make_stack(options).eval(), inputs(3, N), 11
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[0, 1] = mask[0, 5:8] = mask[1, 3:6] = mask[1, 8:] = mask[2, 9] = False  # one block and more, and a shorter row
    state = stack.new_state(3)
    with torch.no_grad():
        stack(x[:, :length], mask[:, :length], state=state)
        assert state.length.tolist() == [11, 8, 11]
        seen = x.clone()
        seen[1, 8 : N - 3] = x[1, 11:]  # the shorter row goes on where it ended
        whole = mask.clone()
        whole[1, 8 : N - 3] = True
        expected = stack(seen, whole)
        for t in range(length, N):
            found = stack.step(x[:, t : t + 1], state)[:, 0]
            for row, at in enumerate((t, t - 3, t)):
                torch.testing.assert_close(found[row], expected[row, at], rtol=1e-10, atol=1e-10)


def test_encoders_cannot_decode():
    with pytest.raises(ValueError, match="causal=True"):
        make_stack({}).new_state(1)


# Law 5: sharing


def distinct_projections(model):
    return sum(module.count for module in model.modules() if isinstance(module, Projection))


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize(("nhead", "kv_heads"), [(2, 2), (6, 3), (3, 1)])
@pytest.mark.parametrize(("sharing", "count"), [("none", "2Lh"), ("headwise", "2L"), ("kv", "L"), ("layerwise", "1")])
def test_number_of_distinct_projections(sharing, count, nhead, kv_heads, causal, tmp_path):
    depth, k, rows = 5, (K if causal else 7), (C if causal else N)
    columns = R if causal else k
    options = {"causal": True, "block_size": C} if causal else {}
    options |= {"nhead": nhead, "kv_heads": kv_heads, "dim_d": 3, "depth": depth, "parameter_sharing": sharing}
    model = Linformer(N, CHANNELS, k, **options)
    expected = {"2Lh": 2 * depth * kv_heads, "2L": 2 * depth, "L": depth, "1": 1}[count]
    assert distinct_projections(model) == expected
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if "projection" in name]
    assert len(names) == len(set(names)) == (1 if sharing == "layerwise" else depth)
    numbers = sum(p.numel() for name, p in model.named_parameters() if "projection" in name)
    assert numbers == expected * rows * columns
    assert sum(v.numel() for name, v in model.state_dict().items() if "projection" in name) == numbers
    save_model(model, tmp_path / "model.safetensors")
    again = Linformer(N, CHANNELS, k, **options)
    assert load_model(again, tmp_path / "model.safetensors") == (set(), [])
    x = torch.randn(1, N, CHANNELS)
    assert torch.equal(model.eval()(x), again.eval()(x))


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("sizes", [{"dim_k": [7, 3, 5]}, {"dim_k": 7, "k_reduce_by_layer": 2}], ids=["list", "falling"])
def test_layers_have_their_own_k(sizes, sharing):
    model = make_stack(sizes | {"depth": 3, "parameter_sharing": sharing})
    expected = [7, 3, 5] if isinstance(sizes["dim_k"], list) else [7, 5, 3]
    _, weights = model(inputs(2, N), need_weights=True)
    assert [w.shape for w in weights] == [(2, 2, N, k) for k in expected]
    if sharing == "layerwise":
        assert model.projection.weight.shape == (N, 7)
    else:
        assert [layer.attention.projection.matrix(1).shape[-1] for layer in model.layers] == expected


def test_k_never_falls_below_one():
    model = make_stack({"dim_k": 3, "k_reduce_by_layer": 2, "depth": 4})
    _, weights = model(inputs(1, N), need_weights=True)
    assert [w.shape[-1] for w in weights] == [3, 1, 1, 1]


def test_layers_of_a_shared_matrix_use_its_first_columns():
    """Columns that only the first layer uses have no effect on the second."""
    model = make_stack({"dim_k": [7, 3], "include_ff": False})
    first = make_stack({"dim_k": [7, 3], "include_ff": False, "depth": 2})
    first.load_state_dict(model.state_dict())
    with torch.no_grad():
        first.projection.weight[..., 3:] += 1.0
        h = inputs(1, N)
        a, b = (m.layers[1].attention(h, projection=m.projection)[0] for m in (model, first))
        assert torch.equal(a, b)
        a, b = (m.layers[0].attention(h, projection=m.projection)[0] for m in (model, first))
        assert not torch.allclose(a, b)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 13])
def test_every_prefix_of_the_segments_covers_the_whole_sequence(k):
    weight = Linformer(64, 8, 16, start="segments").projection.weight[:, :k]
    centres = weight.abs().argmax(0).sort().values.tolist()
    gaps = [b - a for a, b in zip([0, *centres], [*centres, 64], strict=True)]
    assert max(gaps) <= 2 * 64 / k + 64 / 16


# Law 6: saving, copying, moving, compiling, exporting


def through_a_file(options, model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = make_stack(options)
    assert str(again.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    return again


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_saving_and_copying_change_nothing(options):
    model, x, mask = make_stack(options), inputs(2, 17), holes(2, 17)
    expected = run(model, x, mask)
    for again in (
        through_a_file(options, model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert_close(run(again, x, mask), expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_moving_to_another_dtype(options):
    model, x, mask = make_stack(options), inputs(2, 17), holes(2, 17)
    expected = model(x, mask)[mask].detach()
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        moved = copy.deepcopy(model).to(dtype)
        assert all(t.dtype == dtype for t in moved.state_dict().values())
        y = moved(x.detach().to(dtype), mask)
        assert y.dtype == dtype
        y.sum().backward()
        assert (y[mask].double() - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    "name",
    [
        "encoder, plain",
        "encoder, mean",
        "encoder, window, convolution",
        "encoder, full",
        "encoder, reversible",
        "encoder, C2",
        "causal, plain",
        "causal, mean",
        "causal, local kernel",
        "causal, full",
        "causal, local",
        "causal, rotary",
    ],
)
def test_compiling_changes_nothing(name, masked):
    model, x = make_stack(STACKS[name]), inputs(2, 17)
    mask = holes(2, 17) if masked else None
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = run(model, x, mask)
    found = run(compiled, x, mask)
    assert_close({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected)


EXPORTED = {
    name: STACKS[name]
    for name in (
        "encoder, plain",
        "encoder, sharing none",
        "encoder, convolution",
        "encoder, mean",
        "encoder, max",
        "encoder, local kernel",
        "encoder, rotary",
        "encoder, full",
        "encoder, none",
        "encoder, falling k",
    )
}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("options", **by_name(EXPORTED))
def test_exporting_with_a_dynamic_length_changes_nothing(options, masked):
    model = make_stack(options).eval()
    dynamic = {1: torch.export.Dim("length", min=2, max=N)}
    arguments = (inputs(2, 17).detach(), holes(2, 17)) if masked else (inputs(2, 17).detach(),)
    shapes = (dynamic, dynamic) if masked else (dynamic,)
    program = torch.export.export(model, arguments, dynamic_shapes=shapes).module()
    for length in (2, 5, 16, N):
        x = inputs(2, length).detach()
        mask = torch.arange(length) < torch.tensor([[length], [max(1, length - 3)]])
        more = (mask,) if masked else ()
        found, expected = program(x, *more), model(x, *more)
        torch.testing.assert_close(found[mask], expected[mask])


@pytest.mark.parametrize(
    ("name", "masked"), [("plain", False), ("plain", True), ("mean", True), ("rotary", False), ("full", True)]
)
def test_exporting_a_causal_stack_with_a_dynamic_length(name, masked):
    model = make_stack(CAUSAL[name] | {"depth": 1, "local_kernel": 3}).eval()
    dynamic = {1: torch.export.Dim("length", min=1, max=N)}
    arguments = (inputs(2, 12).detach(), holes(2, 12)) if masked else (inputs(2, 12).detach(),)
    shapes = (dynamic, dynamic) if masked else (dynamic,)
    program = torch.export.export(model, arguments, dynamic_shapes=shapes).module()
    for length in (1, 2, C, C + 1, 2 * C, 5 * C - 1, N):
        x = inputs(2, length).detach()
        mask = torch.arange(length) >= torch.tensor([[0], [min(4, length - 1)]])
        more = (mask,) if masked else ()
        found, expected = program(x, *more), model(x, *more)
        torch.testing.assert_close(found[mask], expected[mask])


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_exporting_a_window_with_a_dynamic_length(masked):
    model = make_stack({"local_window": 3, "depth": 1, "norm": "pre"}).eval()
    dynamic = {1: torch.export.Dim("length", min=1, max=N)}
    arguments = (inputs(2, 12).detach(), holes(2, 12))[: 1 + masked]
    program = torch.export.export(model, arguments, dynamic_shapes=(dynamic,) * len(arguments)).module()
    for length in (1, 2, 3, 7, 15, N):
        x, mask = inputs(2, length).detach(), holes(2, length)
        given = (x, mask)[: 1 + masked]
        torch.testing.assert_close(program(*given)[mask], model(*given)[mask])


# Law 9: the cost is linear


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes, and the sum of all; views of its arguments are not made."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                storage = x.untyped_storage().nbytes() // x.element_size()
                self.largest, self.total = max(self.largest, storage), self.total + storage
        return result


def allocations(n, masked, **options):
    model = Linformer(n, 4, **({"nhead": 2, "dim_ff": 5, "depth": 2} | options))
    x = torch.randn(1, n, 4, requires_grad=True)
    mask = (torch.arange(n) < n - 7)[None] if masked else None
    if masked:
        mask[0, n // 2] = False
    with Largest() as made:
        model(x, mask).sum().backward()
    return made


LINEAR = {
    "plain": {},
    "sharing none": {"parameter_sharing": "none"},
    "convolution": {"method": "convolution"},
    "mean": {"method": "mean"},
    "max": {"method": "max"},
    "local kernel, rotary": {"local_kernel": 3, "rotary": True},
    "window": {"local_window": 8},
    "window, mean": {"local_window": 8, "method": "mean"},
    "reversible": {"reversible": True, "norm": "pre"},
    "C2": {"checkpoint_level": "C2"},
    "none": {"attention": "none"},
    "local": {"attention": "local", "local_window": 8},
    "causal, local": {"attention": "local", "causal": True, "block_size": 8},
}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("options", **by_name(LINEAR))
def test_nothing_of_size_n_times_n_is_allocated(options, masked):
    n = 512
    made, twice = (allocations(m, masked, dim_k=8, **options) for m in (n, 2 * n))
    assert made.largest <= n * 32 < n * n / 10
    assert twice.largest <= 2.01 * made.largest
    assert twice.total <= 2.05 * made.total


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("extra", [{}, {"checkpoint_level": "C2"}, {"local_kernel": 3}], ids=["plain", "C2", "mixing"])
def test_causal_cost_grows_with_length_times_slots_and_block(extra, masked):
    sizes = [(512, 16, 32), (1024, 16, 64), (2048, 32, 64)]  # n, k, c
    found = []
    for n, k, c in sizes:
        made = allocations(n, masked, dim_k=k, causal=True, block_size=c, **extra)
        assert made.largest <= 32 * n < n * n / 10
        found.append(made.total / (n * (k + c)))
    assert max(found[1:]) <= 1.1 * found[0]


def test_the_allocation_count_sees_full_attention():
    assert allocations(128, True, dim_k=8, attention="full", causal=True).largest >= 128 * 128


# Checkpointing


RECOMPUTED = {name: options for name, options in STACKS.items() if "C1" not in name and "C2" not in name}


@pytest.mark.parametrize("level", ["C1", "C2"])
@pytest.mark.parametrize("options", **by_name({n: o for n, o in RECOMPUTED.items() if "reversible" not in n}))
def test_checkpointing_changes_nothing(options, level):
    plain, again = make_stack(options), make_stack(options | {"checkpoint_level": level})
    assert str(again.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    x, mask = inputs(2, 17), holes(2, 17)
    expected = run(plain, x, mask)
    assert_close(run(again, x, mask), expected, rtol=1e-12, atol=1e-12)
    expected.pop("gradient of x")
    x = x.detach()  # an input that needs no gradient
    assert_close(run(again.eval(), x, mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", **by_name({"encoder": {}, "window": ENCODERS["window"], "causal": CAUSAL["plain"]}))
def test_recomputing_draws_the_same_dropout(options):
    dropout = {"dropout": 0.3, "dropout_ff": 0.3}
    plain = make_stack(options | dropout)
    again = make_stack(options | dropout | {"checkpoint_level": "C1"})
    again.load_state_dict(plain.state_dict())
    x, results = inputs(2, 17), []
    for model in (again, plain):
        torch.manual_seed(7)
        results.append(run(model, x, holes_for(x)))
    assert_close(*results, rtol=1e-12, atol=1e-12)


def holes_for(x):
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, 5] = mask[1, 12:] = False
    return mask


@pytest.mark.parametrize(
    "options",
    **by_name(
        {
            "C2": {"checkpoint_level": "C2"},
            "C2, window": {"checkpoint_level": "C2", "local_window": 3},
            "C2, causal": CAUSAL["plain"] | {"checkpoint_level": "C2"},
            "reversible": {"reversible": True, "norm": "pre"},
            "reversible C2": {"reversible": True, "norm": "pre", "checkpoint_level": "C2"},
        }
    ),
)
def test_gradients_are_those_of_the_dropout_that_was_drawn(options):
    """Recomputed with other random numbers, the derivative would not be that of the pass."""
    model, x = make_stack(options | {"dropout": 0.3, "dropout_ff": 0.3}), inputs(2, 17)
    parameters = list(model.parameters())
    directions = [torch.randn_like(p) for p in parameters]
    target = torch.randn_like(x)

    def loss():
        torch.manual_seed(3)
        return (model(x) * target).sum()

    value = loss()
    torch.manual_seed(11)  # the backward pass finds another random state than the forward pass left
    gradients = torch.autograd.grad(value, parameters)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(step * d)
        values.append(loss().detach())
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


# Options


def test_options_agree_with_the_signature():
    signature = inspect.signature(Linformer.__init__)
    options = {name: p for name, p in signature.parameters.items() if name != "self"}
    assert list(options) == list(inspect.signature(StackOptions).parameters)
    documented = inspect.getdoc(Linformer)
    assert all(f"    {name}: " in documented for name in options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"full_attention": True, "attention": "none"}, ["full_attention=True", "attention='none'"]),
        ({"full_attention": True, "attention": "local"}, ["full_attention=True", "attention='local'"]),
        ({"nhead": 3}, ["channels=10", "nhead=3", "dim_d"]),
        ({"one_kv_head": True, "kv_heads": 2}, ["one_kv_head=True", "kv_heads=2"]),
        ({"kv_heads": 3}, ["kv_heads=3", "nhead=2"]),
        ({"rotary": True}, ["rotary=True", "5", "dim_d"]),
        ({"local_window": 3, "causal": True}, ["local_window=3", "causal=True", "block_size"]),
        ({"local_window": 3, "attention": "full"}, ["local_window=3", "attention='full'"]),
        ({"local_window": 3, "full_attention": True}, ["local_window=3", "attention='full'"]),
        ({"local_window": 3, "attention": "none"}, ["local_window=3", "attention='none'"]),
        ({"attention": "local"}, ["attention='local'", "local_window"]),
        ({"block_size": 3}, ["block_size=3", "causal=True"]),
        ({"reversible": True}, ["reversible=True", "norm='post'"]),
        ({"reversible": True, "norm": "pre", "ff_intermediate": 7}, ["reversible=True", "ff_intermediate=7"]),
        ({"reversible": True, "norm": "pre", "checkpoint_level": "C1"}, ["reversible=True", "checkpoint_level='C0'"]),
        ({"ff_intermediate": 7, "include_ff": False}, ["ff_intermediate=7", "include_ff=False"]),
        ({"method": torch.eye(N), "parameter_sharing": "kv"}, ["method", "parameter_sharing='kv'"]),
        ({"method": torch.eye(N), "context_size": 7}, ["method", "context_size=7"]),
        ({"cross_attention": "full"}, ["cross_attention='full'", "context_size"]),
        ({"context_k": 4}, ["context_k=4", "context_size"]),
        ({"cross_attention": "none", "context_size": 7}, ["cross_attention", "'none'"]),
        ({"dim_k": [3], "depth": 2}, ["dim_k lists 1 sizes", "depth of 2"]),
        ({"dim_k": [3, 2], "k_reduce_by_layer": 1}, ["dim_k", "[3, 2]", "k_reduce_by_layer is 1"]),
        ({"local_kernel": 4}, ["local_kernel must be odd", "4"]),
        ({"causal": True, "dim_k": 14, "block_size": 4}, ["block_size = 4", "14 * 4 / 21", "3 and 6"]),
        ({"causal": True, "dim_k": 22}, ["1 <= k <= 21", "k = 22"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_combination_is_an_error_that_names_both_options(options, names):
    with pytest.raises(ValueError) as caught:
        make_stack(options)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "middle"}, "norm must be one of 'pre', 'post'; got 'middle'"),
        ({"checkpoint_level": "C3"}, "checkpoint_level must be one of 'C0', 'C1', 'C2'; got 'C3'"),
        ({"attention": "linear"}, "attention must be one of .*; got 'linear'"),
        ({"parameter_sharing": "all"}, "parameter_sharing must be one of .*; got 'all'"),
        ({"activation": "tanh"}, "activation must be one of 'gelu', 'relu', 'silu'; got 'tanh'"),
        ({"method": "random"}, "method must be one of .*; got 'random'"),
        ({"start": "zeros"}, "start must be one of 'random', 'segments'; got 'zeros'"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"nhead": 0}, "nhead must be at least 1, got 0"),
        ({"dim_k": 0}, "k must be at least 1, got 0"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"dim_d": 0}, "dim_d must be at least 1, got 0"),
        ({"dim_ff": 0}, "dim_ff must be at least 1, got 0"),
        ({"ff_intermediate": 0}, "ff_intermediate must be at least 1, got 0"),
        ({"w_o_intermediate_dim": 0}, "w_o_intermediate_dim must be at least 1, got 0"),
        ({"context_size": 0}, "context_size must be at least 1, got 0"),
        ({"local_window": -3}, "local_window must not be negative, got -3"),
        ({"local_kernel": -3}, "local_kernel must .*, got -3"),
        ({"attention": "local", "causal": True, "block_size": 0}, "block_size must be at least 1, got 0"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_an_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        make_stack(options)


@pytest.mark.parametrize("name", ["input_size", "channels"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Linformer(**({"input_size": 8, "channels": 4, "dim_k": 2} | {name: 0}))


def test_a_mistyped_option_is_an_error():
    with pytest.raises(TypeError, match="dim_kk"):
        Linformer(8, 4, 2, dim_kk=3)
    with pytest.raises(TypeError, match="positional"):
        Linformer(8, 4, 2, 16)


def test_bad_input_is_an_error_that_names_the_argument():
    stack, x = make_stack({}), inputs(2, 5)
    with pytest.raises(ValueError, match=r"\(batch, length, channels=10\), got \(2, 5, 7\)"):
        stack(x[..., :7])
    with pytest.raises(ValueError, match=r"got \(5, 10\)"):
        stack(x[0])
    with pytest.raises(ValueError, match=r"mask must be \(batch, length\) = \(2, 5\), got \(2, 4\)"):
        stack(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be .* got \(2, 5, 5\)"):
        stack(x, torch.ones(2, 5, 5, dtype=torch.bool))
    for kind in (torch.float32, torch.long):
        with pytest.raises(ValueError, match=rf"mask must be bool, .* got {kind}"):
            stack(x, torch.ones(2, 5, dtype=kind))


def test_memory_is_checked():
    stack = make_stack({"context_size": 7, "context_channels": 3})
    context = torch.randn(2, 7, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="hand forward its memory"):
        stack(inputs(2, 5))
    with pytest.raises(ValueError, match=r"context of 8, .* at most context_size=7"):
        stack.memory(torch.randn(2, 8, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="empty"):
        stack.memory(context[:, :0])
    with pytest.raises(ValueError, match=r"\(batch, length, context_channels=3\), got \(2, 7, 10\)"):
        stack.memory(inputs(2, 7))
    with pytest.raises(ValueError, match=r"mask must be .* = \(2, 7\), got \(2, 6\)"):
        stack.memory(context, torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="no cross-attention"):
        make_stack({}).memory(context)
    with pytest.raises(ValueError, match="no cross-attention"):
        make_stack({})(inputs(2, 5), memory=stack.memory(context))
    assert stack(inputs(2, 5), memory=stack.memory(context)).shape == (2, 5, CHANNELS)
    own = make_stack({"method": torch.randn(N, 5), "dim_k": 5, "context_size": 7, "cross_attention": "full"})
    assert own(inputs(2, 5), memory=own.memory(inputs(2, 7))).shape == (2, 5, CHANNELS)


def test_a_step_without_the_memory_it_needs_is_an_error():
    stack = make_stack(CAUSAL["plain"] | {"context_size": 7})
    with pytest.raises(ValueError, match="memory"):
        stack.step(inputs(1, 1), stack.new_state(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", **by_name({"encoder": {}, "causal": CAUSAL["plain"], "window": ENCODERS["window"]}))
def test_all_methods_and_sharings_train(options, method):
    for sharing in SHARINGS:
        model = make_stack(options | {"method": method, "parameter_sharing": sharing})
        model(inputs(2, N)).square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("n", [1, 2 * C, 2 * C + 1])
@pytest.mark.parametrize("options", **by_name(STACKS))
def test_every_parameter_has_a_gradient_at_every_length(options, n):
    model = make_stack(options)
    for mask in (None, torch.arange(n) >= torch.tensor([0, n // 2])[:, None]):
        model.zero_grad()
        model(inputs(2, n), mask).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("method", ["learnable", "convolution"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_blocks_that_no_query_sees_as_slots_give_a_gradient_of_zeros(sharing, method):
    model = make_stack(CAUSAL["plain"] | {"parameter_sharing": sharing, "method": method})
    for n, seen in ((2 * C, False), (2 * C + 1, True)):
        model.zero_grad()
        model(inputs(2, n)).square().sum().backward()
        parameters = [p for m in model.modules() if isinstance(m, Projection) for p in m.parameters()]
        assert parameters
        assert all(p.grad is not None and bool(p.grad.any()) is seen for p in parameters)


# The user's own projections


def test_a_matrix_of_ones_own():
    matrix = torch.randn(N, 7, dtype=torch.float64)
    model = make_stack({"method": matrix})
    same = make_stack({})
    state = model.state_dict()
    state["projection.weight"] = state.pop("projection.keys")
    same.load_state_dict(state)
    x, mask = inputs(2, 17), holes(2, 17)
    torch.testing.assert_close(model(x, mask), same(x, mask))


@pytest.mark.parametrize("shape", [(N - 1, 7), (N + 1, 7), (N, 5), (3, N, 7)], ids=str)
def test_a_matrix_of_the_wrong_size_is_an_error(shape):
    heads, rows, columns = (1, *shape)[-3:]
    message = rf"{rows} positions to {columns} slots with {heads} heads, .* {N} positions to 7 slots with 1 or 2 heads"
    with pytest.raises(ValueError, match=message):
        make_stack({"method": torch.randn(shape)})


def test_a_module_of_ones_own_in_a_causal_stack():
    class Halve(torch.nn.Module):
        def forward(self, x):  # (b, 4, d) -> (b, 2, d)
            return (x[:, ::2] + x[:, 1::2]) / 2

    options = {"causal": True, "block_size": 4, "dim_k": 10}
    own = prepare(Linformer(20, CHANNELS, **(SIZES | options), method=Halve()))
    mean = prepare(Linformer(20, CHANNELS, **(SIZES | options), method="mean"))
    own.load_state_dict(mean.state_dict())
    x = inputs(2, 19)
    torch.testing.assert_close(own(x), mean(x))


def test_a_module_that_takes_no_empty_batch_has_a_gradient_at_every_length():
    class Shorten(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.randn(R, C))

        def forward(self, x):
            if not len(x):
                raise RuntimeError("an empty batch")
            return self.matrix @ x

    model = make_stack(CAUSAL["plain"] | {"method": Shorten()})
    for n, seen in ((2 * C, False), (2 * C + 1, True)):
        model.zero_grad()
        model(inputs(2, n), torch.ones(2, n, dtype=torch.bool)).square().sum().backward()
        assert bool(model.projection.maps[0].matrix.grad.any()) is seen


# Parameter counts


def expected_parameters(
    *, channels, dim_k, dim_ff, nhead, depth, n, head_dim, kv_heads=None, sharing="layerwise", kernel=0, norm="post",
    gated=False, bias=False, w_o=None, inner=None, ff=True, context=None, context_channels=None, attention="linformer",
    block=None, method="learnable",
):  # fmt: skip
    """Counted by hand: every term is a matrix or a vector that the paper, or the option, has."""
    g = kv_heads or nhead
    of_layer = {"none": 2 * g, "headwise": 2, "kv": 1, "layerwise": 0}[sharing]
    rows, columns = (block, dim_k * block // n) if block else (n, dim_k)
    matrix = {"learnable": rows * columns, "convolution": -(-rows // columns), "mean": 0}[method]
    projections = 1 if sharing == "layerwise" else depth * of_layer
    total = matrix * projections if attention == "linformer" else 0
    for i in range(depth):
        width = channels if i == 0 or inner is None else inner
        out = channels if i == depth - 1 or inner is None else inner

        def attend(source, width=width):
            maps = width * nhead * head_dim + 2 * source * g * head_dim + bias * (nhead + 2 * g) * head_dim
            hidden = nhead * head_dim
            if w_o is None:
                return maps + hidden * width + width
            return maps + hidden * w_o + w_o + w_o * width + width

        if attention != "none":
            total += attend(width) + 2 * width
        if context:
            total += attend(context_channels or channels) + 2 * width
        if kernel:
            total += width * kernel + width + 2 * width
        if ff:
            total += width * dim_ff * (1 + gated) + dim_ff * (1 + gated) + dim_ff * out + out
            total += 2 * (width if norm == "pre" else out)
            total += (width * out + out) if width != out else 0
    if context and attention == "linformer":
        total += context * min(dim_k, context) * projections
    return total + (2 * channels if norm == "pre" else 0)


COUNTS = {
    "plain": ({}, {}),
    "pre": ({"norm": "pre"}, {"norm": "pre"}),
    "none": ({"parameter_sharing": "none"}, {"sharing": "none"}),
    "headwise": ({"parameter_sharing": "headwise"}, {"sharing": "headwise"}),
    "kv": ({"parameter_sharing": "kv"}, {"sharing": "kv"}),
    "convolution": ({"method": "convolution"}, {"method": "convolution"}),
    "mean": ({"method": "mean"}, {"method": "mean"}),
    "one kv head": ({"one_kv_head": True}, {"kv_heads": 1}),
    "gated": ({"gated": True}, {"gated": True}),
    "kernel": ({"local_kernel": 5}, {"kernel": 5}),
    "bias": ({"qkv_bias": True}, {"bias": True}),
    "w_o": ({"w_o_intermediate_dim": 7}, {"w_o": 7}),
    "inner": ({"ff_intermediate": 7}, {"inner": 7}),
    "inner, pre, kernel": ({"ff_intermediate": 7, "norm": "pre", "local_kernel": 3}, {"inner": 7, "norm": "pre", "kernel": 3}),
    "no ff": ({"include_ff": False}, {"ff": False}),
    "full": ({"attention": "full"}, {"attention": "full"}),
    "no attention": ({"attention": "none"}, {"attention": "none"}),
    "window": ({"local_window": 3}, {}),
    "causal": ({"causal": True, "block_size": 3, "dim_k": 14}, {"block": 3, "dim_k": 14}),
    "causal, none": (
        {"causal": True, "block_size": 3, "dim_k": 14, "parameter_sharing": "none"},
        {"block": 3, "dim_k": 14, "sharing": "none"},
    ),
    "context": ({"context_size": 13, "context_channels": 3}, {"context": 13, "context_channels": 3}),
    "context, kv": (
        {"context_size": 5, "context_channels": 3, "parameter_sharing": "kv"},
        {"context": 5, "context_channels": 3, "sharing": "kv"},
    ),
    "reversible": ({"reversible": True, "norm": "pre"}, {"norm": "pre"}),
}  # fmt: skip


@pytest.mark.parametrize(("options", "meaning"), **by_name(COUNTS))
def test_parameter_count(options, meaning):
    sizes = {"nhead": 2, "depth": 3, "dim_ff": 11}
    model = Linformer(N, CHANNELS, **({"dim_k": 7, "dim_d": 3} | sizes | options))
    expected = expected_parameters(**({"channels": CHANNELS, "dim_k": 7, "n": N, "head_dim": 3} | sizes | meaning))
    assert sum(p.numel() for p in model.parameters()) == expected


# The example of the first system, as written


@pytest.mark.slow
def test_the_long_example():
    model = Linformer(
        input_size=262144,
        channels=64,
        dim_d=256,
        dim_k=128,
        dim_ff=128,
        dropout_ff=0.15,
        nhead=4,
        depth=2,
        dropout=0.1,
        activation="gelu",
    ).eval()
    with torch.no_grad():
        y = model(torch.randn(1, 262144, 64))
    assert y.shape == (1, 262144, 64)
    assert y.isfinite().all()
