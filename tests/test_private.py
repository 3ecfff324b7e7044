"""Private names of torch, transformers and Keras: each behaves as expected, and only ``linformers/private.py`` uses any."""

import ast
import copy
import itertools
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, PreTrainedModel, Trainer, TrainingArguments

import linformers
from linformers import private
from linformers.hf import LinformerConfig, LinformerForMaskedLM, LinformerForSeq2SeqLM

SOURCE = Path(linformers.__file__).parent
# Private methods that classes here override: if a new version has no such method, ours would never be called.
OVERRIDDEN = {
    Trainer: (
        "_clip_grad_norm",
        "_get_grad_norm",
        "_get_num_items_in_batch",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_maybe_log_save_evaluate",
        "_save_checkpoint",
    ),
    PreTrainedModel: ("_init_weights", "_resize_token_embeddings"),
    nn.Module: ("_load_from_state_dict",),
}
PYTHON = {"_getframe", "_replace"}  # of sys, and of every NamedTuple


def tiny(kind=LinformerForMaskedLM, **options):
    config = LinformerConfig(
        vocab_size=13,
        hidden_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=7,
        max_position_embeddings=11,
        proj_k=3,
        **options,
    )
    return kind(config)


def test_global_hooks_are_seen():
    assert not private.has_global_hook()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert private.has_global_hook()
    finally:
        handle.remove()
    assert not private.has_global_hook()


def test_transforms_are_seen():
    seen = []

    def square(x):
        seen.append(private.are_functorch_transforms_active())
        return (x * x).sum()

    square(torch.ones(3))
    torch.func.grad(square)(torch.ones(3))
    assert seen == [False, True]


def test_kinds_of_hooks():
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        module = nn.Linear(2, 3)
        assert not private.has_hooks(module)
        getattr(module, register)(lambda *_: None)
        assert private.has_hooks(module), register


def test_own_parameters():
    module = nn.Linear(2, 3, bias=False)
    assert private.own_parameter(module, "weight") is module.weight
    assert private.own_parameter(module, "bias") is None
    nn.utils.parametrizations.weight_norm(module)
    assert private.own_parameter(module, "weight") is None


def test_children_by_every_name():
    module = nn.Module()
    module.one = module.two = nn.Linear(2, 3)
    assert [name for name, _ in private.children(module)] == ["one", "two"]


def test_subclasses_of_tensors():
    assert not private.is_traceable_wrapper_subclass(nn.Parameter(torch.ones(2)))
    assert private.is_traceable_wrapper_subclass(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))


def test_fused_attention_and_its_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    expected = F.softmax(q @ k.mT / 8**0.5, -1) @ v
    out, logsumexp = private.flash(q.detach(), k.detach(), v.detach())
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(logsumexp, (q @ k.mT / 8**0.5).logsumexp(-1).detach())
    gradient = torch.randn_like(out)
    found = private.flash_backward(gradient, q.detach(), k.detach(), v.detach(), out, logsumexp, 0.0, False)
    for one, right in zip(found, torch.autograd.grad(expected, (q, k, v), gradient), strict=True):
        torch.testing.assert_close(one, right)


def test_fused_attention_in_any_layout():
    """The kernel itself reads beyond the tensors whose channels are apart in memory."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 7, 7, 5))
    for order in itertools.permutations(range(4)):
        back = [order.index(axis) for axis in range(4)]
        moved = [x.permute(order).contiguous().permute(back) for x in (gradient, q, k, v)]
        out, logsumexp = private.flash(*moved[1:])
        torch.testing.assert_close(out, F.softmax(q @ k.mT / 2, -1) @ v)
        found = private.flash_backward(*moved, out.permute(order).contiguous().permute(back), logsumexp, 0.0, False)
        right = private.flash_backward(gradient, q, k, v, out, logsumexp, 0.0, False)
        torch.testing.assert_close(found, right)


def test_events_are_written_without_tensorflow(tmp_path):
    code = """
