"""The language model: what it computes does not depend on how its tokens are fed, packed, padded or compiled."""

import copy

import pytest
import torch
from helpers import bounds, near, rel
from models import EVERY_KIND, EVERY_MIXER, FULL, LINEAR_OR_HYBRID, VOCAB, Largest, build, config, grads, logits, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

from runningtensor import RunningTensorConfig, RunningTensorForCausalLM
from runningtensor.cli import app
from runningtensor.commands import loadable
from runningtensor.layers import BASELINES
from runningtensor.layers.attention import _packed, _packed_backward
from runningtensor.layers.baselines import Mixer
from runningtensor.models import RunningTensorCache
from runningtensor.models.configuration_running_tensor import MIXERS
from runningtensor.models.costs import flops_a_token

# -- A cache -----------------------------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("cuts", ((11, 1, 1, 7), (1, 19), (2, 2, 16)), ids=str)
def test_tokens_fed_in_parts_give_what_they_give_at_once(kind, cuts):
    model, ids = build(kind), tokens(2, 20)
    cache = RunningTensorCache(model.config)
    parts = [logits(model, part, past_key_values=cache) for part in ids.split(cuts, 1)]
    assert rel(torch.cat(parts, 1), logits(model, ids)) < 1e-6  # RoPE is float32
    assert cache.get_seq_length() == 20


@LINEAR_OR_HYBRID
def test_a_cache_keeps_its_memory_and_is_empty_after_a_reset(kind):
    model, ids = build(kind), tokens(2, 6)
    cache = RunningTensorCache(model.config)
    first = logits(model, ids, past_key_values=cache)
    addresses = [tensor.data_ptr() for tensor in cache.layers[0].read()]
    logits(model, ids[:, :1], past_key_values=cache)
    logits(model, ids, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert rel(logits(model, ids, past_key_values=cache), first) < 1e-12
    assert [tensor.data_ptr() for tensor in cache.layers[0].read()] == addresses


@LINEAR_OR_HYBRID
def test_sequences_of_a_cache_can_be_repeated_selected_and_reordered(kind):
    model, ids = build(kind), tokens(3, 9)
    cache = RunningTensorCache(model.config)
    logits(model, ids[:, :-1], past_key_values=cache)
    last = logits(model, ids)[:, -1]
    for change, order in (
        (lambda cache: cache.batch_repeat_interleave(2), (0, 0, 1, 1, 2, 2)),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), (2, 0)),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), (1, 1, 0)),
    ):
        other = copy.deepcopy(cache)
        change(other)
        step = logits(model, ids[list(order), -1:], past_key_values=other)
        assert rel(step[:, 0], last[list(order)]) < 1e-6


def test_what_a_state_cannot_do_is_refused_in_words():
    model, ids = build(), tokens(1, 5)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        RunningTensorCache(model.config).crop(-1)
    with pytest.raises(ValueError, match="must be a RunningTensorCache, but was a DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\]"):
        model(ids, attention_mask=torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match="batch of 1"):
        model(tokens(2, 5), position_ids=torch.tensor([[0, 1, 0, 1, 2]] * 2), use_cache=False)
    with pytest.raises(ValueError, match="cu_seqlens must be None where there is an attention_mask"):
        model(ids, cu_seqlens=bounds((2, 3)), attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="layer_types must be 2 of"):
        config(layer_types=["linear_attention"])
    with pytest.raises(ValueError, match="key_dims must be a tuple, a width for each key, but was 6"):
        config(key_dims=6)


# -- Padding and packing -----------------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("attention", ("sdpa", "eager"))
def test_padding_on_the_left_changes_nothing(kind, attention):
    model, ids = build(kind, attn_implementation=attention), tokens(1, 9)
    padded = torch.cat((tokens(1, 4, seed=2), ids), 1)
    mask = (torch.arange(13) >= 4).long()[None]
    assert rel(logits(model, padded, attention_mask=mask)[:, 4:], logits(model, ids)) < 1e-6


@pytest.mark.parametrize("kind", ("order 2", "order 3", "order 4", "hybrid", *MIXERS[1:], "gated_deltanet hybrid"))
@pytest.mark.parametrize("how", ("cu_seqlens", "position_ids", "cu_seq_lens_q"))
def test_packed_sequences_are_separate_ones(kind, how):
    model, lengths = build(kind).train(), (4, 1, 9, 6)
    ids = tokens(1, sum(lengths))
    parts = ids.split(lengths, 1)
    packing = bounds(lengths)
    if how == "position_ids":
        packing = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, labels=ids, return_logits=True, **{how: packing})
    apart = [model(part, labels=part, return_logits=True) for part in parts]
    assert rel(packed.logits, torch.cat([y.logits for y in apart], 1)) < 1e-10
    # The first token of a sequence is nobody's label.
    mean = sum(y.loss * (n - 1) for y, n in zip(apart, lengths, strict=True)) / sum(n - 1 for n in lengths)
    near([packed.loss], [mean], 1e-10)
    near(grads(model, packed.loss), grads(model, mean), 1e-10)


