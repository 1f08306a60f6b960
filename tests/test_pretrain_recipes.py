"""Recipes compare models of equal size, and say what is not as in the paper."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers comes with the extra hf")

from runningtensor.pretrain.recipes import (
    FREE,
    MODELS,
    RECIPES,
    Recipe,
    changed,
    configuration,
    count,
    deviations,
    paper_600m,
    small_50m,
    tiny_cpu,
)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_models_of_a_recipe_have_equal_parameters(name: str, model: str) -> None:
    ours, theirs = (replace(RECIPES[name](), model=model) for model in ("running-tensor", model))
    counts = [count(configuration(recipe, recipe.vocab_size or 1000)) for recipe in (ours, theirs)]
    assert abs(counts[1] / counts[0] - 1) < 0.01
    layers = [count(configuration(recipe, 1)) for recipe in (ours, theirs)]  # nothing hides behind the embeddings
    assert abs(layers[1] / layers[0] - 1) < 0.01


def test_sizes_are_those_of_their_names() -> None:
    assert 0.59e9 < count(configuration(paper_600m(), 32_000)) < 0.61e9
    assert 49e6 < count(configuration(small_50m(), 32_000)) < 51e6
    paper, default = configuration(paper_600m(), 32_000).to_dict(), type(configuration(paper_600m(), 32_000))()
    assert paper == default.to_dict()  # a configuration without options is the paper's model


def test_a_model_too_large_to_be_matched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp must leave attention an MLP of its own .* but was 100"):
        configuration(replace(small_50m(), mlp=100, model="attention"), 32_000)


def test_settings_are_read_as_their_fields_are() -> None:
    recipe = changed(
        tiny_cpu(),
        ["lr=1e-4", "steps=none", "key_dims=8,4,2", "compile=True", "betas=0.9,0.95", "model=gla", "batch=1_000"],
    )
    assert recipe == replace(
        tiny_cpu(), lr=1e-4, steps=None, key_dims=(8, 4, 2), compile=True, betas=(0.9, 0.95), model="gla", batch=1000
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr", "key=value, of a key there is, but was 'lr'; there are model=running-tensor, .* steps=400, .*keep=3"),
        ("rate=1", "but was 'rate=1'; there are .*lr=0.003"),
        ("lr=fast", "lr must be a number, but was 'fast'"),
        ("lr=-1", "lr must be positive, but was -1"),
        ("lr=nan", "lr must be positive, but was nan"),
        ("steps=1.5", "steps must be a whole number or none, but was '1.5'"),
        ("batch=none", "batch must be a whole number, but was 'none'"),
        ("batch=0", "batch must be at least 1, but was 0"),
        ("compile=yes", "compile must be true or false, but was 'yes'"),
        ("betas=0.9", "betas must be 2 of: a number, with commas between, but was '0.9'"),
        ("betas=0.9,1", r"betas must be at least 0 and below 1, but were \(0.9, 1.0\)"),
        ("key_dims=", "key_dims must be a whole number, with commas between, but was ''"),
        ("model=rwkv", "model must be one of running-tensor, attention, .*, but was 'rwkv'"),
        ("schedule=linear", "schedule must be one of constant, cosine, but was 'linear'"),
    ],
)
def test_wrong_settings_are_clear_errors(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(tiny_cpu(), [setting])


def test_the_paper_is_the_default_and_what_differs_is_said() -> None:
    assert paper_600m() == Recipe()
    assert deviations(paper_600m(), 595_324_304, 10**11, 0.9999) == []
    other = replace(paper_600m(), lr=2e-3, weight_decay=0.1, clip=1.0, warmup=10, schedule="cosine", forget="none")
    other = replace(other, output_gate="sigmoid")
    said = " ".join(deviations(other, 50_000_000, 10**9, 2.0))
    for words in (
        "lr 0.002 (the paper: one of 1e-3, 1e-4, 1e-5)",
        "weight_decay 0.1 (the paper: 0.0)",
        "clip 1.0 (the paper: 0.01)",
        "warmup 10 (the paper: 0)",
        "forget none (the paper: telescoping)",
        "output_gate sigmoid (the paper: silu)",
        "schedule cosine (the paper: constant)",
        "50.0M parameters (the paper: 0.6B)",
        "1,000,000,000 tokens of text",
        "2 epochs (the paper: one)",
    ):
        assert words in said
    said = " ".join(deviations(replace(other, model="gated-deltanet"), 50_000_000, 10**9, 2.0))
    assert "clip 1.0" in said and "forget" not in said and "output_gate" not in said  # RunningTensor's own


def test_what_a_recipe_says_of_the_layer_is_what_its_model_has() -> None:
    other = replace(tiny_cpu(), projection="linear", forget="none", output_gate="sigmoid", heads=2, value_dim=12)
    config = configuration(other, 100)
    for name in ("projection", "forget", "output_gate", "value_dim"):
        assert getattr(config, name) == getattr(other, name) != getattr(paper_600m(), name)
    assert config.num_heads == 2 and tuple(config.key_dims) == other.key_dims


def test_learning_rates() -> None:
    assert [replace(tiny_cpu(), lr=1.0, warmup=0).rate(step, 4) for step in range(4)] == [1, 1, 1, 1]
    assert [replace(tiny_cpu(), lr=1.0, warmup=3).rate(step, 9) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    cosine = replace(tiny_cpu(), lr=1.0, warmup=0, schedule="cosine")
    assert [cosine.rate(step, 4) for step in (0, 2, 4)] == pytest.approx([1, 0.5, 0])


def test_what_may_change_are_fields() -> None:
    assert set(FREE) <= set(Recipe.__dataclass_fields__)
    assert not {"model", "lr", "seed", "batch", "length", "dtype"} & set(FREE)