import sys
from pathlib import Path
from linformers.private import summary_writer
writer = summary_writer(Path(sys.argv[1]))
writer.add_scalar("train/loss", 0.5, 7)
writer.close()
assert "tensorflow" not in sys.modules and "tensorboard.compat.notf" not in sys.modules
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
(path,) = Path(sys.argv[1]).iterdir()
_, event = EventFileLoader(str(path)).Load()
(value,) = event.summary.value
assert (event.step, value.tag, value.tensor.float_val[0]) == (7, "train/loss", 0.5)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_parameters_that_ddp_leaves_out(tmp_path):
    """One process: DDP leaves a gradient that it does not reduce as it is, and has no bucket for it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        private.leave_out_of_ddp(model, ["1.weight", "1.bias"])
        wrapped = nn.parallel.DistributedDataParallel(model)
        seen = []
        wrapped.register_comm_hook(None, lambda _, bucket: seen.append(bucket.buffer().numel()) or future(bucket))
        wrapped(torch.ones(1, 2)).sum().backward()
        assert sum(seen) == 9
        assert model[1].weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


def future(bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_tensors_that_were_loaded(tmp_path):
    tiny().save_pretrained(tmp_path)
    seen = []

    class Watching(LinformerForMaskedLM):
        def _init_weights(self, module):
            seen.extend(map(private.is_initialized, module.parameters(recurse=False)))
            super()._init_weights(module)

    Watching(tiny().config)
    assert seen
    assert not any(seen)
    seen.clear()
    Watching.from_pretrained(tmp_path)
    assert all(seen)


def test_name_of_the_attention():
    config = BertConfig()
    private.set_attention_name(config, "ours")
    assert private.attention_name(config) == "ours"
    assert private.attention_name(copy.deepcopy(config)) == "ours"


def test_embeddings_of_an_inner_model():
    options = {"is_encoder_decoder": True, "decoder_start_token_id": 1, "tie_word_embeddings": False}
    model = tiny(LinformerForSeq2SeqLM, **options)
    found = private.resize_embeddings(model.decoder, 17, None, False)
    assert model.decoder.get_input_embeddings() is found
    assert found.num_embeddings == 17
    assert model.config.vocab_size == 13


def test_weights_of_a_checkpoint(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "checkpoint-1")
    other = tiny()
    trainer = Trainer(other, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    private.load_weights(trainer, str(tmp_path / "checkpoint-1"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_what_is_overridden_is_there():
    for kind, names in OVERRIDDEN.items():
        for name in names:
            assert callable(getattr(kind, name)), (kind, name)


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names(trees):
    """What classes and functions of the package are called, and what its methods set on ``self``."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def uses(tree, own):
    """Line and text of every private name of another package that is imported, read or called."""
    theirs = {name for names in OVERRIDDEN.values() for name in names}
    for scope in ast.walk(tree):
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                names = [part for alias in node.names for part in (*module.split("."), *alias.name.split("."))]
                if not module.startswith("linformers") and (any(map(is_private, names)) or "src" in names):
                    yield node.lineno, ast.unparse(node)
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PYTHON:
                # A method that is defined anew may call the one it replaces, and nothing else may.
                if node.attr not in own or (node.attr in theirs and ast.unparse(node.value) != "super()"):
                    yield node.lineno, ast.unparse(node)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                name = getattr(node.args[1], "value", None)
                if isinstance(name, str) and is_private(name) and name not in own:
                    yield node.lineno, ast.unparse(node)


def test_no_other_file_uses_private_names():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    own = own_names(trees.values()) - {"_attn_implementation", "_is_hf_initialized"}
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} {text}"
        for path, tree in trees.items()
        if path.name != "private.py"
        for line, text in uses(tree, own)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_test_sees_private_names():
    code = "from keras.src import a\nimport torch._C\nx = module._modules\ny = getattr(t, '_is_hf_initialized')\n"
    code += "self.decoder._init_weights(1)\nsuper()._init_weights(1)\nself._ours\n"
    lines = [line for line, _ in uses(ast.parse(code), {"_init_weights", "_ours"})]
    assert sorted(lines) == [1, 2, 3, 4, 5]