def test_a_packed_row_costs_attention_no_more_than_its_sequences_do():
    T, n = 16_384, 64
    shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "layer_types": [FULL]}
    model = build(dtype=torch.float32, loss_chunk_size=512, **shape).train()
    ids = tokens(1, T)
    with Largest() as largest:
        model(ids, labels=ids, cu_seqlens=bounds([n] * (T // n))).loss.backward()
    q = torch.randn(T, 1, 8)
    with Largest() as inside:  # the op, into which no mode sees
        out, sums = _packed._init_fn(q, q, q, bounds([n] * (T // n)))
        _packed_backward._init_fn(out, q, q, q, out, sums, bounds([n] * (T // n)))
    assert inside.numel == T * 8 < largest.numel == T * model.config.intermediate_size < T * T / 100


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_attention_holds_no_scores_of_a_whole_prompt(dtype):
    model, T = build("one of each", dtype).cuda(), 8192
    ids = tokens(1, T).cuda()
    logits(model, ids[:, :64], use_cache=True)  # kernels are made
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits(model, ids, use_cache=True, logits_to_keep=1)
    assert torch.cuda.max_memory_allocated() - before < 4 * T * T  # of one head, in float32


def test_the_output_gate_is_the_layers():
    for gate in ("silu", "sigmoid"):
        assert {layer.mixer.norm.output_gate for layer in build(output_gate=gate).model.layers} == {gate}


# -- Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("order 2", "order 3", "order 4", "hybrid", *MIXERS[1:], "gated_deltanet hybrid"))
def test_a_saved_model_loads_as_it_was(kind, tmp_path):
    model, ids = build(kind, dtype=torch.float32), tokens(2, 9)
    model.save_pretrained(tmp_path)
    found, saved = AutoConfig.from_pretrained(tmp_path).to_dict(), model.config.to_dict()
    assert all(found[name] == saved[name] for name in ("key_dims", "mixer", "mixer_options", "layer_types"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is RunningTensorForCausalLM
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    hidden = AutoModel.from_pretrained(tmp_path)(ids, output_hidden_states=True)
    assert len(hidden.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(model.lm_head(hidden.hidden_states[-1]), logits(model, ids))


@pytest.mark.parametrize(
    ("kind", "missing", "bound"),
    (("order 3", "projection.taps", 3**-0.5), ("gated_deltanet", "dt_bias", 7), ("mamba2", "conv.weight", 0.5)),
)
def test_weights_that_a_checkpoint_lacks_are_drawn_and_the_others_are_loaded(kind, missing, bound, tmp_path):
    model = build(kind, dtype=torch.float32)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    missing = f"model.layers.1.mixer.{missing}"
    del state[missing]
    model.save_pretrained(tmp_path, state_dict=dict(state))  # which it empties
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded[missing].isfinite().all() and 0 < loaded[missing].abs().max() <= bound
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


@pytest.mark.parametrize("kind", ("order 3", "hybrid", *MIXERS[1:]))
@pytest.mark.parametrize("how", ("init_weights", "apply"))
def test_a_model_made_on_the_meta_device_gets_every_weight(kind, how):
    with torch.device("meta"):
        model = RunningTensorForCausalLM(config(kind, hidden_size=64))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    torch.manual_seed(0)
    model.init_weights() if how == "init_weights" else model.apply(model._init_weights)
    torch.manual_seed(0)
    other = RunningTensorForCausalLM(config(kind, hidden_size=64))
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.isfinite().all(), name
        assert p.ndim < 2 or 0.7 < p.std() / q.std() < 1.4, name
    assert not list(model.buffers())  # they would be lost
    for mixer in (layer.mixer for layer in model.model.layers if isinstance(layer.mixer, Mixer)):
        # A mixer's matrices are as it draws them, not with the std of 0.4 that the model has for all others.
        assert 0.9 < mixer.in_proj.weight.abs().max() * 64**0.5 <= 1
        writes = mixer.out_proj
        assert 0.9 < writes.weight.abs().max() * (writes.in_features * 2 * model.config.num_hidden_layers) ** 0.5 <= 1


def residual_rms(layers: int) -> torch.Tensor:
    """Of the residual stream before the first layer and after each, in a model with the default initialisation."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_heads": 8, "key_dims": (8, 8), "value_dim": 16}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4)
    torch.manual_seed(0)
    model = RunningTensorForCausalLM(
        config(**shape, num_hidden_layers=layers, layer_types=kinds, initializer_range=0.02)
    )
    stream = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, out: stream.append(out.square().mean().sqrt()))
    model.eval()(tokens(2, 64), use_cache=False)
    return torch.stack(stream).detach()


def test_the_residual_stream_is_as_large_in_a_deep_model_as_in_a_shallow_one():
    shallow, deep = residual_rms(4), residual_rms(48)
    assert 0.8 < deep[-1] / shallow[-1] < 1.25
    assert (deep[1:] / deep[:-1]).max() < 1.35  # and no layer adds much more than another
    assert deep[23] > deep[-1] / 2


# -- Training and compiling --------------------------------------------------------------------------------------------


@LINEAR_OR_HYBRID
def test_gradient_checkpointing_changes_no_gradient(kind):
    model, ids = build(kind).train(), tokens(2, 9)
    plain = grads(model, model(ids, labels=ids).loss)
    model.gradient_checkpointing_enable()
    near(grads(model, model(ids, labels=ids, use_cache=True).loss), plain, 1e-12)


@EVERY_MIXER
def test_gradient_checkpointing_of_packed_sequences_changes_no_gradient(kind):
    model, ids = build(kind).train(), tokens(1, 9)
    plain = grads(model, model(ids, labels=ids, cu_seqlens=bounds((5, 4))).loss)
    model.gradient_checkpointing_enable()
    near(grads(model, model(ids, labels=ids, cu_seqlens=bounds((5, 4))).loss), plain, 1e-12)


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


POSITIONS = torch.cat([torch.arange(n) for n in (10, 3, 11)])[None]


@pytest.mark.parametrize(
    ("kind", "packing"),
    (
        ("order 3", {}),
        ("order 3", {"position_ids": POSITIONS}),
        ("one of each", {"cu_seqlens": bounds((10, 3, 11))}),
        ("gated_deltanet hybrid", {"position_ids": POSITIONS}),
        ("gla", {"cu_seqlens": bounds((10, 3, 11))}),
        ("gla", {"attention_mask": torch.ones(1, 24)}),
    ),
    ids=(
        "plain",
        "by position_ids",
        "by cu_seqlens, one layer of each kind",
        "by position_ids, gated_deltanet and attention",
        "by cu_seqlens, gla",
        "with a mask of ones, gla",
    ),
)
def test_a_compiled_training_step_is_the_same_step(kind, packing, fresh):
    if torch.__version__ < "2.11":  # which must be told to trace how many sequences there are
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
    model, ids = build(kind).train(), tokens(1, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = model(ids, labels=ids, **packing).loss
    got = compiled(ids, labels=ids, **packing).loss
    near([got], [want], 1e-10)
    near(grads(model, got), grads(model, want), 1e-8)


@pytest.mark.parametrize("kind", ("order 3", "one of each"))
def test_a_compiled_decoding_step_is_the_same_step_and_is_compiled_once_or_twice(kind, fresh):
    model, ids = build(kind), tokens(2, 16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    caches = [RunningTensorCache(model.config) for _ in range(2)]
    for cache in caches:
        logits(model, ids[:, :6], past_key_values=cache)
    for t in range(6, 16):
        want, got = (
            logits(f, ids[:, t : t + 1], past_key_values=cache)
            for f, cache in zip((model, compiled), caches, strict=True)
        )
        assert rel(got, want) < 1e-6
    assert caches[1].get_seq_length() == 16
    assert counter.frame_count <= (1 if kind == "order 3" else 2)


def test_the_default_is_a_model_of_order_3_with_its_own_cache_only():
    full = RunningTensorConfig()
    assert set(full.layer_types) == {"linear_attention"} and len(full.layer_types) == full.num_hidden_layers
    assert (full.num_heads, full.key_dims, full.value_dim) == (8, [15, 15], 128)


# -- Mixers of others --------------------------------------------------------------------------------------------------

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


@EVERY_MIXER
def test_without_a_cache_generate_writes_the_same(kind):
    model, ids = build(kind), tokens(2, 9)
    want = ids
    for _ in range(8):
        want = torch.cat((want, model(want).logits[:, -1:].argmax(-1)), 1)
    assert len(want[:, 9:].unique()) > 2  # it says something
    assert torch.equal(model.generate(ids, **GREEDY), want)
    for use_cache in (True, False):  # what transformers takes for granted is left to the model
        options = GREEDY | {"attention_mask": torch.ones_like(ids), "use_cache": use_cache}
        assert torch.equal(model.generate(ids, **options), want)
    assert model(ids).past_key_values is None and model.config.use_cache is False


@EVERY_MIXER
def test_what_a_mixer_without_padding_and_cache_cannot_do_is_refused_in_words(kind):
    model, ids = build(kind), tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match=r"attention_mask must be all ones: .* 2 that are not"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask must be all ones"):
        model.generate(ids, attention_mask=mask, **GREEDY)
    with pytest.raises(ValueError, match="inputs_embeds must be None"):
        model.generate(inputs_embeds=model.model.embed_tokens(ids), **GREEDY)
    with pytest.raises(ValueError, match=f"use_cache must be False: .*{model.config.mixer}"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match=f"a model that has a cache, but its mixer was '{model.config.mixer}'"):
        RunningTensorCache(model.config)


def test_the_mixers_are_ours_and_every_baseline_but_attention():
    assert set(MIXERS) == {"running_tensor", *BASELINES} - {"attention"}
    for mixer in MIXERS[1:]:
        assert type(build(mixer).model.layers[0].mixer) is BASELINES[mixer]
    assert build("gla", norm_eps=1e-3).model.layers[0].mixer.norm.eps == 8 * 1e-3  # K = 8: the norm has the scale
    with pytest.raises(ValueError, match=r"mixer must be one of .* but was 'attention': .* in layer_types"):
        config(mixer="attention")
    with pytest.raises(ValueError, match=r"mixer must be one of running_tensor, .* but was 'delta'"):
        config(mixer="delta")
    with pytest.raises(ValueError, match="mixer_options must be None for mixer 'running_tensor'"):
        config(mixer_options={"num_heads": 2})
    with pytest.raises(TypeError, match="num_head"):
        build(mixer="deltanet", mixer_options={"num_head": 2})


# -- What it costs -----------------------------------------------------------------------------------------------------


def test_the_flops_of_attention_are_those_that_torch_counts():
    model, L = build("order 3", layer_types=[FULL, FULL], attn_implementation="eager"), 24
    with FlopCounterMode(display=False) as counter:
        model(tokens(1, L))
    # Without a kernel every token is multiplied with all L, as many as one of 2L - 1 sees in the mean.
    assert counter.get_total_flops() / L == flops_a_token(model.config, 2 * L - 1)


@pytest.mark.parametrize(
    ("kind", "products"), (("order 3", 3), ("deltanet", 3), ("gated_deltanet", 3), ("gla", 2), ("mamba2", 2))
)
def test_the_flops_of_a_mixer_are_those_of_its_matrices_and_of_its_rule(kind, products):
    model = build(kind)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - VOCAB * model.config.hidden_size
    states = sum(layer.mixer.state_floats for layer in model.model.layers)
    assert flops_a_token(model.config, 100) == flops_a_token(model.config, 1) == 2 * (matrices + products * states)


def test_the_inspect_command_compares_with_attention_of_the_models_width(tmp_path):
    RunningTensorConfig(hidden_size=512).save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "250"}, catch_exceptions=False)
    assert "attention 8×128" in done.output


@pytest.mark.parametrize("command", ("inspect", "generate", "chat", "serve", "export", "evaluate"))
@pytest.mark.parametrize("model", ("./nowhere", "a/b/nowhere", "a prompt " * 40, ""))
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(model, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command, model, *(["to"] if command == "export" else [])], env={"COLUMNS": "250"})
    assert done.exit_code == 2 and "must be a folder, or owner/name on the hub, and there is no" in done.output


def test_names_on_the_hub_and_folders_are_left_to_transformers(tmp_path, capsys):
    names = ["gpt2", "Qwen/Qwen3-0.6B", str(tmp_path)]
    assert loadable(names) is names and all(loadable(name) is name for name in names)
    said = capsys.readouterr().err
    assert "There is no folder 'gpt2' here: it is looked for on the hub." in said and str(tmp_path) not in said


def test_the_inspect_command_knows_every_mixer(tmp_path):
    model = build("gated_deltanet hybrid")
    model.config.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "250"}, catch_exceptions=False)
    line = next(line for line in done.output.splitlines() if "gated_deltanet 2 of 6×12" in line)
    layer = model.model.layers[0]
    assert f" {layer.mixer.state_floats} " in line and line.count("–") == 3
    assert f" {sum(p.numel() for p in layer.parameters()) / 1000:.3g}K " in line
    assert "A model of gated_deltanet has none." in " ".join(done.output.split())
