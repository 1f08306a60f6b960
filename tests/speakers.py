"""Tiny models in folders, with a tokenizer of one token a character, and a server of them."""

import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import torch
from models import build
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyzUA :\n[]."
SPEAKER = (  # a chat template: [what is asked]:what is answered</s>
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'assistant' %}"
    ":{{ m.content }}{{ eos_token }}\n{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "</s>")


def tokenizer(template=None, eos="</s>"):
    words = Tokenizer(WordLevel({c: i for i, c in enumerate((*CHARACTERS, *SPECIAL))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def folder(path, kind="order 3", template=None, eos="</s>", loaded=False):
    """A model in a folder; loaded: it and its tokenizer instead. It ends with `eos`, and writes nothing special."""
    words = tokenizer(template, eos)
    model = build(kind, torch.float32, vocab_size=len(words), eos_token_id=words.eos_token_id)
    model.lm_head.weight.data[-len(SPECIAL) :] = 0
    model.save_pretrained(path)
    words.save_pretrained(path)
    return (model, words) if loaded else path


@contextmanager
def served(path, *options):
    """`runningtensor serve`, once it answers; options as on the command line, --port first."""
    command = [sys.executable, "-m", "runningtensor", "serve", path, *options, "--device", "cpu"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{options[1]}"
    try:
        for _ in range(300):
            time.sleep(0.1)
            assert process.poll() is None, process.stderr.read()
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                continue
        else:
            raise AssertionError(f"{url} never answered")
        yield url
    finally:
        process.terminate()
        process.communicate()
