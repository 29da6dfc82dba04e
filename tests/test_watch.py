"""Watching: what is counted, once each, under everything training does, and that the watched model never notices."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import poise
from poise import hf, op, torch_hook
from poise.monitor.record import scalars

WIDTH, HEADS, LENGTH, BATCH = 16, 2, 6, 3


class Attention(nn.Module):
    """Self-attention by one of the operators that a watch finds, or by hand."""

    def __init__(self, how: str = "sdpa", dropout: float = 0.0) -> None:
        super().__init__()
        self.how, self.dropout = how, dropout
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.how == "poise":
            out = poise.attention(q, k, v, mask=poise.causal(), dropout=self.dropout if self.training else 0.0)
        elif self.how == "sdpa":
            dropout = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
            out = F.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two residual layers of attention."""

    def __init__(self, how: str = "sdpa", checkpointed: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(Attention(how, dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.checkpointed:
                x = x + layer(x)
            else:  # what is repeated: a module, or a function that no module hook can see
                part = layer if self.checkpointed != "function" else lambda x, layer=layer: layer.forward(x)
                x = x + checkpoint(part, x, use_reentrant=self.checkpointed == "reentrant")
        return x


def inputs(grad: bool = False) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3), requires_grad=grad)


def model(*args: Any, **kwargs: Any) -> Model:
    torch.manual_seed(1)
    return Model(*args, **kwargs)


LAYERS = ["layers.0", "layers.1"]


def rows(w: poise.Watch) -> dict[str, int]:
    """Rows collected so far in this step, by layer: each call of a layer adds BATCH * LENGTH."""
    return {name: int(summary.rows.max()) for name, summary in w.summaries.items()}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    yield
    assert op._observer is None
    assert torch_hook._handles == []
    assert torch_hook._path.frames == []
    assert torch._C._len_torch_function_stack() == 0


def expected(net: Model, x: Tensor) -> list[poise.ScoreSummary]:
    """The statistics of each layer's scores, by observing the same q, k, v outside of any watch."""
    made = []
    with torch.no_grad():
        for layer in net.layers:
            q, k, v = layer.project(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # type: ignore[operator]
            made.append(poise.observe(q, k, v, mask=poise.causal(), impl="reference")[1].reduce("head"))
            x = x + layer(x)
    return made


class TestWhatIsSeen:
    @pytest.mark.parametrize("how", ["sdpa", "poise"])
    def test_the_numbers_are_the_references(self, how: str) -> None:
        net, x = model(how), inputs()
        with poise.watch(net) as w, torch.no_grad():
            net(x)
            summaries = w.summaries
        assert list(summaries) == LAYERS
        for summary, want in zip(summaries.values(), expected(net, x), strict=True):
            assert torch.equal(summary.rows, want.rows)
            for name in ("max_logit", "entropy", "responsiveness", "sink_mass", "std"):
                assert torch.allclose(summary.mean(name), want.mean(name), atol=1e-5)
                assert torch.allclose(summary.max(name), want.max(name), atol=1e-5)

    @pytest.mark.parametrize("how", ["sdpa", "poise"])
    @pytest.mark.parametrize("training", [False, True])
    def test_outputs_and_gradients_change_by_rounding_at_most(self, how: str, training: bool) -> None:
        net, results = model(how).train(training), []
        for watched in (False, True):
            x = inputs(grad=True)
            net.zero_grad()
            w = poise.watch(net) if watched else None
            out = net(x)
            out.square().sum().backward()
            results.append((out.detach(), x.grad, net.layers[0].project.weight.grad))  # type: ignore[union-attr]
            if w is not None:
                w.close()
        for plain, seen in zip(*results, strict=True):
            assert (plain - seen).abs().max() <= 2e-6 * plain.abs().max()

    def test_what_poise_computes_by_torch_ops_is_not_taken_for_attention_by_hand(self) -> None:
        net = model("poise").double()
        with poise.watch(net, alarms=False) as w:
            net(inputs().double())
        assert w.not_seen == {}
        assert set(w.record["layers"]) == set(LAYERS)

    def test_attention_by_hand_is_reported_as_not_seen(self) -> None:
        net = model("hand")
        with poise.watch(net) as w:
            net(inputs())
        assert set(w.not_seen) == set(LAYERS)
        assert "softmax itself" in w.not_seen["layers.0"]
        assert w.record is None

    def test_a_softmax_module_is_recognised_too(self) -> None:
        class ByHand(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.softmax = nn.Softmax(-1)

            def forward(self, x: Tensor) -> Tensor:
                return self.softmax(torch.bmm(x, x.mT)) @ x

        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), ByHand())
        with poise.watch(net) as w:
            net(inputs())
        assert list(w.not_seen) == ["1"]

    def test_a_classifiers_softmax_is_not_attention(self) -> None:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1))
        with poise.watch(net) as w:
            net(inputs())
        assert w.not_seen == {}

    def test_observe_and_the_drop_in_are_seen_as_well(self) -> None:
        class Both(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                q = x[:, None]
                return poise.observe(q, q, q)[0] + poise.scaled_dot_product_attention(q, q, q)

        net = Both()
        with poise.watch(net) as w:
            net(inputs())
            assert rows(w) == {"Both": 2 * BATCH * LENGTH}

    def test_layers_chooses_by_pattern_or_function(self) -> None:
        net = model()
        for layers in ("layers.1", ["*.1"], lambda name: name.endswith("1")):
            with poise.watch(net, layers=layers) as w:
                net(inputs())
                assert list(w.summaries) == ["layers.1"]

    def test_rows_limits_what_is_summarised(self) -> None:
        net = model()
        with poise.watch(net, rows=4) as w:
            net(inputs())
            assert rows(w) == dict.fromkeys(LAYERS, 4 * BATCH)


class TestForeignCallsRunUntouched:
    """Where poise may not replace a call, the output is bit for bit what it was, and statistics come all the same."""

    def test_with_dropout_no_random_number_is_drawn(self) -> None:
        net = model("sdpa", dropout=0.5).train()
        torch.manual_seed(7)
        plain, after = net(inputs()), torch.rand(1)
        torch.manual_seed(7)
        with poise.watch(net) as w:
            seen = net(inputs())
            assert rows(w) == dict.fromkeys(LAYERS, BATCH * LENGTH)
        assert torch.equal(plain, seen)
        assert torch.equal(after, torch.rand(1))

    def test_in_double_precision(self) -> None:
        net = model().double()
        plain = net(inputs().double())
        with poise.watch(net) as w:
            assert torch.equal(net(inputs().double()), plain)
            assert rows(w) == dict.fromkeys(LAYERS, BATCH * LENGTH)

    def test_under_a_torch_func_transform_it_is_reported(self) -> None:
        net = model()
        with poise.watch(net) as w:
            torch.func.vmap(net)(inputs()[None])
        assert "torch.func" in w.not_seen["layers.0"]


class TestMultiheadAttention:
    @staticmethod
    def attend(need_weights: bool, masks: str, batch_first: bool, training: bool = False) -> None:
        torch.manual_seed(0)
        net = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).train(training)
        x, other = inputs(), torch.randn(BATCH, 4, WIDTH)
        if not batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        causal = torch.ones(LENGTH, LENGTH).triu(1).bool()
        padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        padding[0, 4:] = True
        keys, options = {
            "none": (x, {}),
            "cross": (other, {}),
            "causal": (x, {"attn_mask": causal, "is_causal": True}),
            "padding": (x, {"key_padding_mask": padding}),
            "both": (x, {"attn_mask": causal, "key_padding_mask": padding}),
            "float": (x, {"attn_mask": torch.randn(LENGTH, LENGTH)}),
            "per head": (x, {"attn_mask": torch.randn(BATCH * HEADS, LENGTH, LENGTH)}),
        }[masks]
        plain, weights = net(x, keys, keys, need_weights=True, average_attn_weights=False, **options)
        with poise.watch(net) as w:
            seen, seen_weights = net(x, keys, keys, need_weights=need_weights, average_attn_weights=False, **options)
            summary = w.summaries["MultiheadAttention"]
        assert (plain - seen).abs().max() <= 2e-6 * plain.abs().max()
        if need_weights:
            assert torch.equal(seen_weights, weights)
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)  # [B, H, N]
        assert torch.allclose(summary.mean("entropy"), entropy.mean((0, 2)).double(), atol=1e-5)

    @pytest.mark.parametrize("masks", ["none", "cross", "causal", "padding", "both", "float", "per head"])
    @pytest.mark.parametrize("need_weights", [False, True])
    def test_every_mask_gives_the_same_output_and_the_weights_entropy(self, need_weights: bool, masks: str) -> None:
        self.attend(need_weights, masks, batch_first=True)

    def test_sequence_first_and_training(self) -> None:
        self.attend(False, "padding", batch_first=False, training=True)

    def test_without_a_batch(self) -> None:
        net = nn.MultiheadAttention(WIDTH, HEADS, bias=False).eval()
        x = inputs()[0]
        plain = net(x, x, x, need_weights=False)[0]
        with poise.watch(net) as w:
            assert torch.allclose(net(x, x, x, need_weights=False)[0], plain, atol=1e-6)
            assert rows(w) == {"MultiheadAttention": LENGTH}

    def test_keys_and_values_of_their_own_widths(self) -> None:
        net = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7, batch_first=True).eval()
        call = (inputs(), torch.randn(BATCH, 4, 5), torch.randn(BATCH, 4, 7))
        plain = net(*call, need_weights=False)[0]
        with poise.watch(net) as w:
            assert torch.allclose(net(*call, need_weights=False)[0], plain, atol=1e-6)
            assert rows(w) == {"MultiheadAttention": BATCH * LENGTH}

    def test_keys_it_adds_itself_are_reported_as_not_seen(self) -> None:
        net = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
        with poise.watch(net) as w:
            net(inputs(), inputs(), inputs())
        assert "keys of its own" in w.not_seen["MultiheadAttention"]

    def test_the_encoders_fast_path_is_seen(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        net = nn.TransformerEncoder(layer, 2).eval()
        with torch.no_grad():
            plain = net(inputs())
            with poise.watch(net) as w:
                assert torch.allclose(net(inputs()), plain, atol=1e-5)
                assert rows(w) == dict.fromkeys(["layers.0.self_attn", "layers.1.self_attn"], BATCH * LENGTH)


class TestCountedOnce:
    @pytest.mark.parametrize("how", ["sdpa", "poise"])
    @pytest.mark.parametrize("checkpointed", ["module", "function", "reentrant"])
    def test_a_checkpoints_repetition_is_not_counted(self, how: str, checkpointed: str) -> None:
        plain, net = model(how), model(how, checkpointed=checkpointed)
        gradients = []
        for each in (plain, net):
            x = inputs(grad=True)
            with poise.watch(each) as w:
                each(x).square().sum().backward()
                assert sum(rows(w).values()) == 2 * BATCH * LENGTH
            gradients.append(x.grad)
        assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)

    def test_checkpointed_dropout_of_poise_repeats_itself(self) -> None:
        net = model("poise", checkpointed="module", dropout=0.3).train()
        gradients = []
        for watched in (False, True):
            x = inputs(grad=True)
            torch.manual_seed(5)
            w = poise.watch(net) if watched else None
            net(x).square().sum().backward()
            gradients.append(x.grad)
            if w is not None:
                w.close()
        assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)

    def test_several_forwards_fall_into_one_step_until_the_optimizer_steps(self) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with poise.watch(net) as w:
            for _ in range(2):
                for _ in range(3):  # accumulation
                    net(inputs()).sum().backward()
                optimizer.step()
            net(inputs())
        assert [(r["step"], r["layers"]["layers.0"]["rows"]) for r in w.records] == [
            (0, 3 * BATCH * LENGTH),
            (1, 3 * BATCH * LENGTH),
            (2, BATCH * LENGTH),
        ]

    def test_an_optimizer_of_another_model_ends_no_step(self) -> None:
        net, other = model(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with poise.watch(net) as w:
            other(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert w.step_number == 0

    def test_every_collects_each_so_manieth_step_and_nothing_between(self) -> None:
        net, observed = model(), []
        with poise.watch(net, every=3) as w:
            for _ in range(7):
                net(inputs())
                observed.append(op._observer is not None)
                w.step()
        assert [record["step"] for record in w.records] == [0, 3, 6]
        assert observed == [True, False, False, True, False, False, True]

    def test_two_models_do_not_mix(self) -> None:
        first, second = model("poise"), model("sdpa")
        with poise.watch(first) as a, poise.watch(second) as b:
            first(inputs())
            second(inputs())
            second(inputs())
            assert rows(a) == dict.fromkeys(LAYERS, BATCH * LENGTH)
            assert rows(b) == dict.fromkeys(LAYERS, 2 * BATCH * LENGTH)

    @pytest.mark.parametrize("how", ["sdpa", "poise"])
    def test_a_model_inside_a_watched_one_is_counted_by_both_watches(self, how: str) -> None:
        inner = model(how)
        outer = nn.Sequential(inner, model(how))
        with poise.watch(outer) as a, poise.watch(inner) as b:
            outer(inputs())
            assert rows(a) == dict.fromkeys([f"{i}.{name}" for i in (0, 1) for name in LAYERS], BATCH * LENGTH)
            assert rows(b) == dict.fromkeys(LAYERS, BATCH * LENGTH)

    def test_an_unwatched_model_in_between_is_left_alone(self) -> None:
        net, stranger = model(), model("poise")
        with poise.watch(net) as w:
            stranger(inputs())
            assert w.summaries == {}

    def test_autocast_keeps_its_dtype_and_its_count(self) -> None:
        for how in ("sdpa", "poise"):
            net = model(how)
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                plain = net(inputs())
                with poise.watch(net) as w:
                    seen = net(inputs())
                    assert rows(w) == dict.fromkeys(LAYERS, BATCH * LENGTH)
            assert seen.dtype == plain.dtype
            assert (seen - plain).abs().max() <= 2**-6 * plain.abs().max()

    def test_switching_between_training_and_evaluation(self) -> None:
        net = model("sdpa", dropout=0.5)
        with poise.watch(net) as w:
            net.train()(inputs())
            net.eval()(inputs())
            assert rows(w) == dict.fromkeys(LAYERS, 2 * BATCH * LENGTH)


class TestLifetime:
    def test_nothing_is_registered_on_the_model(self) -> None:
        net = model()
        before = [dict(module.__dict__) for module in net.modules()]
        with poise.watch(net):
            net(inputs())
            assert [dict(module.__dict__) for module in net.modules()] == before

    def test_an_exception_in_a_forward_restores_everything(self) -> None:
        class Failing(Model):
            def forward(self, x: Tensor) -> Tensor:
                super().forward(x)
                raise KeyError("mine")

        net = Failing()
        with pytest.raises(KeyError, match="mine"), poise.watch(net):
            net(inputs())

    def test_after_a_caught_exception_watching_goes_on(self) -> None:
        net = model()
        with poise.watch(net) as w:
            with pytest.raises(RuntimeError):
                net(torch.randn(2, 3))
            net(inputs())
            assert rows(w)["layers.1"] == BATCH * LENGTH

    def test_closing_inside_a_forward_pass_is_safe(self) -> None:
        net = model()
        w = poise.watch(net)
        handle = net.layers[0].register_forward_hook(lambda *_: w.close())
        net(inputs())
        handle.remove()

    def test_close_records_the_open_step_and_may_be_called_twice(self) -> None:
        net = model()
        w = poise.watch(net, first_step=41)
        net(inputs())
        w.close()
        w.close()
        assert w.record is not None
        assert w.record["step"] == 41
        with pytest.raises(RuntimeError, match="this watch is closed"):
            w.step()

    def test_records_hold_what_they_document(self) -> None:
        net = model()
        with poise.watch(net) as w:
            net(inputs())
            summary = w.summaries["layers.0"]
        record = w.record
        assert record is not None
        assert record["schema"] == "poise.watch/1"
        layer = record["layers"]["layers.0"]
        assert layer["heads"] == HEADS
        assert layer["max_logit"]["max"] == summary.max("max_logit").tolist()
        flat = dict(scalars(record))
        assert flat["attention/layers.0/max_logit.max"] == max(layer["max_logit"]["max"])
        assert flat["attention/layers.0/rows"] == BATCH * LENGTH


class TestErrors:
    def test_what_is_no_model(self) -> None:
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got str"):
            poise.watch("bert")  # type: ignore[arg-type]

    @pytest.mark.parametrize(("name", "value"), [("every", 0), ("rows", 0), ("first_step", -1), ("every", 1.5)])
    def test_numbers_out_of_range(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{name} must be an int of at least"):
            poise.watch(model(), **{name: value})

    def test_a_pattern_that_fits_no_module(self) -> None:
        with pytest.raises(ValueError, match=r"layers: 'blocks\.\*' is the path of no module. Paths look like"):
            poise.watch(model(), layers="blocks.*")


@pytest.mark.filterwarnings("ignore")  # torch's own, about global hooks
class TestCompiled:
    def test_it_is_counted_rightly_in_collected_steps_and_compiled_in_the_others(self) -> None:
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph

        net = model("sdpa")
        net.layers[1].how = "poise"
        plain = net(inputs())
        compiled = torch.compile(net, backend=backend)
        with poise.watch(compiled, every=2) as w:  # type: ignore[arg-type]
            for step in range(4):
                assert torch.allclose(compiled(inputs()), plain, atol=1e-5)
                assert rows(w) == ({} if step % 2 else dict.fromkeys(LAYERS, BATCH * LENGTH))
                before = len(graphs)
                compiled(inputs())
                assert step % 2 == 0 or len(graphs) == before  # unwatched, nothing is compiled again
                w.step()

    def test_a_whole_graph_raises_instead_of_miscounting(self) -> None:
        torch._dynamo.reset()
        net = model("poise")
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        compiled(inputs())
        with poise.watch(net), pytest.raises(Exception, match=r"(?s)poise\.watch cannot see into compiled code"):
            compiled(inputs())


class TestHuggingFace:
    @pytest.mark.parametrize("implementation", ["poise", "sdpa"])
    @pytest.mark.parametrize("name", ["llama", "bert", "t5", "gpt2", "vit"])
    def test_statistics_equal_those_of_eagers_attentions(self, implementation: str, name: str) -> None:
        pytest.importorskip("transformers")
        from hf_families import FAMILIES, build
        from hf_families import inputs as family_inputs

        hf.register()
        (family,) = (family for family in FAMILIES if family.name == name)
        call, _ = family_inputs(family, "no mask")
        eager = build(family, "eager")
        net = build(family, implementation)
        with torch.no_grad(), poise.watch(net) as w:
            net(**call)
            summaries = list(w.summaries.values())
            out = eager(**call, output_attentions=True)
        assert w.not_seen == {}
        kinds = ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")
        weights = [tensor for kind in kinds for tensor in (out.get(kind) or ())]
        assert len(summaries) == len(weights)
        entropies = [-(p * p.clamp_min(1e-30).log()).sum(-1).mean((0, 2)) for p in weights]
        assert torch.allclose(
            torch.stack([summary.mean("entropy") for summary in summaries]).sum(0).float(),
            torch.stack(entropies).sum(0),
            atol=1e-4,
        )

    @pytest.mark.parametrize("name", ["Bloom", "DebertaV2", "Longformer", "Falcon", "Mpt"])
    def test_families_that_compute_by_hand_are_listed(self, name: str) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        if name == "Mpt":
            sizes = {"vocab_size": 32, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 32}
        if name == "Longformer":
            sizes |= {"attention_window": 4, "intermediate_size": 16, "max_position_embeddings": 64}
        config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager")
        net = getattr(transformers, f"{name}Model")(config).eval()
        with poise.watch(net) as w, torch.no_grad():
            net(torch.randint(2, 32, (1, 8)))
        assert any("softmax itself" in why for why in w.not_seen.values())

    def test_an_implementation_nobody_can_see_into_is_listed(self) -> None:
        pytest.importorskip("transformers")
        from hf_families import FAMILIES, build

        (family,) = (family for family in FAMILIES if family.name == "llama")
        net = build(family, "flex_attention")
        with poise.watch(net) as w:
            pass
        assert "flex_attention" in w.not_seen["LlamaForCausalLM"]

    def test_checkpointed_training_of_a_loaded_model_counts_once(self) -> None:
        pytest.importorskip("transformers")
        from hf_families import FAMILIES, build
        from hf_families import inputs as family_inputs

        hf.register()
        (family,) = (family for family in FAMILIES if family.name == "llama")
        for implementation in ("poise", "sdpa"):
            net = build(family, implementation).train()
            net.activation_checkpointing_enable()  # type: ignore[operator]
            call, _ = family_inputs(family, "left padding")
            with poise.watch(net) as w:
                net(**call, use_cache=False).logits.sum().backward()
                counts = rows(w)
            assert set(counts.values()) == {call["input_ids"].numel()}


RANK = """
import sys, torch, torch.distributed as dist
import poise
from test_watch import LAYERS, inputs, model
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
net = model()
calls = []
reduce = dist.all_reduce
dist.all_reduce = lambda *a, **k: (calls.append(1), reduce(*a, **k))[1]
with poise.watch(net, layers=(lambda name: name != "layers.1" or rank == 1)) as w:
    for _ in range(3):
        net(inputs()[rank : rank + 2] * (1 + rank))
        w.step()
    assert len(calls) == 3, calls  # one collective a step
halves = [inputs()[:2], inputs()[1:3] * 2]
with poise.watch(net, process_group=None, layers=LAYERS) as alone:
    alone._merger.give_up()
    for half in halves:
        net(half)
last, want = w.record["layers"], alone.record["layers"]
mine = {name: value for name, value in want["layers.0"].items()}
assert last["layers.0"]["rows"] == mine["rows"], last
assert last["layers.0"]["max_logit"]["max"] == mine["max_logit"]["max"]
assert last["layers.0"]["responsiveness"]["min"] == mine["responsiveness"]["min"]
for a, b in zip(last["layers.0"]["entropy"]["mean"], mine["entropy"]["mean"]):
    assert abs(a - b) < 1e-12
assert last["layers.1"]["rows"] == mine["rows"] // 2  # only rank 1 has seen it, both ranks know it
dist.destroy_process_group()
"""


def test_ranks_merge_by_one_collective_a_step(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder), str(Path(poise.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
