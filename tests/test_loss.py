"""The loss is cross entropy, whatever the head and its logits, and never holds more of them than a chunk's."""

import pytest
import torch
from helpers import near
from models import VOCAB, Largest, build, grads, logits, tokens
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from runningtensor.models import loss as losses


@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_the_loss_in_chunks_is_cross_entropy(tied):
    model, ids = build(loss_chunk_size=7, tie_word_embeddings=tied), tokens(3, 11)
    labels = ids.masked_fill(torch.rand(3, 11, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    got = model(ids, labels=labels)
    plain = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert got.logits is None
    near([got.loss], [plain], 1e-12)
    near(grads(model, got.loss), grads(model, plain), 1e-10)
    count = (labels[:, 1:] != -100).sum()
    near([model(ids, labels=labels, num_items_in_batch=2 * count).loss], [plain / 2], 1e-12)


def test_a_batch_without_labels_has_a_loss_of_zero():
    model, ids = build(), tokens(1, 4)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss == 0 and not any(grad.any() for grad in grads(model, loss).values())


@pytest.mark.parametrize("scale", (1e-30, 1, 1e3, 1e30), ids=str)
def test_the_loss_of_any_logits_is_that_of_float64(scale):
    model = build(dtype=torch.float32, loss_chunk_size=5)
    draw = torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(12, 32, generator=draw), torch.randint(VOCAB, (12,), generator=draw)
    hidden[3], targets[3] = torch.nan, -100  # what is not predicted may be anything
    targets[0] = model.lm_head(hidden[0]).argmax()  # of probability 1, but for the smallest scale
    found = []
    for dtype in (torch.float32, torch.float64):
        x, weight = (scale * hidden).to(dtype).requires_grad_(), model.lm_head.weight.detach().to(dtype)
        model.lm_head.weight = torch.nn.Parameter(weight)
        if dtype == torch.float32:
            loss = model.chunked_loss(x, targets, 1)
        else:
            loss = cross_entropy(x.nan_to_num() @ model.lm_head.weight.T, targets, reduction="sum")
        found.append([loss, *torch.autograd.grad(2 * loss, (x, model.lm_head.weight))])
    near(*found, 1e-5)


@pytest.mark.parametrize("size", (1, 60, 4096, 9000))
def test_the_kernel_gives_the_losses_and_gradients_that_torch_gives(monkeypatch, size):
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(8, size, generator=draw), torch.randint(size, (8,), generator=draw)
    logits[1] *= 1e30 if size > 1 else 1
    targets[1], targets[2] = logits[1].argmax(), -100
    logits[3, : size - 1] = -torch.inf  # of probability 1, after blocks of nothing
    targets[3] = size - 1
    logits[4, 1:] = -torch.inf
    found = []
    for kernel in (True, False):
        monkeypatch.setattr(losses, "usable", lambda x, kernel=kernel: kernel)
        given = logits.clone() if kernel else logits.double()
        found.append([losses.cross_entropies_(given, targets), given])
        found[-1][1][2] = 0  # the gradient of what is not predicted is thrown away
    (loss, grad), (wanted_loss, wanted_grad) = found
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-5, atol=1e-7)


def test_labels_that_there_are_not_make_the_kernels_loss_a_nan(monkeypatch):
    monkeypatch.setattr(losses, "usable", lambda x: True)
    found = losses.cross_entropies_(torch.randn(4, 7), torch.tensor([7, -1, 3, -100]))
    assert found.isnan().tolist() == [True, True, False, False]


class Wrapped(torch.nn.Module):
    """As PEFT wraps a head: its weight is not all there is to it."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.weight = head.weight

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "autocast"))
def test_a_head_of_any_kind_has_the_same_loss(autocast):
    model, ids = build(dtype=torch.float32, loss_chunk_size=7).train(), tokens(2, 16)
    found = []
    for head in (model.lm_head, Wrapped(model.lm_head)):
        model.lm_head = head
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(model(ids, labels=ids))
        model.zero_grad()
        found[-1].loss.backward()
        found[-1] = [found[-1].loss, *(p.grad.clone() for p in model.parameters())]
    assert [x.dtype for x in found[0]] == [x.dtype for x in found[1]]
    near(*found, 2e-2 if autocast else 1e-5)


def test_hooks_of_the_head_are_called():
    model, ids, called = build(), tokens(1, 8), []
    model.lm_head.register_full_backward_hook(lambda *_: called.append(True))
    model(ids, labels=ids).loss.backward()
    assert called


def test_logits_are_computed_once_and_no_gradient_that_nobody_wants():
    model, hidden, targets = build(loss_chunk_size=5), torch.randn(16, 32).double(), torch.arange(16)
    product = 2 * 16 * 32 * VOCAB
    for of_hidden, of_weight in ((True, True), (True, False), (False, True)):
        model.lm_head.weight.requires_grad_(of_weight)
        with FlopCounterMode(display=False) as counter:
            model.chunked_loss(hidden.clone().requires_grad_(of_hidden), targets).backward()
        assert counter.get_total_flops() == product * (1 + of_hidden + of_weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_the_loss_on_a_gpu_is_that_of_float64(dtype):
    model = build(dtype=dtype, loss_chunk_size=5).cuda()
    hidden, targets = torch.randn(12, 32).to(dtype).cuda(), torch.arange(12).cuda()
    found = []
    for wide in (dtype, torch.float64):
        x, weight = (y.detach().to(wide).requires_grad_() for y in (hidden, model.lm_head.weight))
        if wide == dtype:
            model.lm_head.weight = weight = torch.nn.Parameter(weight)
            loss = model.chunked_loss(x, targets, 1)
        else:
            loss = cross_entropy(x @ weight.T, targets, reduction="sum")
        found.append([y.double() for y in (loss, *torch.autograd.grad(loss, (x, weight)))])
    near(*found, 1e-5 if dtype == torch.float32 else 1e-2)


def test_training_holds_the_logits_of_one_chunk_at_a_time():
    vocab, chunk, T = 5000, 16, 256
    model, ids = build(dtype=torch.float32, vocab_size=vocab, loss_chunk_size=chunk).train(), tokens(2, T)
    with Largest() as largest:
        model(ids, labels=ids).loss.backward()
    weights = vocab * model.config.hidden_size
    assert largest.numel == max(weights, chunk * vocab) < 2 * T * vocab / 10


def test_only_the_logits_that_are_asked_for_are_computed():
    model, ids = build(), tokens(2, 9)
    everything = logits(model, ids)
    near([logits(model, ids, logits_to_keep=1)], [everything[:, -1:]], 1e-14)
    near([logits(model, ids, logits_to_keep=torch.tensor([2, 5]))], [everything[:, [2, 5]]], 1e-14)
    assert logits(model, ids, labels=ids, return_logits=True, logits_to_keep=2).shape == (2, 2, VOCAB)
