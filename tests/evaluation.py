"""Models, a tokenizer and data sets for evaluation: small, but of the real formats, as lines of JSON."""

import json
import random
from functools import cache
from pathlib import Path

import torch
from models import config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runningtensor import RunningTensorForCausalLM

PROSE = """
    the of old river stone mill was near a bridge where people from town met in winter and spoke about their long
    journeys over hills while others sold bread or fish by market square until evening light had gone from windows
"""


@cache
def texts() -> list[str]:
    """Four documents of sentences of a few words at random, most of them with a name or a number of their own."""
    rng = random.Random(0)
    made = []
    for _ in range(4):
        sentences = []
        for _ in range(80):
            words = rng.choices(PROSE.split(), k=rng.randrange(9, 16))
            name = "".join(rng.choices("bdfgklmnprst", k=4)) + "".join(rng.choices("aeiou", k=3))
            words[rng.randrange(6, len(words))] = rng.choice([name.capitalize(), str(rng.randrange(1000, 10**6))])
            sentences.append(" ".join([words[0].capitalize(), *words[1:]]))
        made.append(". ".join(sentences) + ".")
    return made


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, which any text survives."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=letters, special_tokens=["<s>", "</s>"], show_progress=False
    )
    bpe.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def save_model(folder: Path, kind: str = "order 3", seed: int = 0, **changes: object) -> str:
    torch.manual_seed(seed)
    options = {"vocab_size": len(tokenizer()), "initializer_range": 0.1} | changes
    RunningTensorForCausalLM(config(kind, **options)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


ARC = {"id": "1", "question": "Which is hot?", "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]}}
SWAG = {"activity_label": "Cooking", "ctx_a": "A man stands in a kitchen.", "ctx_b": "he", "ctx": "", "label": "1"}
WINO = {"sentence": "Ann thanked Eve as _ had helped.", "option1": "Ann", "option2": "Eve", "answer": "2"}
SIQA = {"context": "Ann gave Eve a lift.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c"}
BOOLQ = {"passage": "A mill is a machine.", "question": "is a mill a machine", "idx": 0, "label": 1}
BOOK = {"id": "1", "question_stem": "Ice is", "choices": ARC["choices"] | {"text": ["hot", "cold", "old"]}}
SCIQ = {"distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "d", "support": "Ice melts."}
PASSAGE = "The bridge was built by Anna Keller in 1931. It is 400 m long"
CLOZE = {"doc_id": "1", "text": f"{PASSAGE}. The bridge was built by", "key": "builder", "value": "Anna Keller"}
ASKED = {
    "doc_id": "1",
    "context": f"[DOC] [TLE] Bridges [PAR] {PASSAGE}.",
    "question": "The bridge was built by",
    "answers": ["Keller", "Anna Keller"],
}
DATA = {  # of each task: the folder of its data set, the splits, an example, and what of it is made longer
    "lambada_openai": ("EleutherAI/lambada_openai", "test", {"text": "She took the key and opened the door"}, "text"),
    "hellaswag": ("Rowan/hellaswag", "train validation", SWAG | {"endings": ["sings", "cooks"] * 2}, "ctx_a"),
    "piqa": ("baber/piqa", "train validation", {"goal": "Cut", "sol1": "a", "sol2": "b", "label": 0}, "goal"),
    "arc_easy": ("allenai/ai2_arc/ARC-Easy", "train validation test", ARC | {"answerKey": "B"}, "question"),
    "arc_challenge": ("allenai/ai2_arc/ARC-Challenge", "train validation test", ARC | {"answerKey": "C"}, "question"),
    "winogrande": ("allenai/winogrande/winogrande_xl", "train validation", WINO, "sentence"),
    "social_iqa": ("lighteval/siqa", "train validation", SIQA | {"label": "2"}, "context"),
    "boolq": ("aps/super_glue/boolq", "train validation", BOOLQ, "passage"),
    "openbookqa": ("allenai/openbookqa/main", "train validation test", BOOK | {"answerKey": "B"}, "question_stem"),
    "sciq": ("allenai/sciq", "train validation test", SCIQ | {"question": "What melts?"}, "support"),
    "wikitext": (
        "EleutherAI/wikitext_document_level/wikitext-2-raw-v1",
        "train validation test",
        {"page": " = Bridge = \n The bridge , built in 1931 , is long . \n"},
        "page",
    ),
    "swde": ("hazyresearch/based-swde-v2", "validation", CLOZE, "text"),
    "fda": ("hazyresearch/based-fda", "validation", CLOZE, "text"),
    "squad_completion": ("hazyresearch/based-squad", "validation", CLOZE, "text"),
    "based_nq": ("hazyresearch/based_nq_2048", "validation", ASKED, "context"),
    "based_triviaqa": ("hazyresearch/based_triviaqa", "validation", ASKED, "context"),
    "based_drop": ("hazyresearch/based_drop", "validation", ASKED, "context"),
}


def save_data(folder: Path, *tasks: str, count: int = 3) -> Path:
    """Each example `count` times, each time a sentence longer."""
    for name, splits, example, longer in (DATA[task] for task in tasks or DATA):
        (folder / name).mkdir(parents=True)
        rows = [example | {longer: i * "Once more. " + example[longer]} for i in range(count)]
        for split in splits.split():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
